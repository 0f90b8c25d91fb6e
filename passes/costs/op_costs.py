"""Prices ops and casts for the cut: in bytes for ``lower="always"``, in seconds of the device for ``lower="pays"``.

In seconds an op is told from its shapes in FP32 and in the low dtype, forward and backward. Costs are whole
picoseconds, so that sums of them in the cut are exact and the answer is the same every time. Counted are matrix
products, convolutions, attention, the traffic of all other ops, and casts: each at its forward and, where gradients
flow, at its backward. A weight that is lowered costs its part of the refresh of all shadows (one multi-tensor copy a
step) and a cast of its gradient. What all dtypes cost alike (dispatch, autograd) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxprec.passes.context import Context
from fxprec.passes.costs.device_costs import AttentionWay, DeviceCosts, Work, time_text
from fxprec.passes.dtypes.fake_results import fake_value, hint, numel_of
from fxprec.passes.fusion.row_operations import is_row_operation
from fxprec.passes.graph.annotations import argument, notes
from fxprec.passes.graph.subgraphs import attribute_of
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.equations import equation_of
from fxprec.passes.ops.rule import Cost
from fxprec.passes.ops.table import facts_at

#: Bytes that a cast moves for an element: it reads four and writes two, or the reverse.
CAST_BYTES: Final = 6
_CAST_CALL: Final = 16384  # bytes that move in the time one more call takes: of equal bytes, fewer casts are cheaper
_FP32_TRAFFIC: Final = 1 / 64  # of a cast's bytes: it breaks ties
#: Where kernels cast at no cost, what FP32 costs is the bytes by which it is wider: two written and two read, of the
#: six bytes that a cast moves.
_FUSED_TRAFFIC: Final = 2 / 3


class ByteCosts:
    """Bytes that move.

    Args:
        values: what may be cast; where sizes are unknown, a value counts as the average of those.
        absorbs: see ``Variables``.
    """

    def __init__(self, values: Iterable[Node], absorbs: bool) -> None:
        known = [count for node in values if (count := elements(node)) is not None]
        self._typical = sum(known) / len(known) if known else 1.0
        self._traffic = _FUSED_TRAFFIC if absorbs else _FP32_TRAFFIC

    def cast(self, node: Node) -> float:
        """Return the cost of casting the node's value to the other dtype."""
        moved = self._moved(node)
        return _CAST_CALL + moved if moved else 0.0

    def traffic(self, node: Node) -> float:
        """Return how much more it costs when the node, no LOW op, writes FP32 in the place of the low dtype."""
        return self._moved(node) * self._traffic

    def _moved(self, node: Node) -> float:
        """Parameters move nothing: their shadow is there already."""
        if node.op == "get_attr" and notes(node).kind == "parameter":
            return 0.0
        count = elements(node)
        return CAST_BYTES * (self._typical if count is None else count)


def elements(node: Node) -> int | None:
    """Elements of a node's value, of all its parts where it is a tuple; None where nobody knows."""
    count = notes(node).numel
    if count is None or isinstance(count, int):
        return count
    return sum(each for each in count if isinstance(each, int)) if isinstance(count, tuple) else None


#: Input channels a group from which on a convolution is a matrix product, and not a sum over a few.
_THIN: Final = 8
#: Time of a small shadow in the multi-tensor copy that refreshes all of them, as a share of that of a cast by itself.
_REFRESH_CALL: Final = 0.2

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Price:
    """Price of an op without its casts, in picoseconds.

    Attributes:
        full: in FP32.
        low: in the low dtype.
        what: the op and its sizes, for the report.
    """

    full: int
    low: int
    what: str


class OpCosts:
    """Prices of the ops of one graph, and of the bodies that it calls.

    Args:
        costs: the device's, which has curves for the low dtype.
        context: of the conversion: its low dtype, whether a backward pass follows, whether kernels cast what they read
            and write for nothing between matrix products, and the other way that attention may go.
    """

    def __init__(self, costs: DeviceCosts, context: Context) -> None:
        self.costs = costs
        self.low = context.low
        self._gradients, self._fused = context.gradients, context.casts_fuse
        self._attention_way: AttentionWay | None = None if context.attention is None else context.attention[0]
        self._differentiable: set[Node] = set()

    def enter(self, graph: Graph, is_body: bool = False) -> None:
        """Find out which values gradients flow through: into a body they may flow through all that it is given."""
        for node in graph.nodes if self._gradients else ():
            if node.op == "get_attr":
                flows = _requires_grad(attribute_of(node))
            elif node.op == "placeholder":
                flows = is_body or _requires_grad(fake_value(node))
            else:
                flows = facts_at(node).gradient and any(map(self._flows, node.all_input_nodes))
            if flows:
                self._differentiable.add(node)

    def price(self, node: Node) -> Price | str:
        """Return what an op that has a cost of its own takes (``OpRule.cost``), or why nobody knows."""
        kinds: dict[Cost, Callable[[Node], Price]] = {
            "product": self._product,
            "convolution": self._convolution,
            "transposed convolution": self._convolution,
            "attention": self._attention,
            "pointwise": self._pointwise,
        }
        cost = facts_at(node).cost
        if cost is None:
            return "its cost is not modelled"
        try:
            return kinds[cost](node)
        except _UnknownSizes:
            return "sizes unknown"

    def cast(self, node: Node) -> float:
        """Return the cost of casting a value to the other dtype at every call; for a parameter, that of its shadow."""
        count = _elements_or_captured(node)
        if node.op == "get_attr" and notes(node).kind == "parameter":
            return self._shadow(node, count or 1)
        if self._fused and is_row_operation(node):
            return 0.0
        return self._cast_of(count or 1) * (1 + self._flows(node))

    def traffic(self, node: Node) -> float:
        """Return how much more it costs when an op that is not LOW writes FP32; negative: less."""
        return self.stream(node, torch.float32) - self.stream(node, self.low)

    def stream(self, node: Node, dtype: torch.dtype) -> float:
        """Return the cost of an op that is not LOW writing this dtype; 0 for views, and for unknown sizes."""
        count = _elements_or_captured(node)
        if count is None or facts_at(node).view:
            return 0.0
        return self._picoseconds_of(Work.POINTWISE, dtype, count) * (1 + self._flows(node))

    def _flows(self, node: Node) -> bool:
        return node in self._differentiable

    def _shadow(self, node: Node, count: int) -> float:
        if not self._gradients:  # made once, and kept
            return 0.0
        # All weights share the call of the multi-tensor copy: each pays its elements, and a part of a call.
        alone, call = self._cast_of(count), self._cast_of(1)
        return alone - call + round(call * _REFRESH_CALL) + alone * self._flows(node)

    def _cast_of(self, count: int) -> int:
        return self._picoseconds_of(Work.CAST, self.low, count)

    def _picoseconds_of(self, work: Work, dtype: torch.dtype, amount: float) -> int:
        return _picoseconds(self.costs.seconds(work, dtype, amount))

    def _price(self, what: str, seconds: Callable[[torch.dtype], float]) -> Price:
        return Price(_picoseconds(seconds(torch.float32)), _picoseconds(seconds(self.low)), what)

    def _product(self, node: Node) -> Price:
        left, right = (_operand(node, position) for position in facts_at(node).factors)
        a, b, out = _shape(left), _shape(right), _shape(node)
        depth = _summed(node, a, b) if notes(node).op.name == "einsum" else a[-1]
        # The backward has a product for each operand that wants a gradient, of as many FLOP as the forward.
        flop, elements = 2 * prod(out) * depth, prod(a) + prod(b) + prod(out)
        gradients = self._flows(left) + self._flows(right)
        shown, forward = (b[::-1], self.costs.linear) if notes(node).op.name == "linear" else (b, self.costs.product)
        return self._price(
            f"{notes(node).op.name} {_text(a)} @ {_text(shown)}",
            lambda dtype: forward(dtype, flop, elements) + gradients * self.costs.product(dtype, flop, elements),
        )

    def _convolution(self, node: Node) -> Price:
        data, weight = _operand(node, 0), _operand(node, 1)
        x, w, out = _shape(data), _shape(weight), _shape(node)
        either = notes(node).op.name == "convolution"  # torch.convolution does both
        transposed = argument(node, 6, "transposed") if either else facts_at(node).cost == "transposed convolution"
        flop = 2 * prod(x if transposed else out) * prod(w[1:])
        thin = w[1] < _THIN
        forward = Work.THIN_CONVOLUTION if thin else Work.CONVOLUTION
        backward = Work.THIN_CONVOLUTION_BACKWARD if thin else Work.CONVOLUTION_BACKWARD
        gradients = (self._flows(data) + self._flows(weight)) / 2
        what = f"{notes(node).op.name} {_text(x)} * {_text(w)}"
        return self._price(what, lambda dtype: self.costs.there_and_back(dtype, flop, gradients, (forward, backward)))

    def _attention(self, node: Node) -> Price:
        query, key, value = (_operand(node, position) for position in range(3))
        q, k, v = _shape(query), _shape(key), _shape(value)
        flop = 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
        gradients = any(map(self._flows, (query, key, value)))
        what = f"attention of {_text(q)} over {_text(k)}"
        return self._price(what, lambda dtype: self.costs.attention(dtype, flop, gradients, self._attention_way))

    def _pointwise(self, node: Node) -> Price:
        out = _shape(node)
        passes = 1 + self._flows(node)
        return self._price(
            f"{notes(node).op.name} {_text(out)}",
            lambda dtype: passes * self.costs.seconds(Work.POINTWISE, dtype, prod(out)),
        )

    def why(self, price: Price, full: float, low: float) -> str:
        """For the report: ``full`` and ``low`` are the price with the casts that each choice needs."""
        casts = " with its casts"
        return (
            f"pays: {price.what} takes {time_text(full * 1e-12)} in float32{casts if full > price.full else ''}, "
            f"{time_text(low * 1e-12)} in {dtype_name(self.low)}{casts if low > price.low else ''} ({self.costs})"
        )


class _UnknownSizes(Exception):
    """A shape that nobody knows."""


def _picoseconds(seconds: float) -> int:
    return round(seconds * 1e12)


def _operand(node: Node, position: int) -> Node:
    """Return a tensor argument of a call, by position or, in the order of the call, by keyword."""
    given = [*node.args, *node.kwargs.values()]
    found = given[position] if position < len(given) else None
    if isinstance(found, Node):
        return found
    raise _UnknownSizes


def _shape(node: Node) -> Shape:
    value = attribute_of(node) if node.op == "get_attr" else fake_value(node)
    if not isinstance(value, Tensor):
        raise _UnknownSizes
    known = tuple(size for size in map(hint, value.shape) if size is not None)
    if len(known) != value.dim() or not known:
        raise _UnknownSizes
    return known


def _summed(node: Node, a: Shape, b: Shape) -> int:
    """Return the sizes of an einsum's summed dimensions, multiplied; of two operands, without an ellipsis."""
    equation = equation_of(node)
    if equation is None or len(equation.operands) != 2 or any("..." in operand for operand in equation.operands):
        raise _UnknownSizes
    first, second = equation.operands
    sizes = dict(zip(first + second, a + b, strict=False))
    return prod(sizes[index] for index in equation.summed)


def _elements_or_captured(node: Node) -> int | None:
    """Return ``elements``; where no pass has noted them, those of the fake value that was captured."""
    known = elements(node)
    count = numel_of(fake_value(node)) if known is None else known
    return count if isinstance(count, int) else None


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
