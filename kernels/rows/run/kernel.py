"""A row program on a device: its source, compiled once for each way its operands lie, and launched.

The first launch goes through Triton, which compiles and gives back the compiled kernel; from then on that is called at
once, without looking it up again. Triton compiles for facts about its arguments (addresses and strides that divide by
16, strides of 1): the numbers of a launch never change, and addresses are asked at each call.
"""

from __future__ import annotations

import functools
import itertools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.launch.triton_support import interpreting
from fxprec.kernels.rows.emit.addresses import Access
from fxprec.kernels.rows.emit.source import emit
from fxprec.kernels.rows.emit.tiling import Form, form_of, reduction_levels
from fxprec.kernels.rows.program.layout import Layout, Place, merged
from fxprec.kernels.rows.program.row_program import Program

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
        grid: programs, in one dimension.
        numbers: the integer arguments after the pointers.
        draws: whether it reads seeds.
        partials: shape of the partial sums, which a second stage adds up over the first dimension; None without any.
        passes: how often a row is read.
        wide: whether every access of a full tensor may be one of 16 bytes.
    """

    name: str
    source: str
    form: Form
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    draws: bool
    partials: tuple[int, int] | None
    passes: int = 1
    wide: bool = False
    _compiled: dict[int, Callable[..., None]] = field(default_factory=dict)

    def __call__(self, tensors: Sequence[Tensor], seeds: Tensor | None, seed: int, partials: Tensor | None) -> None:
        """Launch on the current stream. ``tensors``: what is loaded, then what is stored."""
        pointers = [*tensors] if partials is None else [*tensors, partials]
        arguments = [*pointers, *self.numbers]
        if self.draws:
            assert seeds is not None
            pointers.append(seeds)
            arguments[len(tensors) : len(tensors)] = (seeds, seed)
        index = tensors[0].get_device()
        compiled = self._compiled.get(index)
        bits = 0
        if compiled is not None:
            for tensor in pointers:
                bits |= tensor.data_ptr()
        if compiled is None or bits & 15:
            self._through_triton(index, pointers, arguments)
        elif index == torch.cuda.current_device():
            compiled(*arguments)
        else:
            with torch.cuda.device(index):
                compiled(*arguments)

    def _through_triton(self, index: int, pointers: Sequence[Tensor], arguments: Sequence[Any]) -> None:
        """The first time, and for unaligned tensors, each of which has a say of its own."""
        kernel = built(self.name, self.source)
        if index < 0 or interpreting():
            kernel[self.grid](*arguments, num_warps=self.form.warps)
            return
        with torch.cuda.device(index):
            compiled = kernel[self.grid](*arguments, num_warps=self.form.warps)
        if not any(tensor.data_ptr() & 15 for tensor in pointers):
            self._compiled[index] = compiled[self.grid]


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
    loads: Sequence[tuple[str, tuple[list[int], int]]], stores: Sequence[tuple[str, tuple[list[int], int] | None]],
    device: torch.device,
) -> Launch:  # fmt: skip
    """Make a launch.

    Args:
        loads, stores: name and place (``layout.place``) of each tensor, in the program's order; partial stores have
            no place.
    """
    ports = [*((port.rows, port.columns) for _, port in program.loads), *((s.rows, s.columns) for s in program.stores)]
    named = [*loads, *stores]
    sizes, places = merged(layout, [place for _, place in named if place is not None])
    found, taken, strides = iter(places), set[str](), dict[str, int]()
    walked: list[tuple[str, Access]] = []
    for (tensor, place), (rows, columns) in zip(named, ports, strict=True):
        tensor = _unique(tensor, taken)
        walk = Access((), "") if place is None else _access(tensor, next(found), rows, columns, layout, strides)
        walked.append((f"{tensor}_ptr", walk))
    form = form_of(program, layout.flat, layout.rows)
    source = emit(name, program, form, walked[: len(loads)], walked[len(loads) :], len(sizes), [*strides])
    rows, columns = layout.rows, layout.columns
    down, across = form.down(rows, columns, _resident(device, rows)), form.across(columns)
    width = sum(program.columns if store.columns else 1 for store in program.stores if store.partial)
    numbers = (columns if layout.flat else rows, *sizes[1:], *strides.values())
    full = [
        access
        for (_, access), (_, place), along in zip(walked, named, ports, strict=True)
        if place is not None and along == (True, True)
    ]
    return Launch(
        name, source, form, (down * across, 1, 1), numbers,
        draws=any(value.op == "keep" for value in program.values),
        partials=(down, width) if width else None,
        passes=1 + len(reduction_levels(program)) if form.kind == "loop" else 1,
        wide=columns % 8 == 0 and all(a.columns == "1" for a in full) and all(n % 8 == 0 for n in strides.values()),
    )  # fmt: skip


def _unique(name: str, taken: set[str]) -> str:
    """A graph may have an input and an output whose tensors' names come out the same."""
    number, own = 2, name
    while own in taken:
        own = f"{name}_{number}"
        number += 1
    taken.add(own)
    return own


def _access(tensor: str, place: Place, rows: bool, columns: bool, layout: Layout, strides: dict[str, int]) -> Access:
    """How the kernel walks a tensor; adds those of its strides that become arguments."""

    def named(stride: int, label: str, varies: bool) -> str:
        if not stride or not varies:
            return ""
        if stride == 1:
            return "1"
        if stride == layout.columns and not layout.flat:
            return "COLUMNS"
        strides[f"{tensor}_{label}"] = stride
        return f"{tensor}_{label}"

    along = tuple(named(stride, f"stride_{i}", rows) for i, stride in enumerate(place.row_strides))
    return Access(along, named(place.column_stride, "step", columns))


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
