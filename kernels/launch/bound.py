"""Binds a kernel to all of its arguments but the tensors, so that it is launched again with few checks.

A kernel file decides once for tensors of given shapes and strides how they are tiled and which arguments the kernel
gets, and makes a ``Bound`` of that. Between the kernels of a model Python is slow (see ``direct``): arguments by name,
and looking up grids and arguments, took as long as five launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxprec.kernels.launch.triton_support import interpreting, launcher, on_device


class Bound:
    """Kernel with bound arguments: ``bound(*given)`` is ``kernel[grid](*given, *rest, **options)``.

    It launches on the current stream of the tensors' device. ``given`` are tensors, of which all but the first may be
    None, and floats, whose values are not compiled in.

    Triton compiles for dtypes and for whether addresses divide by 16; the numbers of ``rest`` never change. The kernel
    compiled for aligned tensors is launched directly from then on; unaligned ones, each of which matters, go through
    Triton.

    Args:
        kernel: a function under ``triton_support.jit``.
        grid: of at most three dimensions.
        rest: all of its other arguments, constants included, by place.
        options: of the launch, such as ``num_warps``.
    """

    __slots__ = ("_grid", "_kernel", "_known", "_options", "_rest")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *rest: Any, **options: Any) -> None:
        self._kernel, self._grid, self._rest, self._options = kernel, grid, rest, options
        self._known: dict[Any, Callable[..., None]] = {}

    def __call__(self, *given: Tensor | float | None) -> None:
        first: Any = given[0]
        index = first.get_device()
        # One OR of all addresses tells whether each divides by 16.
        kinds: list[Any] = [index]
        bits = 0
        for each in given:
            if each is None or type(each) is float:
                kinds.append(type(each))
            else:
                tensor: Any = each
                bits |= tensor.data_ptr()
                kinds.append(tensor.dtype)
        key = tuple(kinds)
        launch = None if bits & 15 else self._known.get(key)
        if launch is None or index != torch.cuda.current_device():
            # Through Triton: the first time, on another device than the current one, and for unaligned addresses.
            with on_device(first.device):
                compiled = self._kernel[self._grid](*given, *self._rest, **self._options)
            if index >= 0 and not interpreting() and not bits & 15:
                self._known[key] = launcher(compiled, self._grid)
        else:
            launch(*given, *self._rest)
