"""Runs rotary position embedding on a CPU as a compiled loop, ``cpu/rope.cpp``. The first call compiles (``cpp``)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.cpu.cpp import compiled
from fxprec.kernels.launch.direct import Run

_SOURCE: Final = "cpu/rope.cpp"
_SIZES: Final = (
    "batch heads positions dim half x_batch x_head x_position out_batch out_head out_position "
    "cos_batch cos_position sin_batch sin_position wide neighbours inverse"
).split()


class _Rope(ctypes.Structure):
    """Struct ``Rope`` of the C++ source."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _SIZES)


def launch_compiled(
    x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, tables: Sequence[int], rotary: int, interleaved: bool,
    inverse: bool,
) -> None:  # fmt: skip
    """Write the rotation of x to out.

    Args: see ``compiled_for``.

    Raises:
        CompilerError: nothing can be compiled here.
    """
    compiled_for(x, out, cos, tables, rotary, interleaved, inverse)(x, out, cos, sin)


def compiled_for(
    x: Tensor, out: Tensor, cos: Tensor, tables: Sequence[int], rotary: int, interleaved: bool, inverse: bool
) -> Run:
    """Return the rotation as a function of (x, out, cos, sin) with the shapes and strides of these.

    It runs torch's number of threads.

    Args:
        x, out: bfloat16 or float32 [B, H, T, D] on a CPU, adjacent columns.
        cos: bfloat16 or float32 [..., T, columns], columns next to each other.
        tables: strides of cos's batch and positions and of sin's.
        rotary: columns that turn.

    Raises:
        CompilerError: nothing can be compiled here.
    """
    of = _Rope(
        *x.shape,
        rotary // 2,
        *x.stride()[:3],
        *out.stride()[:3],
        *tables,
        cos.shape[-1] == rotary,
        interleaved,
        inverse,
    )
    low, low_tables = (int(each.dtype is torch.bfloat16) for each in (x, cos))
    function = _function()
    sizes = ctypes.pointer(of)

    def run(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> None:
        function(
            sizes, low, low_tables, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip

    return run


@functools.cache
def _function() -> Any:
    function = compiled(_SOURCE).fxprec_rope
    function.argtypes = (ctypes.POINTER(_Rope), ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 4, ctypes.c_int)
    return function
