"""Price the nodes of a rewritten graph by the device's costs: what one takes, and what its other dtype would change.

The other dtype is told from the graph as it stands, all other places staying as they are. An op that is low reads casts
of what is FP32::

    %x_bf16 = cast(%x)                     %linear: float32 = linear(%x, %w)
    %linear: bfloat16 = linear(%x_bf16)    %linear_bf16 = cast(%linear)
    %gelu: bfloat16 = gelu(%linear)        %gelu: bfloat16 = gelu(%linear_bf16)

In FP32 (to the right) it spares the cast of x if nobody else reads that, and takes one of its result, if somebody reads
that low.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxprec.inspection.nodes import is_inserted, is_shadow
from fxprec.passes.costs.op_costs import CAST_BYTES, OpCosts, Price, elements
from fxprec.passes.dtypes.fake_results import numel_of
from fxprec.passes.graph.annotations import Arrival, Rule, nested, notes
from fxprec.passes.graph.subgraphs import attribute_of
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.table import facts_at
from fxprec.settings import Settings

#: Sizes, or what the op costs, are not known.
UNKNOWN: Final = -1.0


@dataclass(frozen=True, slots=True)
class Alternative:
    """The other dtype for one op, all others staying as they are; negative numbers are savings.

    Attributes:
        precision: "float32", or the low dtype.
        casts: more in a forward, those of weights apart, which are made when the weights change.
        bytes: more that a forward moves, for these casts, what the op reads, its result and those who read that;
            None where sizes are unknown.
        seconds: more that a step takes, by the costs of the device; None where they, or sizes, are unknown.
    """

    precision: str
    casts: int
    bytes: int | None
    seconds: float | None

    def __str__(self) -> str:
        moved = "" if self.bytes is None else f", {self.bytes:+,} bytes"
        taken = "" if self.seconds is None else f", {self.seconds * 1e6:+.3g} us"
        return f"{self.precision}: {self.casts:+d} casts{moved}{taken}"


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of a tensor, and whether gradients flow through it."""

    shape: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, value: object) -> Size | None:
        """Return the size of a tensor; None for anything else."""
        return cls(tuple(value.shape), value.requires_grad) if isinstance(value, Tensor) else None


class Prices:
    """Prices of the nodes of a conversion's graphs.

    Args:
        settings: of the conversion.
        gradients: whether the backward is counted.
    """

    def __init__(self, settings: Settings, gradients: bool) -> None:
        self._context = settings.context(gradients)
        costs = settings.device_costs
        self._costs = costs if settings.dtype in costs.curves else None
        self._of_graphs: dict[Graph, OpCosts] = {}

    def seconds(self, node: Node) -> float:
        """Return seconds of a step; 0 for inputs, shadows and casts within regions; ``UNKNOWN`` for other dtypes."""
        if node.op == "placeholder" or is_shadow(node) or notes(node).state("in_region"):
            return 0.0
        costs = self._of_graph(node.graph)
        if costs is None or elements(node) is None or node.op == "call_module":
            return UNKNOWN
        precision = notes(node).precision
        if is_inserted(node):
            return costs.cast(node.all_input_nodes[0]) * 1e-12
        priced = facts_at(node).cost is not None
        dtype = (precision.compute if priced else precision.output) or torch.float32
        if dtype not in (torch.float32, self._context.low):  # float64, or a low dtype of this node's own
            return UNKNOWN
        # Ops without a cost of their own are bound by memory.
        if not priced:
            return costs.stream(node, dtype) * 1e-12
        price = costs.price(node)
        if isinstance(price, str):
            return UNKNOWN
        return (price.low if dtype is self._context.low else price.full) * 1e-12

    def other(self, node: Node) -> Alternative | None:
        """Return the other dtype's price, or None where the op computes nothing in a dtype that is ours to choose."""
        precision, low = notes(node).precision, self._context.low
        current = precision.reads if isinstance(precision.reads, torch.dtype) else precision.output
        is_op = node.op.startswith("call") and not is_inserted(node) and not isinstance(notes(node).dtype, tuple)
        if not is_op or precision.rule is Rule.KEEP or precision.output is None or current not in (torch.float32, low):
            return None
        # A fused region's dtypes are its kernel's: changing one op would split the region, which no price here covers.
        if node.op == "call_module" and notes(node).fused:
            return None
        other = low if current is torch.float32 else torch.float32
        more, fewer = _casts(node, current, other)
        # Traffic changes for inputs that are read in the current dtype, for the result, and for readers that take what
        # arrives.
        moved = [source for source in dict.fromkeys(node.all_input_nodes) if notes(source).precision.output is current]
        # An op that follows is moved along: its traffic changes as well, though its rule does not.
        takers = (user for user in node.users if not is_inserted(user) and not _wants_other(user, other))
        moved += [node] * (1 + sum(user.op != "output" and not facts_at(user).view for user in takers))
        return Alternative(
            dtype_name(other),
            len([each for each in more if not _is_weight(each)]) - len([each for each in fewer if not is_shadow(each)]),
            _bytes(more, fewer, moved, grows=other is torch.float32),
            self._seconds_more(node, other, more, fewer),
        )

    def _seconds_more(self, node: Node, other: torch.dtype, more: list[Node], fewer: list[Node]) -> float | None:
        costs = self._of_graph(node.graph)
        if costs is None or elements(node) is None:
            return None
        # A price in words says why the device has no figure for this op.
        price = costs.price(node) if notes(node).precision.rule is Rule.LOW else None
        if isinstance(price, str):
            return None
        full = price.full - price.low if isinstance(price, Price) else costs.traffic(node)
        cast = sum(map(costs.cast, more)) - sum(costs.cast(_uncast(each)) for each in fewer)
        return ((full if other is torch.float32 else -full) + cast) * 1e-12

    def _of_graph(self, graph: Graph) -> OpCosts | None:
        if self._costs is None:
            return None
        if graph not in self._of_graphs:
            self._of_graphs[graph] = OpCosts(self._costs, self._context)
            self._of_graphs[graph].enter(graph)
        return self._of_graphs[graph]


@contextlib.contextmanager
def sized(nodes: Mapping[tuple[int, str], Node], sizes: Mapping[tuple[int, str], Any]) -> Iterator[None]:
    """Give nodes the sizes that they had in a run while the context lasts; weights know their own.

    Args:
        nodes: (position of the graph, name) -> node.
        sizes: as of ``OpRecorder``, of these.
    """
    # Users see the same nodes: their metadata is put back, whatever happens within.
    before = {node: dict(node.meta) for node in nodes.values()}
    for key, node in nodes.items():
        weight = node.all_input_nodes[0] if is_shadow(node) else node
        if weight.op == "get_attr":
            node.meta["val"] = nested(attribute_of(weight), lambda leaf: _without_memory(Size.of(leaf)))
        elif key in sizes:
            node.meta["val"] = nested(sizes[key], _without_memory)
        notes(node).numel = numel_of(node.meta.get("val"))
    try:
        yield
    finally:
        for node, meta in before.items():
            node.meta.clear()
            node.meta.update(meta)


def _without_memory(size: Size | None) -> Tensor | None:
    return None if size is None else torch.empty(size.shape, device="meta", requires_grad=size.requires_grad)


def _casts(node: Node, current: torch.dtype, other: torch.dtype) -> tuple[list[Node], list[Node]]:
    """Return the values that would have to be cast, and the casts that would not be needed."""
    more, fewer = [], []
    for source in dict.fromkeys(node.all_input_nodes):
        value = _uncast(source)
        made, read = notes(value).precision.output, notes(source).precision.output
        if read is not current:  # a port that takes another dtype
            continue
        # A cast that others read stays; a value that somebody already casts to the other dtype needs no second cast.
        if source is not value and made is other:
            fewer += [source] if len(source.users) == 1 else []
        elif not any(is_inserted(user) and notes(user).precision.output is other for user in value.users):
            more.append(value)
    back = [user for user in node.users if is_inserted(user) and notes(user).precision.output is other]
    fewer += back
    if any(user not in back and _wants_other(user, other) for user in node.users):
        more.append(node)
    return more, fewer


def _wants_other(user: Node, made: torch.dtype) -> bool:
    """Return whether a reader takes another dtype than is made; ops that follow take what arrives."""
    reads = notes(user).precision.reads
    if isinstance(reads, torch.dtype):
        return reads is not made
    return reads is Arrival.ORIGINAL and made is not torch.float32


def _uncast(node: Node) -> Node:
    return node.all_input_nodes[0] if is_inserted(node) and node.all_input_nodes else node


def _is_weight(node: Node) -> bool:
    return node.op == "get_attr" and notes(node).kind == "parameter"


def _bytes(more: list[Node], fewer: list[Node], widened: list[Node], grows: bool) -> int | None:
    casts = [(each, CAST_BYTES) for each in more if not _is_weight(each)]
    casts += [(each, -CAST_BYTES) for each in fewer if not is_shadow(each)]
    counts = [(elements(node), size) for node, size in [*casts, *((each, 2 if grows else -2) for each in widened)]]
    return None if any(count is None for count, _ in counts) else sum((count or 0) * size for count, size in counts)
