"""The best assignment within a budget of error or time: the hull of (time, error), and what is left beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fxprec.passes.placement.tradeoff import EXACT, Move, Outcome, TradeOff

_LAST_DIGITS: Final = 1e-12


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
        if not self._is_within(good):
            return None
        if self._is_within(bad):
            return bad
        while bad.square != good.square:
            weight = (bad.seconds - good.seconds) / (good.square - bad.square) * 1e12
            found = self.trade.cut(weight)
            if not 0 < weight < EXACT or found.full in (good.full, bad.full) or not _below(found, good, bad):
                break
            good, bad = (found, bad) if self._is_within(found) else (good, found)
        moves = self._moves(good, bad)
        back = self._improved(bad, moves)
        found = [good, self._improved(good, moves), self._improved(back, moves)]
        return min(filter(self._is_within, found), key=self.wanted)

    def _is_within(self, outcome: Outcome) -> bool:
        """Return whether the limit is kept, but for the last digits of a sum: those depend on its order."""
        return self.bounded(outcome) <= self.limit * (1 + _LAST_DIGITS)

    def _moves(self, good: Outcome, bad: Outcome) -> list[Move]:
        """Return the assignments that are worth a try: ops made FP32 or low.

        One alone; one that makes a value and one that reads it, as what the former no longer rounds the latter does;
        and all that are connected in this way and differ between two points of the hull, as in either. With each goes
        what closures force.
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
    """The connected parts of a graph of these edges."""
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
