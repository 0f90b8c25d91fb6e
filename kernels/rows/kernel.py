"""A row program on a device: its source, compiled once for each way its operands lie, and launched.

The first launch goes through Triton, which compiles and gives back the compiled kernel; from then on that is called at
once, without looking it up again. Triton compiles for facts about its arguments (addresses and strides that divide by
16, strides of 1): the numbers of a launch never change, and addresses are asked at each call.
"""

from __future__ import annotations

import functools
import itertools
import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.rows.layout import Layout, merged
from fxprec.kernels.rows.row_program import Program
from fxprec.kernels.rows.source import Access, Form, emit, form_of, reduction_levels
from fxprec.kernels.triton_support import interpreting

__all__ = ["Launch", "built", "prepare"]

_COUNT = itertools.count()
#: Programs of a launch that go from tile to tile, for each multiprocessor.
_PER_MULTIPROCESSOR: Final = 4
#: Rows that each of them takes at least, where the device is full.
_ROWS_EACH: Final = 32
#: In the interpreter, whose programs run one after the other.
_INTERPRETED: Final = 3


@dataclass(slots=True)
class Launch:
    """One row program for tensors that lie in one way.

    Attributes:
        source: of the kernel.
        grid: programs, (along rows, along blocks of columns).
        numbers: the integer arguments after the pointers.
        draws: whether it reads seeds.
        partials: columns of the partial sums, 0 without any; their rows are grid[0].
        passes: how often a row is read.
        wide: whether every access of a full tensor may be one of 16 bytes.
    """

    name: str
    source: str
    form: Form
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    draws: bool
    partials: int
    passes: int = 1
    wide: bool = False
    _compiled: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, tensors: Sequence[Tensor], seeds: Tensor | None, seed: int, partials: Tensor | None) -> None:
        """Launch on the current stream. ``tensors``: what is loaded, then what is stored."""
        pointers = [*tensors]
        numbers: tuple[Any, ...] = self.numbers
        if self.draws:
            pointers += (seeds, seed)  # type: ignore[arg-type]
        if partials is not None:
            pointers.append(partials)
        device = tensors[0].device
        if device.type != "cuda" or interpreting():
            return self._kernel[self.grid](*pointers, *numbers, num_warps=self.form.warps)
        bits = 0
        for tensor in tensors:
            bits |= tensor.data_ptr()
        if bits % 16:  # of unaligned tensors each has a say of its own: Triton is asked at every call
            with torch.cuda.device(device):
                return self._kernel[self.grid](*pointers, *numbers, num_warps=self.form.warps)
        compiled = self._compiled.get(device.index)
        if compiled is None:
            with torch.cuda.device(device):
                kernel = self._kernel[self.grid](*pointers, *numbers, num_warps=self.form.warps)
            self._compiled[device.index] = kernel[self.grid]
            return None
        if device.index == torch.cuda.current_device():
            return compiled(*pointers, *numbers)
        with torch.cuda.device(device):
            return compiled(*pointers, *numbers)

    @property
    def _kernel(self) -> Any:
        return built(self.name, self.source)


@functools.cache
def built(name: str, source: str) -> Any:
    """The Triton kernel of a source, which is kept where Python looks for source that is in no file."""
    filename = f"<fxprec row program {next(_COUNT)}: {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {"__name__": f"fxprec.kernels.rows.{name}"}
    exec(compile(source, filename, "exec"), scope)
    return scope[name]


def prepare(
    name: str, program: Program, layout: Layout,
    loads: Sequence[tuple[str, tuple[list[int], int]]], stores: Sequence[tuple[str, tuple[list[int], int]]],
    device: torch.device,
) -> Launch:  # fmt: skip
    """Make a launch.

    :param loads, stores: name and place (``layout.place``) of each tensor, in the program's order; partial stores have
        any place.
    """
    real = [(n, p) for (n, p), s in zip(stores, program.stores, strict=True) if not s.partial]
    sizes, places = merged(layout, [p for _, p in (*loads, *real)])
    strides: dict[str, int] = {}

    def access(tensor: str, place: Any, rows: bool, columns: bool) -> Access:
        def named(stride: int, label: str) -> str:
            strides[f"{tensor}_{label}"] = stride
            return f"{tensor}_{label}"

        along = []
        for i, stride in enumerate(place.row_strides):
            unit = stride == program.columns and not layout.flat
            along.append("" if not stride or not rows else "COLUMNS" if unit else named(stride, f"stride_{i}"))
        column = place.column_stride
        step = "" if not column or not columns else "1" if column == 1 else named(column, "step")
        return Access(tuple(along), step)

    found = iter(places)
    read = [(n, access(n, next(found), p.rows, p.columns)) for (n, _), (_, p) in zip(loads, program.loads, strict=True)]
    written = []
    for (n, _), store in zip(stores, program.stores, strict=True):
        if store.partial:
            written.append((f"partial_{n}", Access((), "")))
        else:
            written.append((n, access(n, next(found), store.rows, store.columns)))
    form = form_of(program, layout.flat, layout.rows)
    source = emit(name, program, form, read, written, len(sizes), [*strides])
    rows, columns = layout.rows, layout.columns
    width = sum(program.columns if store.columns else 1 for store in program.stores if store.partial)
    if form.kind == "flat":
        grid = (-(-columns // form.block), 1, 1)
    else:
        tiles = -(-rows // form.rows)
        across = -(-columns // form.block) if form.kind == "blocks" else 1
        grid = (min(tiles, max(1, _resident(device, rows) // across)) if form.persistent else tiles, across, 1)
    numbers = (columns if form.kind == "flat" else rows, *sizes[1:], *strides.values())
    draws = any(value.op == "keep" for value in program.values)
    passes = 1 + len(reduction_levels(program)) if form.kind == "loop" else 1
    full = [a for (_, a), p in zip(read, [p for _, p in program.loads], strict=True) if p.rows and p.columns]
    full += [a for (_, a), s in zip(written, program.stores, strict=True) if s.rows and s.columns and not s.partial]
    wide = (
        columns % 8 == 0 and all(access.columns == "1" for access in full) and all(n % 8 == 0 for n in strides.values())
    )
    return Launch(name, source, form, grid, numbers, draws, width, passes, wide)


def _resident(device: torch.device, rows: int) -> int:
    """Programs that go from tile to tile: enough to fill the device, few enough that their partials are no traffic."""
    if device.type != "cuda" or interpreting():
        return _INTERPRETED
    processors = _multiprocessors(device.index or 0)
    return max(processors, min(processors * _PER_MULTIPROCESSOR, rows // _ROWS_EACH))


@functools.cache
def _multiprocessors(index: int) -> int:
    if not torch.cuda.is_available():
        return 132  # fake tensors of a device that is not there: an H100's
    return torch.cuda.get_device_properties(index).multi_processor_count
