"""Time against error: the cut in which every op may be either, for ``fxprec.numerics.tune``.

``pays`` weighs LOW ops against their casts, in time. Here the ops that follow, promote or are FULL are free as well,
and what is lost by rounding has a price, too: with a weight w (time a unit of squared error) the cut is the least of::

    seconds(ops) + seconds(casts) + w * (sum of the squared errors of all roundings)

There are two kinds of roundings. An op that is low rounds its result, for all that read it. A value that is FP32 is
rounded on its way into a reader that is low, for this reader alone: the stream of a residual net goes on unrounded when
a branch reads it low. The former costs where one variable is low, the latter where that of the value is FP32 and that
of the reader low. A view, or an op that only moves or selects values, is a reader like others: in a chain of them there
is one place where FP32 becomes low, and that is paid for.

Roundings count as independent, so their squares add up. That leaves out what several low readers of one FP32 value have
in common, and where an op that only moves values makes FP32 of low ones again, for a low reader behind it, their second
rounding is paid for although it loses nothing: no cut has a reason to do so. What the policy's overrides say stays, and
so do pins of safety, ops whose cost is unknown, and in float16 the ops that are FULL: an error measured on some data
says nothing of the range of others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import notes
from fxprec.passes.placement.free_walk import FreeWalk
from fxprec.passes.placement.op_costs import OpCosts
from fxprec.passes.placement.solver import CutProblem, Tensor, cost_of, solve

#: Units of the cut in a picosecond: costs are whole numbers, so that sums are exact.
_UNITS: Final = 1024
#: A weight beside which no time counts.
EXACT: Final = 2.0**200

#: Variables, and whether each becomes FP32.
Move: TypeAlias = tuple[tuple[int, bool], ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An assignment.

    Attributes:
        full: variable -> whether it is FP32.
        seconds: of a step, of what differs between dtypes, and the ops between.
        square: the squared error that it predicts.
    """

    full: tuple[bool, ...]
    seconds: float
    square: float


class TradeOff:
    """The cut problem of graphs that belong together.

    Args:
        graphs: after ``canonicalize`` and ``propagate`` with sizes, and unchanged otherwise.
        context: with costs.
        squares: node of the graphs -> the squared error of its value where the node is low.
        reads: (value, reader) -> the squared error where the value is FP32 and the reader reads it rounded.

    Attributes:
        choices: op that may be either -> its variable. Ops of one name share the decision, as overrides name them.
        squares: as they were given.
        pairs: the variables of a value and of one that reads it at such a price.
        unpriced: op that stays low, as nobody knows what it costs -> why.
    """

    def __init__(
        self,
        graphs: Sequence[GraphModule],
        context: Context,
        squares: Mapping[Node, float],
        reads: Mapping[tuple[Node, Node], float],
    ) -> None:
        assert context.costs is not None
        costs = OpCosts.of(context.costs, context)
        walk = FreeWalk(context, costs)
        for gm in graphs:
            costs.start()
            walk.run(gm)
        self._walk = walk
        self.squares = squares
        self.choices: dict[Node, int] = {
            node: variable for node, variable in walk.free.items() if not walk.variables.is_pinned(variable)
        }
        self.unpriced = walk.unpriced
        walk.tie(self.choices)
        self._time = walk.variables.problem()
        self._base = walk.base()
        self._error = walk.errors(self._time, squares, reads)
        self._around: list[tuple[CutProblem, Mapping[int, Sequence[int]]]] = []  # variable -> tensors, by number
        for problem in (self._time, self._error):
            around: dict[int, list[int]] = defaultdict(list)
            for number, tensor in enumerate(problem.tensors):
                for variable in dict.fromkeys((tensor.producer, *tensor.users)):
                    around[variable].append(number)
            self._around.append((problem, around))
        self._forced: dict[tuple[int, bool], list[int]] = defaultdict(list)  # by closures, to the same dtype
        for x, y in self._time.closures:
            self._forced[x, True].append(y)
            self._forced[y, False].append(x)
        self.pairs = tuple(dict.fromkeys((each.producer, each.users[0]) for each in self._error.tensors))

    def cut(self, weight: float) -> Outcome:
        """The least of picoseconds + weight * squared error."""
        unary: dict[int, float] = defaultdict(float)
        tensors: list[Tensor] = []
        for problem, factor in ((self._time, 1.0), (self._error, weight)):
            for variable, cost in problem.unary.items():
                unary[variable] += round(cost * factor * _UNITS)
            tensors += [tensor._replace(cost=round(tensor.cost * factor * _UNITS)) for tensor in problem.tensors]
        return self.outcome(solve(replace(self._time, tensors=tuple(tensors), unary=unary)))

    def outcome(self, full: Sequence[bool]) -> Outcome:
        """Return the cost and the error of an assignment."""
        seconds = (self._base + cost_of(self._time, [*full])) * 1e-12
        return Outcome(tuple(full), seconds, cost_of(self._error, [*full]))

    def closed(self, move: Move) -> Move | None:
        """The move with all that closures make of it. None: a pin or the move itself forbids that."""
        whole = dict(move)
        waiting = [*move]
        for variable, full in waiting:
            if self._time.pins.get(variable, full) is not full:
                return None
            for other in self._forced[variable, full]:
                if other not in whole:
                    waiting.append((other, full))
                if whole.setdefault(other, full) is not full:
                    return None
        return tuple(whole.items())

    def moved(self, now: Outcome, move: Move) -> Outcome | None:
        """The outcome after a closed move, by what is around its variables. None: it is the same."""
        full = [*now.full]
        for variable, own in move:
            full[variable] = own
        changed = [variable for variable, own in move if own is not now.full[variable]]
        if not changed:
            return None
        more: list[float] = []
        for problem, around in self._around:
            tensors = dict.fromkeys(number for variable in changed for number in around[variable])
            part = CutProblem(
                problem.variables,
                {},
                tuple(problem.tensors[number] for number in tensors),
                unary={variable: problem.unary[variable] for variable in changed if variable in problem.unary},
            )
            more.append(cost_of(part, full) - cost_of(part, [*now.full]))
        return Outcome(tuple(full), now.seconds + more[0] * 1e-12, now.square + more[1])

    def decided(self) -> Outcome:
        """Return the assignment of the graphs' annotations, as ``decide`` wrote them last."""
        pins = dict(self._time.pins)
        for node, variable in self.choices.items():
            pins[variable] = computes_full(node)
        return self.outcome(solve(replace(self._time, pins=pins, closures=())))

    def price(self, node: Node) -> tuple[float, float] | None:
        """Seconds of an op without its casts, in FP32 and low; None: it moves nothing."""
        if node in self._walk.priced:
            _, price, _ = self._walk.priced[node]
            return price.full * 1e-12, price.low * 1e-12
        full, low = self._walk.streams(node)
        return (full * 1e-12, low * 1e-12) if full or low else None

    def roots(self, node: Node) -> tuple[Node, ...]:
        """The values whose rounding a rounding of this node's value is."""
        return self._walk.digits_of(node)

    def heirs(self) -> dict[Node, list[Node]]:
        """Value -> those of which it is a part without a rounding, also across the borders of called bodies."""
        found: dict[Node, list[Node]] = defaultdict(list)
        for node, parts in self._walk.parts.items():
            for part in parts:
                found[part].append(node)
        return found


def computes_full(node: Node) -> bool:
    """Return whether the op is annotated to read (or, where it reads nothing of its own, to compute in) FP32."""
    precision = notes(node).precision
    reads = precision.reads if isinstance(precision.reads, torch.dtype) else precision.compute
    return reads is torch.float32
