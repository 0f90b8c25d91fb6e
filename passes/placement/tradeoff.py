"""Trade time against error by a cut in which every op may be either, for ``fxprec.numerics.tune``.

``pays`` weighs LOW ops against their casts, in time. Here the ops that follow, promote or are FULL are free as well,
and what is lost by rounding has a price, too: with a weight w (time a unit of squared error) the cut is the least of::

    seconds(ops) + seconds(casts) + w * (sum of the squared errors of all roundings)

There are two kinds of roundings. An op that is low rounds its result, for all that read it. A value that is FP32 is
rounded on its way into a reader that is low, for this reader alone: the stream of a residual net goes on unrounded when
a branch reads it low. The former costs where one variable is low, the latter where that of the value is FP32 and that
of the reader low. A view, or an op that only moves or selects values, is a reader like others: in a chain of them there
is one place where FP32 becomes low, and that is paid for.

Roundings count as independent, so their squares add up. Two things are simplified. Errors of several low readers of one
FP32 value are correlated in truth. And a low value that an op which only moves values takes in FP32, and hands to a low
reader, pays for that reader's rounding though it loses nothing; no best cut does that.

What the policy's overrides say stays, and so do pins of safety, ops whose cost is unknown, and in float16 the ops that
are FULL: an error measured on some data says nothing of the range of others.
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
from fxprec.passes.placement.mincut import Constraints, Freedom, Verdict
from fxprec.passes.placement.solver import CutProblem, Tensor, cost_of, solve
from fxprec.passes.placement.walk import Walk

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
        seconds: the time of a step: its casts, its LOW ops of known cost, and what the other ops move. Left out is
            what takes the same time in any dtype.
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
        pairs: the variables of a value and of a reader, where ``reads`` has an error for the two.
        unpriced: op that stays low, as nobody knows what it costs -> why.
    """

    def __init__(
        self,
        graphs: Sequence[GraphModule],
        context: Context,
        squares: Mapping[Node, float],
        reads: Mapping[tuple[Node, Node], float],
    ) -> None:
        walk = Walk(graphs, context)
        self._costs = walk.op_costs()
        self._constraints = Constraints(walk, Verdict(costs=self._costs), Freedom.ALL)
        self._variables = self._constraints.variables
        self.squares = squares
        self.choices: dict[Node, int] = {
            node: each for node, each in self._constraints.free.items() if self._variables.dtype_of(each) is None
        }
        self.unpriced = self._constraints.unpriced
        self._tie()
        self._time = self._variables.problem()
        self._base = self._seconds_if_low()
        self._error = self._errors(squares, reads)
        # A search tries thousands of moves: each is told from the tensors around its variables, not from all.
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
        """Return the least of picoseconds + weight * squared error."""
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
        """Return the move with all that closures make of it. None: a pin or the move itself forbids that."""
        whole = dict(move)
        waiting = [*move]
        for variable, full in waiting:  # which grows by what is forced
            if self._time.pins.get(variable, full) is not full:
                return None
            for other in self._forced[variable, full]:
                if other not in whole:
                    waiting.append((other, full))
                if whole.setdefault(other, full) is not full:
                    return None
        return tuple(whole.items())

    def moved(self, now: Outcome, move: Move) -> Outcome | None:
        """Return the outcome after a closed move, by what is around its variables. None: it is the same."""
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
        # ``decide`` solved another problem, whose answer may break closures of this one. Those are left out, so that
        # the choices are taken as they are, and not corrected.
        pins = dict(self._time.pins)
        for node, variable in self.choices.items():
            pins[variable] = computes_full(node)
        return self.outcome(solve(replace(self._time, pins=pins, closures=())))

    def price(self, node: Node) -> tuple[float, float] | None:
        """Seconds of an op without its casts, in FP32 and low; None: it moves nothing."""
        if node in self._constraints.priced:
            _, price, _ = self._constraints.priced[node]
            return price.full * 1e-12, price.low * 1e-12
        full, low = self._streams(node)
        return (full * 1e-12, low * 1e-12) if full or low else None

    def roots(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes that made the digits of a value; itself unless the op only moves values."""
        found: dict[Node, None] = {}
        waiting, seen = [node], {node}
        while waiting:
            each = waiting.pop()
            parts = [part for part in self._constraints.parts.get(each, ()) if self._constraints.has(part)]
            if not parts:
                found[self._variables.same(each)] = None
            waiting += [part for part in parts if part not in seen]
            seen.update(parts)
        return tuple(found)

    def heirs(self) -> dict[Node, list[Node]]:
        """Value -> those of which it is a part without a rounding, also across the borders of called bodies."""
        found: dict[Node, list[Node]] = defaultdict(list)
        for node, parts in self._constraints.parts.items():
            for part in parts:
                found[part].append(node)
        return found

    def _tie(self) -> None:
        """Tie all ops of a name to one decision."""
        names: dict[str, list[int]] = defaultdict(list)
        for node, variable in self.choices.items():
            names[node.name].append(variable)
        for first, *others in names.values():
            for other in others:
                self._variables.widen_with((first,), other)
                self._variables.widen_with((other,), first)

    def _errors(self, squares: Mapping[Node, float], reads: Mapping[tuple[Node, Node], float]) -> CutProblem:
        """Return the cut problem of squared errors: what is lost, in the place of what is taken.

        Each reader is listed as one that promotes, so that a tensor costs in one direction only: where its value is
        FP32 and a reader low. To widen a low value loses nothing.
        """
        value = self._variables.value
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
        return replace(self._time, tensors=tuple(tensors), unary=unary)

    def _read_in(self, node: Node, reader: Node) -> int | None:
        """Return the variable in whose dtype a value is read; None where the reader takes what arrives."""
        # A cast of the user's has no ``read``: it is noted as a reader in the dtype that it puts out.
        decided = self._constraints.decided.get(reader)
        known = () if decided is None else (decided.read, decided.out)
        return next((each for each in known if each is not None and self._variables.is_read(node, each)), None)

    def _unwidened(self, node: Node) -> Node:
        """Return what a cast of the user's to FP32 was made of: it has no more digits than that."""
        constraints, variables = self._constraints, self._variables
        while notes(node).op.name == "to" and len(parts := constraints.parts.get(node, ())) == 1:
            if not constraints.has(parts[0]) or variables.dtype_of(variables.value[node]) is not torch.float32:
                break
            node = parts[0]
        return node

    def _streams(self, node: Node) -> tuple[float, float]:
        """Picoseconds of an op that is no LOW one, in FP32 and low."""
        return self._costs.stream(node, torch.float32), self._costs.stream(node, self._costs.low)

    def _seconds_if_low(self) -> float:
        """Picoseconds of all ops where the free ones are low: what ``cost_of`` adds makes it the time of an assignment.

        ``cost_of`` counts from zero up. If an op is faster in FP32 it adds the difference where the op is low, and if
        the op is pinned to FP32 it adds what the sum below has already: both are taken off.
        """
        pins, total = self._time.pins, 0.0
        for variable, cost in self._time.unary.items():
            total -= max(cost if pins.get(variable) else -cost, 0.0)
        for node, decided in self._constraints.decided.items():
            if node in self._constraints.priced:
                total += self._constraints.priced[node][1].low
            elif node.op.startswith("call") and decided.rule is not Rule.KEEP:
                pinned = None if decided.out is None else self._variables.dtype_of(decided.out)
                total += self._streams(node)[0 if pinned not in (None, self._costs.low) else 1]
        return total


def computes_full(node: Node) -> bool:
    """Return whether the op is annotated to read (or, where it reads nothing of its own, to compute in) FP32."""
    precision = notes(node).precision
    reads = precision.reads if isinstance(precision.reads, torch.dtype) else precision.compute
    return reads is torch.float32


# -- the best within a budget: the hull of (time, error), and what is left beside it -----------------------------------

#: Relative to a sum: below it a difference is the order in which it was added up.
_LAST_DIGITS: Final = 1e-12


def cheapest_within(trade: TradeOff, square: float) -> Outcome | None:
    """Return the fastest assignment found of at most this squared error; None: even the most exact has more."""
    budget = _Budget(trade, square, lambda each: each.square, lambda each: each.seconds)
    return budget.best(trade.cut(EXACT), trade.cut(0.0))


def most_exact_within(trade: TradeOff, seconds: float) -> Outcome | None:
    """Return the most exact assignment found to take at most this long; None: even the fastest takes more."""
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
        if not self._is_within(good):
            return None
        if self._is_within(bad):
            return bad
        # Each cut finds a corner of the hull between the two ends, of which there are few, or that there is none.
        while bad.square != good.square:
            weight = (bad.seconds - good.seconds) / (good.square - bad.square) * 1e12
            found = self.trade.cut(weight)
            if not 0 < weight < EXACT or found.full in (good.full, bad.full) or not _below(found, good, bad):
                break
            good, bad = (found, bad) if self._is_within(found) else (good, found)
        moves = self._moves(good, bad)
        # From either end, and back from beyond the limit: the best of the three wins.
        back = self._improved(bad, moves)
        found = [good, self._improved(good, moves), self._improved(back, moves)]
        return min(filter(self._is_within, found), key=self.wanted)

    def _is_within(self, outcome: Outcome) -> bool:
        """Return whether the limit is kept, but for the last digits of a sum: those depend on its order."""
        return self.bounded(outcome) <= self.limit * (1 + _LAST_DIGITS)

    def _moves(self, good: Outcome, bad: Outcome) -> list[Move]:
        """Return the assignments that are worth a try: ops made FP32 or low.

        - each op alone;
        - the maker of a value together with a reader of it: if only the maker becomes FP32, its rounding moves into the
          low reader, and nothing is won;
        - all ops that are connected by such pairs and differ between the two points of the hull, as in either of them.

        With each goes what closures force.
        """
        pairs = self.trade.pairs
        groups = [*((variable,) for variable in dict.fromkeys(self.trade.choices.values())), *pairs]
        moves: list[Move] = [tuple((each, full) for each in group) for group in groups for full in (True, False)]
        differ = {variable for variable, own in enumerate(good.full) if own != bad.full[variable]}
        for part in _connected(pair for pair in pairs if differ.issuperset(pair)):
            moves += [tuple((each, end.full[each]) for each in part) for end in (good, bad)]
        whole = (self.trade.closed(move) for move in moves)
        return [*dict.fromkeys(move for move in whole if move is not None)]

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
        """Return what a move gains for its price, and where it leads; 0 where it gains nothing or passes the limit.

        Beyond the limit what is gained is the way back to it.
        """
        found = self.trade.moved(now, move)
        if found is None:
            return 0.0, now
        more, less = self.bounded(found) - self.bounded(now), self.wanted(now) - self.wanted(found)
        within = self._is_within(now)
        if not within:
            gain, price = min(-more, self.bounded(now) - self.limit), -less
        else:
            gain, price = less if self._is_within(found) else 0.0, more
        if gain <= _LAST_DIGITS * (self.wanted if within else self.bounded)(now):
            return 0.0, now  # no noise of sums is followed, or it would be for ever
        return (gain / price if price > 0 else math.inf), found


def _connected(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Return the connected parts of a graph of these edges."""
    part: dict[int, dict[int, None]] = {}
    for pair in pairs:
        whole = {each: None for end in pair for each in part.get(end, (end,))}
        part |= dict.fromkeys(whole, whole)
    yield from dict.fromkeys(map(tuple, part.values()))


def _below(found: Outcome, one: Outcome, other: Outcome) -> bool:
    """Return whether a point is below the line through two others."""
    run, rise = other.square - one.square, other.seconds - one.seconds
    line = one.seconds + rise * (found.square - one.square) / run
    return found.seconds < line - 1e-9 * abs(line)
