"""Runs max pooling on a CPU as a compiled loop, ``cpu/max_pool.cpp``, for channels_last tensors.

torch's kernel writes eight bytes a result for the backward, which fills a gradient with zeros and adds to it. The
first call compiles (``cpp``), once a machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.cpu.cpp import compiled, pointer

_SOURCE: Final = "cpu/max_pool.cpp"


def forward(x: Tensor, y: Tensor, where: Tensor | None, window: Sequence[int]) -> None:
    """Write the maxima and, if ``where`` is given, their places in the windows.

    Args:
        x: bfloat16 or float32 [N, C, H, W], channels_last, on a CPU; y: its result, the same.
        where: int8 of y's shape and layout.
        window: KH, KW, SH, SW, PH, PW.

    Raises:
        CompilerError: nothing can be compiled here.
    """
    compiled(_SOURCE).fxprec_max_pool_forward(
        _pool(x, y, window), x.dtype is torch.bfloat16, pointer(x), pointer(y), pointer(where),
        torch.get_num_threads(),
    )  # fmt: skip


def backward(dy: Tensor, where: Tensor, dx: Tensor, window: Sequence[int]) -> None:
    """Write the gradient of x; layouts as in ``forward``."""
    compiled(_SOURCE).fxprec_max_pool_backward(
        _pool(dx, dy, window), dx.dtype is torch.bfloat16, pointer(dy), pointer(where), pointer(dx),
        torch.get_num_threads(),
    )  # fmt: skip


def _pool(x: Tensor, y: Tensor, window: Sequence[int]) -> Any:
    """Return the sizes as the struct of the C++ source, whose members are all int64."""
    return (ctypes.c_int64 * 12)(*x.shape, *y.shape[2:], *window)
