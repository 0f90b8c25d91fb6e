"""Tell what went wrong: the finding of ``locate``, and the training step of ``watch`` that has one."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from fxprec.tape.recorder import Decision

#: Numbers that Python read, of which so many are printed.
_SHOWN: Final = 3
Phase = Literal["forward", "backward", "input", "weight", "buffer", "loss", "optimizer"]


@dataclass(frozen=True, slots=True)
class Finding:
    """First value of a run that is not as it should be. ``print(finding)`` tells it in sentences.

    Attributes:
        phase: "forward" or "backward"; "input", "weight" or "buffer" where it came in with one; "loss" where it came in
            with the gradients that a loss outside of the model gave; "optimizer" where an optimizer's step wrote it, of
            finite weights and gradients (both ``watch``).
        kind: "overflow": a wider dtype has a finite value. "invalid": that has none either (0/0, inf - inf, the log of
            a negative number). "underflow": it is 0 and should not be. "scale too large": an overflow of gradients that
            a smaller loss scale does not have. "came in": no op of the run made it.
        node: of the graph; outside of the graphs the op; path of the weight or buffer, ``inputs[0]``.
        module: path of the module that computes it.
        op: canonical op of the node; class of the optimizer.
        dtype: of the value, "float16".
        source: ``model.py:12``.
        magnitude: of the largest value in a wider dtype that is not one in this; nan where there is none.
        limit: the largest value of the dtype; of an underflow its smallest.
        share: of the elements of the value, those that are so.
        index: of the first of them in the value: mostly it begins with the sample's number in the batch.
        example: the op on the first of them: ``div(0, 0) = nan``.
        reached: what it spoiled: "loss", "outputs", or "the gradient of" a parameter; "" where it reached nothing.
        swallowed: name of the node, or op, that read inf or nan and gave finite values, which are wrong; "" where none
            did.
        decisions: numbers that Python read between graphs, and that a reference has otherwise: FP32 may go another way.
        fails_in_fp32: the same run of the original model in FP32 is not finite either.
        scale: the loss scale of the run; 1.0 without a scaler.
        cure: what to change, as code that can be pasted where there is such; a change of the conversion was tried.
        instead: other cures, each by itself: a clamp to float16's range where that keeps the step finite.
        remarks: what else is known.
        masked: the op is a softmax, or attention, and a mask hides a whole row: -inf, all of it.
        step: number of the step whose optimizer wrote it (``watch``).
    """

    phase: Phase
    kind: Literal["overflow", "invalid", "underflow", "scale too large", "came in"]
    node: str
    module: str
    op: str
    dtype: str
    source: str
    magnitude: float
    limit: float
    share: float
    example: str
    reached: str
    fails_in_fp32: bool
    scale: float
    cure: str
    remarks: tuple[str, ...] = ()
    index: tuple[int, ...] = ()
    masked: bool = False
    step: int | None = None
    swallowed: str = ""
    decisions: tuple[Decision, ...] = ()
    instead: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON: a magnitude that is not known, or not finite, is None."""
        magnitude = self.magnitude if math.isfinite(self.magnitude) else None
        return asdict(self) | {"magnitude": magnitude, "decisions": [each.to_dict() for each in self.decisions]}

    def __str__(self) -> str:
        lines = [self.headline]
        place = f"at [{', '.join(map(str, self.index))}]" if self.index else ""
        if self.example or place:
            lines.append(f"  {self.example or 'first'}{' ' if place else ''}{place}")
        lines += [f"  {remark}" for remark in (*self.remarks, *self.decisions[:_SHOWN])]
        if self.fails_in_fp32:
            lines.append("  the original model in FP32 fails here as well: no precision cures that")
        return "\n".join([*lines, f"  cure: {self.cure}", *(f"  or: {each}" for each in self.instead)])

    @property
    def headline(self) -> str:
        """Finding in one line."""
        where = self.node + (f" of module {self.module}" if self.module else "")
        where += f" ({self.source})" if self.source else ""
        computes = f"{self.op} in {self.dtype}" if self.op else self.dtype
        if self.kind == "came in":
            got = f"{self.reached} got them" if self.reached else "neither loss nor gradients show it"
            return f"{where} has values that are not finite ({_percent(self.share)} of them); {got}"
        if self.phase == "optimizer":
            did = "overflows" if self.kind == "overflow" else "gives what is no number"
            return (
                f"optimizer: {self.op} in step {self.step} {did} in {_percent(self.share)} of {where}, of finite "
                f"weights and gradients; {self.reached + ' got it' if self.reached else 'nothing has read it yet'}"
            )
        end = f"; {self.swallowed} made it finite again" if self.swallowed else f"; {self.reached} got it"
        if self.masked:
            return f"{self.phase}: {where}, {computes}, gives nan for rows that are masked as a whole{end}"
        if self.kind == "invalid":
            return f"{self.phase}: {where}, {computes}, gives what is no number, of finite values{end}"
        if self.kind == "underflow":
            return (
                f"{self.phase}: {where}, {computes}, gives 0 for {_percent(self.share)} of its values, the largest "
                f"{self.magnitude:.3g}; the smallest number is {self.limit:.3g}{end}"
            )
        beyond = "within the op" if self.magnitude <= self.limit else _against(self.magnitude, self.limit)
        scale = f" at a loss scale of {self.scale:g}" if self.kind == "scale too large" else ""
        return f"{self.phase}: {where}, {computes}, overflows{scale}: {beyond}{end}"


def _against(value: float, limit: float) -> str:
    """Return a value beside the limit that it is beyond, with as many digits as tell them apart."""
    digits = next((each for each in range(3, 17) if f"{value:.{each}g}" != f"{limit:.{each}g}"), 17)
    return f"{value:.{digits}g} against {limit:.{digits}g}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or share == 0 else f"{share:.1g}"


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
