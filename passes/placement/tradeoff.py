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

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import Rule, notes
from fxprec.passes.ops.names import dtype_argument
from fxprec.passes.placement.op_costs import OpCosts
from fxprec.passes.placement.pays import PricedWalk
from fxprec.passes.placement.pins import commutes_with_rounding
from fxprec.passes.placement.sites import Site, dtype_reference
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
        costs = OpCosts(context.costs, context.low, context.gradients, context.casts_fuse)
        walk = _FreeWalk(context, costs)
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
        self._closures: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for closure in self._time.closures:
            for variable in closure:
                self._closures[variable].append(closure)
        self.pairs = tuple(dict.fromkeys((each.producer, each.users[0]) for each in self._error.tensors))

    def cut(self, weight: float) -> Outcome:
        """The least of picoseconds + weight * squared error."""
        unary: dict[int, float] = defaultdict(float)
        tensors: list[Tensor] = []
        for problem, factor in ((self._time, 1.0), (self._error, weight)):
            for variable, cost in problem.unary.items():
                unary[variable] += round(cost * factor * _UNITS)
            tensors += [replace(tensor, cost=round(tensor.cost * factor * _UNITS)) for tensor in problem.tensors]
        return self.outcome(solve(replace(self._time, tensors=tuple(tensors), unary=unary)))

    def outcome(self, full: Sequence[bool]) -> Outcome:
        """What an assignment takes and loses."""
        seconds = (self._base + cost_of(self._time, [*full])) * 1e-12
        return Outcome(tuple(full), seconds, cost_of(self._error, [*full]))

    def is_possible(self, full: Sequence[bool]) -> bool:
        """Whether an assignment honours pins and closures."""
        pins = all(full[variable] is pin for variable, pin in self._time.pins.items())
        return pins and all(full[y] for x, y in self._time.closures if full[x])

    def moved(self, now: Outcome, move: Move) -> Outcome | None:
        """The outcome where some variables are others: by what is around them. None: they are not, or may not be."""
        full = [*now.full]
        for variable, own in move:
            full[variable] = own
        changed = [variable for variable, own in move if own is not now.full[variable]]
        if not changed or any(
            self._time.pins.get(variable, full[variable]) is not full[variable] for variable in changed
        ):
            return None
        if any(full[x] and not full[y] for variable in changed for x, y in self._closures[variable]):
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
        """What the graphs' annotations say, as ``decide`` wrote them last."""
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
    """Whether the op is annotated to read (or, where it reads nothing of its own, to compute in) FP32."""
    precision = notes(node).precision
    reads = precision.reads if isinstance(precision.reads, torch.dtype) else precision.compute
    return reads is torch.float32


def cheapest_within(trade: TradeOff, square: float) -> Outcome | None:
    """The fastest assignment that was found of at most this squared error; None: even the most exact has more."""
    budget = _Budget(trade, square, lambda each: each.square, lambda each: each.seconds)
    return budget.best(trade.cut(EXACT), trade.cut(0.0))


def most_exact_within(trade: TradeOff, seconds: float) -> Outcome | None:
    """The assignment of the least error that was found to take at most this long; None: even the fastest takes more."""
    budget = _Budget(trade, seconds, lambda each: each.seconds, lambda each: each.square)
    return budget.best(trade.cut(0.0), trade.cut(EXACT))


@dataclass(frozen=True, slots=True)
class _Budget:
    """At most ``limit`` of what is bounded, and as little as can be of what is wanted small."""

    trade: TradeOff
    limit: float
    bounded: Callable[[Outcome], float]
    wanted: Callable[[Outcome], float]

    def best(self, good: Outcome, bad: Outcome) -> Outcome | None:
        """Follow the lower convex hull of (time, error) to where it crosses the limit, then use what is left.

        The chord between two points of the hull gives the weight of the next: the cut lies below the chord, or on it
        where there is no further point between (Eisner and Severance, JACM 1976). Between the last two single ops are
        changed, from either end.

        Args:
            good: the end of the hull with the least of what is bounded; ``bad``: the other end.
        """
        if self.bounded(good) > self.limit:
            return None
        if self.bounded(bad) <= self.limit:
            return bad
        while bad.square != good.square:
            weight = (bad.seconds - good.seconds) / (good.square - bad.square) * 1e12
            found = self.trade.cut(weight)
            if not 0 < weight < EXACT or found.full in (good.full, bad.full) or not _below(found, good, bad):
                break
            good, bad = (found, bad) if self.bounded(found) <= self.limit else (good, found)
        moves = self._moves(good, bad)
        back = self._improved(bad, moves)
        found = [good, self._improved(good, moves), self._improved(back, moves)]
        return min((each for each in found if self.bounded(each) <= self.limit), key=self.wanted)

    def _moves(self, good: Outcome, bad: Outcome) -> list[Move]:
        """What is worth a try: ops made FP32 or low.

        One alone; one that makes a value and one that reads it, as what the former no longer rounds the latter does;
        and all that are connected in this way and differ between two points of the hull, as in either.
        """
        pairs = self.trade.pairs
        groups = [*((variable,) for variable in dict.fromkeys(self.trade.choices.values())), *pairs]
        moves: list[Move] = [tuple((each, full) for each in group) for group in groups for full in (True, False)]
        differ = {variable for variable, own in enumerate(good.full) if own != bad.full[variable]}
        for part in _connected(pair for pair in pairs if differ.issuperset(pair)):
            moves += [tuple((each, end.full[each]) for each in part) for end in (good, bad)]
        return [*dict.fromkeys(moves)]

    def _improved(self, now: Outcome, moves: Sequence[Move]) -> Outcome:
        """Move as long as it is worth it, best moves first: to the limit, and then to what is wanted within it."""
        changed = True
        while changed:
            changed = False
            worth = {move: self._worth(now, move)[0] for move in moves}
            for move in sorted((move for move in moves if worth[move] > 0), key=lambda move: -worth[move]):
                value, found = self._worth(now, move)
                if value > 0:
                    now, changed = found, True
            now = self.trade.outcome(now.full)  # without what the differences have gathered in last digits
        return now

    def _worth(self, now: Outcome, move: Move) -> tuple[float, Outcome]:
        """What a move gains for its price, and where it leads; 0 where nothing is gained or the limit is passed.

        Beyond the limit what is gained is the way back to it.
        """
        found = self.trade.moved(now, move)
        if found is None:
            return 0.0, now
        more, less = self.bounded(found) - self.bounded(now), self.wanted(now) - self.wanted(found)
        if self.bounded(now) > self.limit:
            gain, price = min(-more, self.bounded(now) - self.limit), -less
        else:
            gain, price = less if self.bounded(found) <= self.limit else 0.0, more
        if gain <= 0:
            return 0.0, now
        return (gain / price if price > 0 else math.inf), found


def _connected(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """The connected parts of a graph of these edges."""
    part: dict[int, dict[int, None]] = {}
    for pair in pairs:
        whole = {each: None for end in pair for each in part.get(end, (end,))}
        part |= dict.fromkeys(whole, whole)
    yield from dict.fromkeys(map(tuple, part.values()))


def _below(found: Outcome, one: Outcome, other: Outcome) -> bool:
    """Whether a point is below the line through two others."""
    run, rise = other.square - one.square, other.seconds - one.seconds
    line = one.seconds + rise * (found.square - one.square) / run
    return found.seconds < line - 1e-9 * abs(line)


class _FreeWalk(PricedWalk):
    """The cut problem in which ops that follow, promote or are FULL are free as LOW ones are."""

    def __init__(self, context: Context, costs: OpCosts) -> None:
        super().__init__(context, costs)
        self.free: dict[Node, int] = {}
        self.parts: dict[Node, tuple[Node, ...]] = {}  # value -> those that it is made of without a rounding

    def share_dtype(self, node: Node, whole: Node) -> None:
        super().share_dtype(node, whole)
        self.parts[node] = (whole,)

    def bind_operand(self, placeholder: Node, operand: Node) -> None:
        super().bind_operand(placeholder, operand)
        self.parts[placeholder] = (operand,)

    def read_by_user_cast(self, node: Node, source: Node) -> None:
        super().read_by_user_cast(node, source)
        self.parts[node] = (source,)

    def view_of_written(self, site: Site, floats: bool) -> None:
        super().view_of_written(site, floats)
        self.parts[site.node] = (site.base,)

    def low(self, site: Site, floats: bool) -> None:
        super().low(site, floats)
        if site.node in self.priced:
            self.free[site.node] = self.priced[site.node][2]

    def full(self, site: Site, floats: bool) -> None:
        node, variables = site.node, self.variables
        if self.is_overridden(site) or not floats or notes(node).dtype is not torch.float32:
            return super().full(site, floats)
        if not self._may_be_low(site):
            super().full(site, floats)  # a norm's data may still be low, and the values of a sum
            read = self.decided[node].read
            if read is not None and self.has(node):
                self.free[node] = read
            return None
        variable = variables.value[node] = variables.new(node)
        variables.read_data(site, variable)
        self.free[node] = variable
        return self.decide(node, site.rule, site.why, variable, site=site)

    def _may_be_low(self, site: Site) -> bool:
        node, asked = site.node, dtype_argument(site.node)
        own = site.has_mixed_kernel(self.context) or site.accumulates_wide(self.context, asked)
        safe = self.context.low is torch.bfloat16 and site.facts.low_kernel and node not in self.squares
        return safe and not own and asked is None and dtype_reference(node) is None and node not in self.classes

    def follow(self, site: Site, floats: bool) -> None:
        super().follow(site, floats)
        decided = self.decided[site.node]
        if site.facts.exact or commutes_with_rounding(site):
            self.parts[site.node] = site.data
        if floats and decided.read is not None and notes(site.node).dtype is torch.float32:
            self.free[site.node] = decided.read

    def promote(self, site: Site, variable: int) -> None:
        """FP32 inputs make nobody FP32: that, too, is weighed. But of memory that is written there is one dtype."""
        if site.node in self.classes:
            super().promote(site, variable)

    def tie(self, choices: Mapping[Node, int]) -> None:
        """One decision for all ops of a name."""
        names: dict[str, list[int]] = defaultdict(list)
        for node, variable in choices.items():
            names[node.name].append(variable)
        for first, *others in names.values():
            for other in others:
                self.variables.widen_with((first,), other)
                self.variables.widen_with((other,), first)

    def digits_of(self, node: Node) -> tuple[Node, ...]:
        """Where the digits of a value were made; itself unless the op only moves values."""
        found: dict[Node, None] = {}
        waiting, seen = [node], {node}
        while waiting:
            each = waiting.pop()
            parts = [part for part in self.parts.get(each, ()) if self.has(part)]
            if not parts:
                found[self.variables.same(each)] = None
            waiting += [part for part in parts if part not in seen]
            seen.update(parts)
        return tuple(found)

    def errors(
        self, time: CutProblem, squares: Mapping[Node, float], reads: Mapping[tuple[Node, Node], float]
    ) -> CutProblem:
        """What is lost instead of what is taken: the cut problem of squared errors.

        A tensor whose readers would all widen it for nothing costs where it is FP32 and one of them low, and no more.
        """
        value = self.variables.value
        unary: dict[int, float] = defaultdict(float)
        for node, square in squares.items():
            if node in value:
                unary[value[node]] -= square
        tensors = []
        for (node, reader), square in reads.items():
            read = self._read_in(node, reader)
            made = value.get(self._unwidened(node))
            if read is not None and made is not None and made != read and square > 0:
                tensors.append(Tensor(made, (read,), square, frozenset((read,))))
        return replace(time, tensors=tuple(tensors), unary=unary)

    def _read_in(self, node: Node, reader: Node) -> int | None:
        """The variable in whose dtype a value is read; None where the reader takes what arrives."""
        decided = self.decided.get(reader)
        if decided is None:
            return None
        known = (decided.read, decided.out)
        return next((each for each in known if each is not None and self.variables.is_read(node, each)), None)

    def _unwidened(self, node: Node) -> Node:
        """What a cast of the user's to FP32 was made of: it has no more digits than that."""
        while notes(node).op.name == "to" and len(parts := self.parts.get(node, ())) == 1 and self.has(parts[0]):
            if self.variables.dtype_of(self.variables.value[node]) is not torch.float32:
                break
            node = parts[0]
        return node

    def streams(self, node: Node) -> tuple[float, float]:
        """Picoseconds of an op that is no LOW one, in FP32 and low."""
        assert isinstance(self.verdict.costs, OpCosts)
        costs = self.verdict.costs
        return costs.stream(node, torch.float32), costs.stream(node, costs.low)

    def base(self) -> float:
        """Picoseconds of all ops where the free ones are low."""
        total = 0.0
        for node, decided in self.decided.items():
            if node in self.priced:
                total += self.priced[node][1].low
            elif node.op.startswith("call") and decided.rule is not Rule.KEEP:
                out = decided.out
                wide = (
                    out is not None
                    and self.variables.is_pinned(out)
                    and self.variables.dtype_of(out) is not self.context.low
                )
                total += self.streams(node)[0 if wide else 1]
        return total
