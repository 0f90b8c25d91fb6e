"""How near the model of time comes to what was measured."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import Final

__all__ = ["Compared"]

#: How far two times lie apart of which the model is asked for the shorter one.
_APART: Final = 1.05


@dataclass(frozen=True)
class Compared:
    """The forms of one kernel.

    Attributes:
        times: of each form microseconds, measured and predicted.
        spilled: forms that are left out.
    """

    model: str
    region: str
    direction: str
    times: tuple[tuple[float, float], ...]
    spilled: int

    @property
    def ratios(self) -> list[float]:
        """Predicted over measured."""
        return [guess / us for us, guess in self.times]

    @property
    def mean(self) -> float:
        return statistics.geometric_mean(self.ratios)

    @property
    def ordered(self) -> float:
        """Of two forms whose times differ, how often the faster one is said to be."""
        pairs = [
            (first, second) for first, second in itertools.permutations(self.times, 2) if second[0] > _APART * first[0]
        ]
        return sum(first[1] < second[1] for first, second in pairs) / len(pairs) if pairs else math.nan

    @property
    def pick(self) -> float:
        """Measured time of the form that is said to be the fastest, over that of the fastest."""
        return min(self.times, key=lambda pair: pair[1])[0] / min(us for us, _ in self.times)
