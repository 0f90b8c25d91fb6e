"""Finds the arguments of a kernel for tensors of given strides: pointers, sizes, and the strides that it must be given.

A stride of 1, and one of as many elements as there are columns, need no argument. Kernels in Triton and in C++ have the
same arguments (``source``, ``loops``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxprec.kernels.rows.program.layout import Layout, Placed, merged
from fxprec.kernels.rows.program.row_program import RowProgram


@dataclass(frozen=True, slots=True)
class Access:
    """Strides of a tensor as a kernel writes them, for each row dimension (``rows``) and for the ``columns``.

    "" where the tensor does not vary, "1", "COLUMNS" (that many), or the name of a stride argument.
    """

    rows: tuple[str, ...]
    columns: str


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """Pointers and integer arguments of one kernel.

    Attributes:
        loads, stores: (name of the pointer, strides) of each tensor, in the program's order.
        dimensions: how many row dimensions there are.
        strides: names of the stride arguments.
        numbers: the integer arguments: rows (of a flat program columns), sizes of all row dimensions but the outermost,
            strides.
        wide: whether the columns of each full tensor are next to each other, and those strides of its rows that are
            arguments divide by 8. A stride of COLUMNS is not asked about: the number of columns must divide by 8, too.
    """

    loads: tuple[tuple[str, Access], ...]
    stores: tuple[tuple[str, Access], ...]
    dimensions: int
    strides: tuple[str, ...]
    numbers: tuple[int, ...]
    wide: bool


def kernel_arguments(
    program: RowProgram,
    layout: Layout,
    loads: Sequence[tuple[str, Placed]],
    stores: Sequence[tuple[str, Placed | None]],
) -> KernelArguments:
    """Find the pointers and integer arguments of a kernel.

    Args:
        loads, stores: name and place of each tensor, in the program's order; partial stores have none (None).
    """
    ports = [*((port.rows, port.columns) for _, port in program.loads), *((s.rows, s.columns) for s in program.stores)]
    named = [*loads, *stores]
    sizes, places = merged(layout, [place for _, place in named if place is not None])
    merged_places, taken, strides = iter(places), set[str](), dict[str, int]()
    pointers: list[tuple[str, Access]] = []
    for (tensor, place), (rows, columns) in zip(named, ports, strict=True):
        tensor = _unique(tensor, taken)
        access = Access((), "")
        if place is not None:
            access = _access(tensor, next(merged_places), rows, columns, layout, strides)
        pointers.append((f"{tensor}_ptr", access))
    # Tensors that vary along rows and columns are most of the traffic: only their strides decide on wide accesses.
    full = [
        access
        for (_, access), (_, place), along in zip(pointers, named, ports, strict=True)
        if place is not None and along == (True, True)
    ]
    return KernelArguments(
        tuple(pointers[: len(loads)]), tuple(pointers[len(loads) :]), len(sizes), tuple(strides),
        (layout.columns if layout.flat else layout.rows, *sizes[1:], *strides.values()),
        wide=all(each.columns == "1" and not any(strides.get(row, 0) % 8 for row in each.rows) for each in full),
    )  # fmt: skip


def _unique(name: str, taken: set[str]) -> str:
    """Return a name not taken yet: an input and an output of a graph may come to the same name."""
    number, own = 2, name
    while own in taken:
        own = f"{name}_{number}"
        number += 1
    taken.add(own)
    return own


def _access(tensor: str, place: Placed, rows: bool, columns: bool, layout: Layout, strides: dict[str, int]) -> Access:
    """Return the strides of a tensor as the kernel writes them; add those that become arguments to ``strides``."""

    def stride_text(stride: int, label: str, varies: bool) -> str:
        if not stride or not varies:
            return ""
        if stride == 1:
            return "1"
        # COLUMNS is a constant of the kernel, so that this stride needs no argument.
        if stride == layout.columns and not layout.flat:
            return "COLUMNS"
        strides[f"{tensor}_{label}"] = stride
        return f"{tensor}_{label}"

    row_strides, column_stride = place
    along = tuple(stride_text(stride, f"stride_{i}", rows) for i, stride in enumerate(row_strides))
    return Access(along, stride_text(column_stride, "step", columns))
