"""Training steps timed side by side: variants in turns in one process, and what their figures allow to say.

Each round runs a few steps of every variant: one after the other, another one first each round, and every second round
backwards, so that no variant always follows the same one. The first steps after a change are not timed, since caches
then hold what belongs to another. A ratio is that of two medians of the same round, its value the median of all rounds:
what slows the machine for a while slows both. Of the same variant built twice the ratio should be 1: how far it is
from that, and how much it scatters, is the noise. A ratio within the noise, or within its own scatter, is called
neither faster nor slower.

On a CPU what is freed stays with the process (``fxprec.keep_memory``): malloc otherwise gives back to the system what
lies on top of its heap, and which variant then pays for the page faults depends on where the others' tensors happen to
lie.

On CUDA a step is timed by events, without waiting between steps, on the host by its clock. All samples are kept.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

__all__ = [
    "Ratio", "Samples", "Schedule", "device_times", "fastest", "free_variants", "give_memory_back", "host_times",
    "measure", "noise", "order",
]  # fmt: skip

Clock = Callable[[Callable[[], object], int], list[float]]
Verdict = Literal["faster", "slower", "="]

#: Nothing closer to 1 than this is told apart, however well twins agree.
_LEAST_NOISE: Final = 0.005
#: Twice the standard error of the median of n normal samples is 2 * 1.2533 * sigma / sqrt(n), and of a normal
#: distribution p80 - p20 is 1.6832 * sigma.
_TWO_ERRORS: Final = 2 * 1.2533 / 1.6832
_LEAST_ROUNDS: Final = 5


def host_times(step: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of so many calls, by the clock of the host."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    return times


def device_times(step: Callable[[], object], count: int) -> list[float]:
    """Milliseconds from each call's start to its end on the current CUDA stream: of the device, and of its waiting."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


@dataclass(frozen=True)
class Schedule:
    """How often each variant runs: ``warm_up`` steps, in each round ``settle`` untimed and ``steps`` timed ones."""

    warm_up: int = 20
    rounds: int = 5
    steps: int = 50
    settle: int = 2

    @property
    def total(self) -> int:
        """Steps of a variant, timed or not."""
        return self.warm_up + self.rounds * (self.settle + self.steps)

    def within(self, seconds: float, step: float) -> Schedule:
        """The same with as many rounds as fit into ``seconds``, where one step of every variant takes ``step``.

        Where not even five fit, five with fewer steps, though never fewer than two.
        """
        fit = seconds / step
        rounds = min(self.rounds, max(_LEAST_ROUNDS, int(fit / (self.settle + self.steps))))
        steps = min(self.steps, max(2, int(fit / rounds) - self.settle))
        return replace(self, rounds=rounds, steps=steps)


@dataclass(frozen=True)
class Samples:
    """Milliseconds of every timed step of a variant, by rounds."""

    rounds: tuple[tuple[float, ...], ...]

    def __add__(self, later: Samples) -> Samples:
        """With later rounds."""
        return Samples(self.rounds + later.rounds)

    @property
    def all(self) -> list[float]:
        return sorted(each for one in self.rounds for each in one)

    @property
    def median(self) -> float:
        return statistics.median(self.all)

    @property
    def least(self) -> float:
        return self.all[0]

    def quantile(self, share: float) -> float:
        """The sample with about this share of all below it."""
        return _quantile(self.all, share)


@dataclass(frozen=True)
class Ratio:
    """Time of another variant over that of one, round by round: above 1 the one is faster.

    Attributes:
        value: the median of all rounds.
        least: that of the two fastest steps.
        error: twice the standard error of ``value``, by the scatter of the rounds; infinite where there was but one.
    """

    value: float
    least: float
    error: float

    @classmethod
    def of(cls, one: Samples, other: Samples) -> Ratio:
        """Raises ValueError where the two did not run in the same rounds."""
        pairs = zip(one.rounds, other.rounds, strict=True)
        each = sorted(statistics.median(theirs) / statistics.median(own) for own, theirs in pairs)
        return cls(statistics.median(each), other.least / one.least, _two_errors(each))

    def verdict(self, noise: float) -> Verdict:
        """Of the one against the other: within the noise, or its own error, it is "="."""
        if abs(self.value - 1) <= self.error:
            return "="
        if self.value > 1 + noise:
            return "faster"
        return "slower" if self.value < 1 / (1 + noise) else "="


def noise(twins: Iterable[Ratio]) -> float:
    """How far from 1 a ratio may be without meaning anything, by the ratios of variants that were built twice.

    The largest of their distances from 1, of their errors, and of 0.005; infinite without twins.
    """
    found = [max(twin.value - 1, 1 / twin.value - 1, twin.error, _LEAST_NOISE) for twin in twins]
    return max(found, default=float("inf"))


def give_memory_back() -> None:
    """All free pages, once, between models that have nothing to do with one another.

    Source: malloc_trim(3).
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)


def free_variants() -> None:
    """Of what was built, before other things are."""
    torch.compiler.reset()
    gc.collect()
    give_memory_back()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def order(names: Sequence[str], number: int) -> list[str]:
    """That of a round: another name is first in each, and every second round goes backwards."""
    turn = number % len(names)
    turned = [*names[turn:], *names[:turn]]
    return turned if number % 2 == 0 else [turned[0], *reversed(turned[1:])]


def measure(
    steps: Mapping[str, Callable[[], object]],
    schedule: Schedule,
    clock: Clock,
    rest: Callable[[str], object] = lambda name: None,
) -> dict[str, Samples]:
    """Time all variants in turns. They are to be warm: ``schedule.warm_up`` is the caller's.

    ``rest``: called after each turn with the variant's name, untimed.
    """
    names = [*steps]
    rounds: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    thaws = not gc.get_freeze_count()  # what others froze stays so
    gc.collect()
    gc.freeze()  # what the models hold need not be looked through between rounds
    try:
        for number in range(schedule.rounds):
            for name in order(names, number):
                gc.collect()
                gc.disable()
                clock(steps[name], schedule.settle)
                rounds[name].append(tuple(clock(steps[name], schedule.steps)))
                rest(name)
                gc.enable()
    finally:
        gc.enable()
        if thaws:
            gc.unfreeze()
    return {name: Samples(tuple(each)) for name, each in rounds.items()}


def fastest(ways: Sequence[Callable[[], object]], seconds: float, runs: int = 3) -> list[float]:
    """Seconds of the fastest run of each way: they run in turns, ``runs`` times at least, so long for each of them."""
    best = [math.inf] * len(ways)
    end, done = time.perf_counter() + len(ways) * seconds, -1
    while done < runs or time.perf_counter() < end:
        for number, way in enumerate(ways):
            started = time.perf_counter()
            way()
            if done >= 0:
                best[number] = min(best[number], time.perf_counter() - started)
        done += 1
    return best


def _two_errors(values: Sequence[float]) -> float:
    """Twice the standard error of the median, by p80 - p20: a round that was disturbed does not count for more."""
    if len(values) < 2:
        return float("inf")
    p20, *_, p80 = statistics.quantiles(values, n=5)
    return _TWO_ERRORS * (p80 - p20) / len(values) ** 0.5


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]
