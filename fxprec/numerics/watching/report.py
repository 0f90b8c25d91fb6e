"""What there is to see of a step, on its way to the host; of a captured step the device sees it at each replay."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fxprec.numerics.watching.replay import Taken
from fxprec.numerics.watching.seen_call import SeenCall
from fxprec.numerics.watching.step_numbers import Numbers
from fxprec.scaling.on_host import OnHost


class Seen(NamedTuple):
    """On the device. ``ranks``: the last numbers are what all ranks found; ``scaled``: the last one is the scale."""

    numbers: Numbers
    ranks: bool
    scaled: bool


class Report(NamedTuple):
    """Of one step, before its optimizer took it."""

    step: Taken
    seen: Seen
    found: OnHost

    def numbers(self) -> Numbers:
        """On the host."""
        return replace(self.seen.numbers, values=self.found.values)


@dataclass(slots=True, eq=False)
class Recording:
    """A step that a graph was captured of.

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
        """A backward has come to a call."""
        if call not in self.calls:
            self.calls.append(call)
            self.count += 1
