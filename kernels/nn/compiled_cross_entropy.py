"""Runs cross-entropy on a CPU as a compiled loop, ``cpu/cross_entropy.cpp``, for rows of logits with a label each.

A row stays in the cache between the passes over it, so that logits come from memory once forward and once backward,
where torch's ops move some 20 bytes more for each. The first call compiles (``cpp``): 0.6 seconds, once a machine.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from fxprec.kernels.cpu.cpp import compiled, pointer
from fxprec.kernels.nn.cross_entropy_reference import check_bounds, factors

_SOURCE: Final = "cpu/cross_entropy.cpp"


class _Logits(ctypes.Structure):
    """Struct ``Logits`` of the C++ source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "labels")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "stride", "ignored")),
        *((name, ctypes.c_float) for name in ("smoothing", "z_loss")),
    )


def launch_compiled(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, stats: Tensor,
    losses: Tensor | None, shares: Tensor | None, grad_output: Tensor | None, denominator: Tensor | None, scale: float,
    gradient: Tensor | None,
) -> None:  # fmt: skip
    """Run ``cross_entropy_kernels.launch`` for labels without class weights, with torch's number of threads.

    Raises:
        IndexError: a label outside of [0, C), as torch on a CPU.
        CompilerError: nothing can be compiled here.
    """
    rows, columns = logits.shape
    # The loop reads at labels without a check.
    check_bounds(target, columns, ignore_index)
    labels = target.contiguous()
    of = _Logits(
        logits.data_ptr(), labels.data_ptr(), rows, columns, logits.stride(0), ignore_index, label_smoothing, z_loss
    )
    library, threads, low = compiled(_SOURCE), torch.get_num_threads(), logits.dtype is torch.bfloat16
    if losses is not None:
        library.fxprec_cross_entropy_forward(
            ctypes.byref(of), low, pointer(stats), pointer(losses), pointer(shares), threads
        )
    if gradient is not None:
        factor = factors(stats, scale, grad_output, denominator)
        library.fxprec_cross_entropy_backward(
            ctypes.byref(of), low, pointer(stats), pointer(factor), pointer(gradient),
            ctypes.c_int64(gradient.stride(0)), threads,
        )  # fmt: skip
