"""Numbers of a step on their way to the host; of a captured step the device writes them at each replay."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fxprec.host_reads import OnHost
from fxprec.numerics.watching.replay import WatchedStep
from fxprec.numerics.watching.seen_call import SeenCall
from fxprec.numerics.watching.step_numbers import Numbers


class Seen(NamedTuple):
    """Numbers on the device. ``ranks``: the last are what all ranks found; ``scaled``: the last is the scale."""

    numbers: Numbers
    ranks: bool
    scaled: bool


class StepReport(NamedTuple):
    """Numbers of one step, before its optimizer took it, on their way to the host."""

    step: WatchedStep
    seen: Seen
    found: OnHost

    def numbers(self) -> Numbers:
        """Return the numbers on the host."""
        return replace(self.seen.numbers, values=self.found.values)


@dataclass(slots=True, eq=False)
class Recording:
    """Step that a graph was captured of.

    Attributes:
        calls: of the model, those that a gradient came to; while it runs.
        count: how many there were.
        seen: written by each replay; None: no optimizer of the model stepped.
        tables: of launches, which the graph reads.
    """

    calls: list[SeenCall] = field(default_factory=list)
    count: int = 0
    seen: Seen | None = None
    tables: object = None

    def came(self, call: SeenCall) -> None:
        """Note a call that a backward has come to."""
        if call not in self.calls:
            self.calls.append(call)
            self.count += 1
