"""Launches a row program as a Triton kernel: source, compilation for the strides of its operands, and launch.

The first launch goes through Triton, which compiles and gives back the compiled kernel; from then on that is called at
once, without looking it up again. Triton compiles for facts about its arguments (addresses and strides that divide by
16, strides of 1): the numbers of a launch never change, and addresses are asked at each call.
"""

from __future__ import annotations

import functools
import itertools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.launch.triton_support import interpreting, launcher, multiprocessors
from fxprec.kernels.rows.emit.addresses import kernel_arguments
from fxprec.kernels.rows.emit.source import emit
from fxprec.kernels.rows.emit.tiling import Tiling, tiling_of
from fxprec.kernels.rows.program.layout import Layout, Placed
from fxprec.kernels.rows.program.row_program import RowProgram

_COUNT = itertools.count()
#: Rows for each program that goes from tile to tile: with fewer the device gets fewer programs, down to one for each
#: multiprocessor, since each program writes partials of its own.
_ROWS_EACH: Final = 16
#: Programs in the interpreter, which runs them one after the other.
_INTERPRETED: Final = 3


@dataclass(slots=True, weakref_slot=True)
class Launch:
    """Triton kernel of one row program for tensors of given strides.

    Attributes:
        source: of the kernel.
        grid: programs, in one dimension.
        numbers: the integer arguments after the pointers.
        draws: whether it reads seeds.
        partials: shape of the partial sums, which a second stage adds up over the first dimension; None without any.
        passes: how often a row is read.
        wide: whether every access of a full tensor may be one of 16 bytes.
        contracts: whether a product and a sum may be rounded once, as one FMA.
        kernel: name and source of the kernel that runs; None for its own. Equal layers, whose sources differ in the
            names of their tensors alone, run the first one's, so that Triton compiles it once.
    """

    name: str
    source: str
    tiling: Tiling
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    draws: bool
    partials: tuple[int, int] | None
    passes: int = 1
    wide: bool = False
    contracts: bool = True
    kernel: tuple[str, str] | None = None
    _compiled: dict[int, Callable[..., None]] = field(default_factory=dict)

    def __call__(self, tensors: Sequence[Tensor], seeds: Tensor | None, seed: int, partials: Tensor | None) -> None:
        """Launch on the current stream. ``tensors``: loads, then stores."""
        # All tensors, to ask for their addresses; in the arguments seeds stand before the partials.
        pointers = [*tensors] if partials is None else [*tensors, partials]
        arguments = [*pointers, *self.numbers]
        if self.draws:
            assert seeds is not None
            pointers.append(seeds)
            arguments[len(tensors) : len(tensors)] = (seeds, seed)
        # Compiled kernels are loaded on one device.
        index = tensors[0].get_device()
        compiled = self._compiled.get(index)
        bits = 0
        if compiled is not None:
            # The compiled kernel loads vectors of 16 bytes: one OR tells whether all addresses divide by 16.
            for tensor in pointers:
                bits |= tensor.data_ptr()
        if compiled is None or bits & 15:
            self._through_triton(index, pointers, arguments)
        elif index == torch.cuda.current_device():
            compiled(*arguments)
        else:
            with torch.cuda.device(index):
                compiled(*arguments)

    def with_kernel_of(self, other: Launch) -> Launch:
        """Return this launch with the compiled kernel of ``other``, whose source differs in names only."""
        return replace(self, kernel=(other.name, other.source), _compiled=other._compiled)

    def _through_triton(self, index: int, pointers: Sequence[Tensor], arguments: Sequence[Any]) -> None:
        """Launch by Triton: the first time, and for unaligned tensors, each of which changes the kernel."""
        kernel = built(*(self.kernel or (self.name, self.source)))[self.grid]
        options = {"num_warps": self.tiling.warps, "enable_fp_fusion": self.contracts}
        if index < 0 or interpreting():
            kernel(*arguments, **options)
            return
        with torch.cuda.device(index):
            compiled = kernel(*arguments, **options)
        # A kernel compiled for unaligned tensors is correct but slow, and must not serve aligned ones.
        if not any(tensor.data_ptr() & 15 for tensor in pointers):
            self._compiled[index] = launcher(compiled, self.grid)


@functools.cache
def built(name: str, source: str) -> Any:
    """Build the Triton kernel of a source, which ``linecache`` keeps: Triton reads a function's source text."""
    # A name of its own for each: linecache would give another kernel's text for the same one.
    filename = f"<fxprec row program {next(_COUNT)}: {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {"__name__": f"fxprec.kernels.rows.{name}"}
    exec(compile(source, filename, "exec"), scope)
    return scope[name]


def prepare(
    name: str, program: RowProgram, layout: Layout,
    loads: Sequence[tuple[str, Placed]], stores: Sequence[tuple[str, Placed | None]], device: torch.device,
) -> Launch:  # fmt: skip
    """Make a launch; the arguments are those of ``kernel_arguments``."""
    arguments = kernel_arguments(program, layout, loads, stores)
    tiling = tiling_of(program, layout.flat, layout.rows, arguments.dimensions, arguments.wide)
    source = emit(name, program, tiling, arguments.loads, arguments.stores, arguments.dimensions, arguments.strides)
    rows, columns = layout.rows, layout.columns
    down, across = tiling.down(rows, columns, _resident(device, rows, tiling.resident)), tiling.across(columns)
    width = program.partial_width
    return Launch(
        name, source, tiling, (down * across, 1, 1), arguments.numbers,
        draws=any(value.op == "keep" for value in program.values),
        partials=(down, width) if width else None,
        passes=1 + len(program.levels) if tiling.kind == "loop" else 1,
        wide=columns % 8 == 0 and arguments.wide,
        contracts=not program.is_discontinuous,
    )  # fmt: skip


def _resident(device: torch.device, rows: int, each: int) -> int:
    """Return how many persistent programs a device runs.

    ``each`` for a multiprocessor, or fewer, down to one, so that each has ``_ROWS_EACH`` of the rows.
    """
    if device.type != "cuda" or interpreting():
        return _INTERPRETED
    processors = multiprocessors(device)
    return max(processors, min(processors * each, rows // _ROWS_EACH))
