"""A row program: what one kernel loads, computes and stores. And how a region's graph becomes two of them.

The forward program computes the region's outputs, and stores the row statistics (results of reductions) that the
backward will ask for. The backward program starts again from what is in memory anyway: of the region's inputs and
outputs it loads those that make the fewest bytes, and computes the rest anew. Gradients of what does not vary along
rows (a bias, a norm's weight) are column partials, added up by a second stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxprec.kernels.rows.derivatives import gradients
from fxprec.kernels.rows.lowering import ROW_REDUCTIONS, Declined, Term, lower
from fxprec.kernels.rows.values import REDUCTIONS, Builder, Operand, Value, walk

__all__ = ["Backward", "Forward", "Port", "Program", "Store", "backward", "forward", "reduced_dimensions"]

#: More outputs than these are not weighed one against the other: all that can be are loaded.
_WEIGHED: Final = 6


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that a program loads: its dtype, and whether it varies along rows and columns.

    ``some_rows``: of several row dimensions it varies along some only.
    """

    dtype: torch.dtype
    rows: bool
    columns: bool
    some_rows: bool = False


@dataclass(frozen=True, slots=True)
class Store:
    """A tensor that a program writes.

    ``partial``: summed over rows, as FP32, by a second stage. ``dropped``: how many trailing dimensions it lacks.
    """

    value: Operand
    dtype: torch.dtype
    rows: bool
    columns: bool
    partial: bool = False
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel's work.

    Attributes:
        loads: (value, port) of each tensor that is read, in the order of the kernel's arguments.
        stores: of each tensor that is written, likewise.
        seeds: how many dropouts there are.
        columns: of a row; a program with reductions is made for this number.
    """

    loads: tuple[tuple[Value, Port], ...]
    stores: tuple[Store, ...]
    seeds: int
    columns: int

    @property
    def values(self) -> list[Value]:
        """Everything computed, in order; loads first among what they lead to."""
        loaded = {value for value, _ in self.loads}
        roots = [store.value for store in self.stores if isinstance(store.value, Value)]
        return walk(roots, loaded.__contains__)

    @property
    def reduces(self) -> bool:
        loaded = {value for value, _ in self.loads}
        return any(value.op in REDUCTIONS and value not in loaded for value in self.values)

    def bytes_moved(self, rows: int) -> int:
        """By one launch where a row fits into a program; second stages and seeds left out."""
        ports = [port for _, port in self.loads] + [s for s in self.stores if not s.partial]
        return sum(_bytes(port, rows, self.columns) for port in ports)


@dataclass(frozen=True, slots=True)
class Forward:
    """A region's forward: the program, and what the backward can start from.

    Attributes:
        builder: made the values; the backward goes on with it.
        inputs: the value of each graph input that is a tensor.
        outputs: what is stored for each graph output.
        made: how many values the forward has; what has a higher number belongs to a backward.
    """

    program: Program
    builder: Builder
    inputs: tuple[Value, ...]
    input_ports: tuple[Port, ...]
    outputs: tuple[Store, ...]
    made: int

    def with_statistics(self, values: Sequence[Value]) -> Program:
        """The program, also storing these row statistics."""
        stores = (*self.outputs, *(Store(v, torch.float32, v.rows, False) for v in values))
        return replace(self.program, stores=stores)


@dataclass(frozen=True, slots=True)
class Backward:
    """A region's backward.

    Attributes:
        program: loads ``saved`` and then the cotangents; stores a gradient for each wanted input.
        saved: ("input" | "output" | "statistic", number) of what the forward keeps for it, in the order of the loads.
        also: what is kept besides, since the statistics could not be computed again without it (double backward).
        statistics: the forward's reductions among the loads.
        cotangents: numbers of the outputs whose gradients come next.
        wanted: numbers of the inputs that get gradients.
        stored_in: for each of them the number of its store; equal gradients share one.
        owners: for each store the number of the input that it was made for.
    """

    program: Program
    saved: tuple[tuple[str, int], ...]
    also: tuple[tuple[Value, tuple[str, int]], ...]
    statistics: tuple[Value, ...]
    cotangents: tuple[int, ...]
    wanted: tuple[int, ...]
    stored_in: tuple[int, ...]
    owners: tuple[int, ...]


def reduced_dimensions(nodes: Sequence[Node], rank: int) -> int:
    """How many trailing dimensions the reductions of a region run over; 0 without any.

    :raises Declined: they differ, or are not the last ones.
    """
    found: set[int] = set()
    for node in nodes:
        name = node.meta["op"].name
        if name not in ROW_REDUCTIONS:
            continue
        position = ROW_REDUCTIONS[name]
        if position is None:
            found.add(len(node.args[1] if len(node.args) > 1 else node.kwargs["normalized_shape"]))  # type: ignore[arg-type]
            continue
        dim: Any = (
            node.args[position]
            if len(node.args) > position
            else node.kwargs.get("dim", 1 if name == "normalize" else None)
        )
        own = len(node.args[0].meta["shape"])  # type: ignore[union-attr]
        dims = [*range(own)] if dim is None or dim == () else [dim] if isinstance(dim, int) else [*dim]
        if sorted(d % own for d in dims) != [*range(own - len(dims), own)]:
            raise Declined(f"{name} over other dimensions than the last")
        found.add(len(dims))
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
    """The forward program of a region's graph, whose nodes carry ``meta["shape"]`` and ``meta["torch_dtype"]``.

    :param port: how a tensor of a shape and dtype varies.
    :raises Declined: something that row programs do not know.
    """
    b = Builder(columns)
    terms: dict[Node, Any] = {}
    loads: list[tuple[Value, Port]] = []
    seeds = itertools.count()
    returned = set(gm.graph.output_node().all_input_nodes)
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        own, dtype = tuple(node.meta["shape"]), node.meta["torch_dtype"]
        if node.op == "placeholder":
            if dtype in (torch.float64, torch.complex64, torch.complex128):
                raise Declined(f"{dtype} values")
            found = port(own, dtype)
            value = b.load(len(loads), dtype, found.rows, found.columns)
            loads.append((value, found))
            terms[node] = Term(value, own)
            continue
        args, kwargs = map_arg((node.args, node.kwargs), terms.__getitem__)
        name = node.meta["op"].name
        if name == "to":
            term = _cast(b, node, args[0], dtype)
        elif name == "dropout":
            term = _dropout(b, args, kwargs, tuple(shape), seeds)
        else:
            term = lower(b, name, args, kwargs, reduced)
        if tuple(term.shape) != own:
            raise Declined(f"{name} gives {own}, which the rows and columns do not show")
        if node in returned and dtype in (torch.float16, torch.bfloat16) and isinstance(term.value, Value):
            # What others read is what was stored.
            term = Term(b.round(term.value, dtype), own, term.dropped)
        terms[node] = term
    outputs = tuple(_output(node, terms[node], port, reduced) for node in gm.graph.output_node().args[0])  # type: ignore[union-attr]
    program = Program(tuple(loads), outputs, next(seeds), columns)
    return Forward(program, b, tuple(v for v, _ in loads), tuple(p for _, p in loads), outputs, b.made)


def _cast(b: Builder, node: Node, x: Term, dtype: torch.dtype) -> Term:
    if not dtype.is_floating_point or dtype is torch.float64:
        raise Declined(f"a cast to {dtype}")
    value = b.float(x.value)
    if not node.meta.get("inserted") and dtype is not torch.float32 and isinstance(value, Value):
        value = b.round(value, dtype)  # the user's own cast rounds; ours only says in what the next op would read
    return Term(value, x.shape, x.dropped)


def _dropout(b: Builder, args: Any, kwargs: Any, shape: tuple[int, ...], seeds: Any) -> Term:
    def bound(x: Term, p: float = 0.5, training: bool = True, inplace: bool = False) -> Term:
        if not training or p == 0:
            return x
        if tuple(x.shape) != shape:
            raise Declined("dropout of a tensor that is broadcast afterwards")
        if p == 1:
            return Term(b("mul", x.value, 0.0), x.shape)
        kept = b("mul", x.value, b.float(b.keep(next(seeds), float(p))))
        return Term(b("mul", kept, 1.0 / (1.0 - p)), x.shape)

    return bound(*args, **kwargs)


def _output(node: Node, term: Term, port: Callable[[Sequence[int], torch.dtype], Port], reduced: int) -> Store:
    dtype = node.meta["torch_dtype"]
    if dtype is not torch.bool and (not dtype.is_floating_point or dtype is torch.float64):
        raise Declined(f"an output of {dtype}")
    found = port(term.shape + (1,) * reduced if term.dropped else term.shape, dtype)
    if not found.rows or found.some_rows:
        raise Declined("an output that does not vary along all the rows")
    return Store(term.value, dtype, found.rows, found.columns, dropped=reduced if term.dropped else 0)


def backward(
    fw: Forward, wanted: Sequence[int], cotangents: Sequence[int], rows: int, alike: Sequence[object]
) -> Backward:
    """The backward program for some inputs and some outputs.

    :param wanted: numbers of the inputs whose gradients are asked for.
    :param cotangents: numbers of the outputs that have a gradient.
    :param rows: how many rows there are about, to weigh bytes by.
    :param alike: for each input something that is equal for two of them that lie in memory alike.
    """
    b = fw.builder
    first = len(fw.inputs)
    given = [b.load(first + n, fw.outputs[n].dtype, fw.outputs[n].rows, fw.outputs[n].columns) for n in cotangents]
    found = gradients(b, [fw.outputs[n].value for n in cotangents], given, [fw.inputs[n] for n in wanted])
    stores, owners, stored_in = _stores(fw, wanted, found, alike)
    roots = [store.value for store in stores if isinstance(store.value, Value)]
    sources = _cheapest(fw, roots, set(given), rows)
    statistics = {v: n for n, v in enumerate(_statistics(fw, roots, sources.keys() | {*given}))}
    used = {*walk(roots, lambda v: v in sources or v in statistics or v in given)}
    again = {*walk(roots, lambda v: v in sources or v in given)}
    read = [value for value in sources if value in used]
    saved = [*(sources[value] for value in read), *(("statistic", n) for n in statistics.values())]
    loads = [(value, _port_of(fw, sources[value])) for value in read]
    loads += [(value, Port(torch.float32, value.rows, False)) for value in statistics]
    also = [value for value in sources if value in again and value not in used]
    program = Program(
        (*loads, *((value, _port(fw.outputs[n])) for value, n in zip(given, cotangents, strict=True))),
        tuple(stores), fw.program.seeds, fw.program.columns,
    )  # fmt: skip
    return Backward(
        program, tuple(saved), tuple((value, sources[value]) for value in also), tuple(statistics),
        tuple(cotangents), tuple(wanted), tuple(stored_in), tuple(owners),
    )  # fmt: skip


def _stores(
    fw: Forward, wanted: Sequence[int], found: Sequence[Operand | None], alike: Sequence[object]
) -> tuple[list[Store], list[int], list[int]]:
    """The stores of gradients, each value once for inputs that lie alike; their owners; each input's store.

    An input that varies along some of the row dimensions has its gradient summed afterwards, from a full FP32 copy: a
    low one would be rounded before the sum.
    """
    stores: list[Store] = []
    owners: list[int] = []
    known: dict[object, int] = {}
    place: dict[int, int] = {}
    for n, gradient in sorted(zip(wanted, found, strict=True), key=lambda each: fw.input_ports[each[0]].some_rows):
        port = fw.input_ports[n]
        value = 0.0 if gradient is None else gradient
        own = id(value) if isinstance(value, Value) else value
        key = (own, port.dtype, alike[n])
        if port.some_rows:
            key = (own, port.columns, "any")
        if port.rows and key in known:
            place[n] = known[key]
            continue
        dtype = torch.float32 if not port.rows or port.some_rows else port.dtype
        place[n] = len(stores)
        known[key] = place[n]
        if port.rows and not port.some_rows and dtype is torch.float32:
            known.setdefault((own, port.columns, "any"), place[n])
        stores.append(Store(value, dtype, port.rows, port.columns, not port.rows))
        owners.append(n)
    return stores, owners, [place[n] for n in wanted]


def _statistics(fw: Forward, roots: list[Value], sources: Collection[Value]) -> list[Value]:
    """The forward's reductions that the backward meets on its way to the sources: kept, they need no second pass."""
    found: dict[Value, None] = {}

    def stop(value: Value) -> bool:
        if value not in sources and value.op in REDUCTIONS and value.number < fw.made:
            found[value] = None
        return value in sources or value in found

    walk(roots, stop)
    return sorted(found, key=lambda value: value.number)


def _cheapest(fw: Forward, roots: list[Value], given: set[Value], rows: int) -> dict[Value, tuple[str, int]]:
    """What the backward starts from: value -> (kind, number). Inputs, and those outputs that save bytes."""
    inputs = {value: ("input", n) for n, value in enumerate(fw.inputs)}
    reachable = walk(roots, lambda v: v in inputs or v in given)
    candidates = {
        store.value: ("output", n)
        for n, store in enumerate(fw.outputs)
        if isinstance(store.value, Value) and store.value in reachable and store.value not in inputs and _exact(store)
    }
    sizes = {
        value: _bytes(_port_of(fw, source), rows, fw.program.columns) for value, source in (inputs | candidates).items()
    }

    def cost(chosen: tuple[Value, ...]) -> float:
        stop = inputs.keys() | given | {*chosen}
        return sum(sizes[value] for value in walk(roots, stop.__contains__) if value in sizes and value in stop)

    best: tuple[Value, ...] = tuple(candidates)
    if len(candidates) <= _WEIGHED:
        lengths = range(len(candidates) + 1)
        subsets = itertools.chain.from_iterable(itertools.combinations(candidates, n) for n in lengths)
        best = min(subsets, key=lambda chosen: (cost(chosen), -len(chosen)))
    return inputs | {value: candidates[value] for value in best}


def _port_of(fw: Forward, source: tuple[str, int]) -> Port:
    kind, n = source
    return fw.input_ports[n] if kind == "input" else _port(fw.outputs[n])


def _exact(store: Store) -> bool:
    """Whether reading the output back gives the value that was computed with."""
    value = store.value
    assert isinstance(value, Value)
    return store.dtype is torch.float32 or (value.op == "round" and value.attribute is store.dtype)


def _port(store: Store) -> Port:
    return Port(store.dtype, store.rows, store.columns)


def _bytes(port: Any, rows: int, columns: int) -> int:
    return port.dtype.itemsize * (rows if port.rows else 1) * (columns if port.columns else 1)
