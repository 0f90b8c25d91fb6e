"""Rotary position embedding on a CPU as a compiled loop: ``cpu/rope.cpp``. The first call compiles (``cpp``)."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.cpu.cpp import compiled

_SOURCE: Final = "cpu/rope.cpp"
_SIZES: Final = (
    "batch heads positions dim half x_batch x_head x_position out_batch out_head out_position "
    "cos_batch cos_position sin_batch sin_position wide neighbours inverse"
).split()


class _Rope(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "out")),
        *((name, ctypes.c_int64) for name in _SIZES),
    )


def launch_compiled(
    x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, tables: list[int], rotary: int, interleaved: bool, inverse: bool
) -> None:
    """Rotate x into out, with torch's number of threads.

    Args:
        x, out: bfloat16 or float32 [B, H, T, D] on a CPU, columns next to each other.
        cos, sin: bfloat16 or float32 [..., T, columns], columns next to each other.
        tables: strides of cos's batch and positions and of sin's.
        rotary: columns that turn.

    Raises:
        CompilerError: nothing can be compiled here.
    """
    wide = cos.shape[-1] == rotary
    of: Any = _Rope(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), *x.shape, rotary // 2, *x.stride()[:3],
        *out.stride()[:3], *tables, wide, interleaved, inverse,
    )  # fmt: skip
    low, low_tables = (each.dtype is torch.bfloat16 for each in (x, cos))
    compiled(_SOURCE).fxprec_rope(ctypes.byref(of), low, low_tables, torch.get_num_threads())
