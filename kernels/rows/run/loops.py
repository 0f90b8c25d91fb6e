"""Runs a row program on a CPU: compiles its C++ loops (``emit.loops``), and calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.cpu.cpp import compiled_text
from fxprec.kernels.launch.direct import Run
from fxprec.kernels.rows.emit.addresses import kernel_arguments
from fxprec.kernels.rows.emit.loops import FUNCTION, emit_loops
from fxprec.kernels.rows.program.layout import Layout, Placed, Spec
from fxprec.kernels.rows.program.row_program import RowProgram

_address: Final = Tensor.data_ptr
_CPU: Final = torch.device("cpu")
#: Elements of a task, at least: fewer take less time than threads take to meet.
_ELEMENTS: Final = 1 << 14
#: Tasks, at most. Sizes alone decide how many there are, so that sums do not depend on the number of threads.
_TASKS: Final = 16


@dataclass(slots=True)
class Loops:
    """Compiled loops of one row program for tensors of given strides.

    Attributes:
        source: C++.
        tasks: pieces of work that threads share.
        tensors: how many are loaded and stored.
        partials: shape of the partial sums, which a second stage adds up over the first dimension; None without any.
        passes: how often a row is read.
        _numbers: the integer arguments, as an array of C.
    """

    source: str
    tasks: int
    tensors: int
    partials: tuple[int, int] | None
    passes: int
    _numbers: Any
    _function: Callable[..., None] | None = field(default=None)

    def __call__(self, tensors: Sequence[Tensor], seeds: Tensor | None, seed: int, partials: Tensor | None) -> None:
        """Run with torch's number of threads. ``tensors``: loads, then stores. Loops have no dropout, so no seeds."""
        function = self._function or self._compiled()
        # Arrays live to the end of the call, and the function keeps none of the addresses.
        pointers = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
        sums = None if partials is None else partials.data_ptr()
        function(pointers, self._numbers, sums, self.tasks, torch.get_num_threads())

    def _compiled(self) -> Callable[..., None]:
        function = self._function = getattr(compiled_text("loops", self.source), FUNCTION)
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        return function

    def run_for(self, stores: Sequence[Spec], single: bool) -> Run:
        """Return a function from the loaded tensors to the stored ones; ``single``: to the only one, not in a tuple."""
        function, numbers, tasks = self._function or self._compiled(), self._numbers, self.tasks
        # What does not depend on the call is looked up once: between small loops Python is what takes time.
        array = ctypes.c_void_p * self.tensors
        makings = [(spec.shape, spec.strides, spec.dtype) for spec in stores]

        def run(*tensors: Tensor) -> Any:
            made = [torch.empty_strided(shape, strides, dtype=dtype, device=_CPU) for shape, strides, dtype in makings]
            pointers = array(*map(_address, tensors), *map(_address, made))
            function(pointers, numbers, None, tasks, torch.get_num_threads())
            return made[0] if single else tuple(made)

        return run


def prepare_loops(
    program: RowProgram, layout: Layout,
    loads: Sequence[tuple[str, Placed]], stores: Sequence[tuple[str, Placed | None]],
) -> Loops:  # fmt: skip
    """Prepare the loops of a program; the arguments are those of ``kernel_arguments``.

    Raises:
        Declined: loops do not support the program.
    """
    arguments = kernel_arguments(program, layout, loads, stores)
    source = emit_loops(
        program, layout.flat, [access for _, access in arguments.loads], [access for _, access in arguments.stores],
        arguments.dimensions, arguments.strides,
    )  # fmt: skip
    numbers = arguments.numbers if layout.flat else (*arguments.numbers, layout.columns)
    over = layout.columns if layout.flat else layout.rows
    tasks = max(1, min(over, layout.rows * layout.columns // _ELEMENTS, _TASKS))
    width = program.partial_width
    return Loops(
        source, tasks, len(loads) + sum(placed is not None for _, placed in stores), (tasks, width) if width else None,
        1 + len(program.levels),
        (ctypes.c_int64 * len(numbers))(*numbers),
    )  # fmt: skip
