"""Derives the forward row program of a region: lowers its graph, node by node, to values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.kernels.rows.program.lowering import ROW_REDUCTIONS, lower, trailing_dimensions
from fxprec.kernels.rows.program.region_graph import is_inserted, op_name
from fxprec.kernels.rows.program.row_program import Forward, Port, RowProgram, Store
from fxprec.kernels.rows.program.values import Builder, Declined, RowTerm, Value

#: Dtypes that nodes may have. Not integers: torch computes them modulo 2 ** n, and FP32 is exact to 24 bits only.
_COMPUTED: Final = (torch.float32, torch.float16, torch.bfloat16, torch.bool)


def reduced_dimensions(nodes: Sequence[Node]) -> int:
    """Return how many trailing dimensions the reductions of a region run over; 0 without reductions.

    Raises:
        Declined: they differ, or are not the last ones.
    """
    found: set[int] = set()
    for node in nodes:
        name = op_name(node)
        if name in ROW_REDUCTIONS:
            found.add(trailing_dimensions(node, name, len(node.args[0].meta["shape"])))  # type: ignore[union-attr]
            if -1 in found:
                raise Declined(f"{name} over other dimensions than the last")
    if len(found) > 1:
        raise Declined("reductions over different numbers of dimensions")
    return found.pop() if found else 0


def forward(
    gm: GraphModule,
    shape: Sequence[int],
    reduced: int,
    port: Callable[[Sequence[int], torch.dtype], Port],
    columns: int,
) -> Forward:
    """Return the forward program of a region's graph, whose nodes carry ``meta["shape"]`` and ``meta["torch_dtype"]``.

    Args:
        shape: of the region, to which all inputs broadcast.
        reduced: how many trailing dimensions are the columns of reductions; 0 without reductions.
        port: function from a shape and dtype to the port of such a tensor: along what it varies.
        columns: how many columns there are.

    Raises:
        Declined: something that row programs do not know.
    """
    b = Builder(columns)
    terms: dict[Node, Any] = {}
    loads: list[tuple[Value, Port]] = []
    seeds = itertools.count()
    returned = set(gm.graph.output_node().all_input_nodes)
    # Each node becomes a term: a value, and the shape that torch gives it.
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        own, dtype = tuple(node.meta["shape"]), node.meta["torch_dtype"]
        if node.op == "placeholder":
            # FP32 would round these, where torch computes in them.
            if dtype in (torch.float64, torch.complex64, torch.complex128):
                raise Declined(f"{dtype} values")
            found = port(own, dtype)
            value = b.load(len(loads), dtype, found.rows, found.columns)
            loads.append((value, found))
            terms[node] = RowTerm(value, own)
            continue
        args, kwargs = map_arg((node.args, node.kwargs), terms.__getitem__)
        name = op_name(node)
        if name == "to":
            term = _cast(b, node, args[0], dtype)
        elif name == "dropout":
            term = _dropout(b, tuple(shape), seeds, *args, **kwargs)
        else:
            term = lower(b, name, args, kwargs, reduced)
        # Terms know broadcasting only. Where torch's shape is another one, an op moves or resizes dimensions.
        if tuple(term.shape) != own:
            raise Declined(f"{name} gives {own}, which the rows and columns do not show")
        if dtype not in _COMPUTED:
            raise Declined(f"{name} gives {dtype}")
        if dtype is torch.bool:
            term = RowTerm(b.truth(term.value), own, term.columns_dropped)  # a sum of bools is an or, a product an and
        if node in returned and dtype in LOW_DTYPES and isinstance(term.value, Value):
            # Other kernels read the stored value, so what follows inside the region must use the rounded one too.
            term = RowTerm(b.round(term.value, dtype), own, term.columns_dropped)
        terms[node] = term
    outputs = tuple(_output(node, terms[node], port, reduced) for node in gm.graph.output_node().args[0])  # type: ignore[union-attr]
    # The counter's next number is how many seeds were taken.
    program = RowProgram(tuple(loads), outputs, next(seeds), columns)
    return Forward(program, b, tuple(v for v, _ in loads), tuple(p for _, p in loads), outputs, b.made)


def _cast(b: Builder, node: Node, x: RowTerm, dtype: torch.dtype) -> RowTerm:
    """Lower a cast. Of low casts only the user's round: an inserted one says in which dtype the next op would read."""
    if not dtype.is_floating_point or dtype is torch.float64:
        raise Declined(f"a cast to {dtype}")
    value = b.float(x.value)
    if not is_inserted(node) and dtype is not torch.float32 and isinstance(value, Value):
        value = b.round(value, dtype)
    return RowTerm(value, x.shape, x.columns_dropped)


def _dropout(
    b: Builder, shape: tuple[int, ...], seeds: Iterator[int], input: RowTerm, p: float = 0.5, training: bool = True,
    inplace: bool = False,
) -> RowTerm:  # fmt: skip
    """Lower a dropout; the last arguments are those of its call."""
    if not training or p == 0:
        return input
    # One number is drawn for each element of rows x columns.
    if tuple(input.shape) != shape:
        raise Declined("dropout of a tensor that is broadcast afterwards")
    if p == 1:
        return RowTerm(b("mul", input.value, 0.0), input.shape)
    # The mask multiplies: dropped NaN and infinities stay NaN, as in torch.
    kept = b("mul", input.value, b.float(b.keep(next(seeds), float(p))))
    return RowTerm(b("mul", kept, 1.0 / (1.0 - p)), input.shape)


def _output(node: Node, term: RowTerm, port: Callable[[Sequence[int], torch.dtype], Port], reduced: int) -> Store:
    dtype = node.meta["torch_dtype"]
    if dtype not in _COMPUTED:
        raise Declined(f"an output of {dtype}")
    found = port(term.shape + (1,) * reduced if term.columns_dropped else term.shape, dtype)
    # What varies along some rows only would be written by several programs at once.
    if not found.rows or found.some_rows:
        raise Declined("an output that does not vary along all the rows")
    return Store(term.value, dtype, found.rows, found.columns, dropped=reduced if term.columns_dropped else 0)
