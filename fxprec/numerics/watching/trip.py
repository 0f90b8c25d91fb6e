"""A training step that was not finite, as ``watch`` tells of it."""

from __future__ import annotations

from dataclasses import dataclass

from fxprec.numerics.finding import Finding


@dataclass(frozen=True, slots=True)
class Trip:
    """Step of which an output or a gradient was not finite. ``print(trip)`` tells it in sentences.

    Attributes:
        step: its number: that of the steps before it that were watched.
        call: the model's call that it began in, of the calls that gradients came from (micro-batches), counted from 0;
            None: it is not known.
        calls: how many there were.
        rank: of this process among those that train together; None: there are no others.
        finding: where it began; None: see ``why``.
        why: why there is no finding.
        skipped: an optimizer would have taken the gradients, and did not.
        remarks: what else is known.
    """

    step: int
    call: int | None
    calls: int
    rank: int | None
    finding: Finding | None
    why: str = ""
    skipped: bool = False
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"step {self.step}"
        if self.call is not None and self.calls > 1:
            where += f", call {self.call} of {self.calls}"
        if self.rank is not None:
            where += f", rank {self.rank}"
        skipped = ", and was skipped" if self.skipped else ""
        what = self.why if self.finding is None else str(self.finding)
        return "\n".join([f"{where} was not finite{skipped}: {what}", *(f"  {each}" for each in self.remarks)])
