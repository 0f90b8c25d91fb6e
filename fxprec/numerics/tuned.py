"""What ``tune`` gives: a policy, each of its lines with its reason, and what was predicted beside what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from fxprec.inspection.text import columns, plain, stacked, titled
from fxprec.passes.policy.policy import Policy

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Lines that are printed.
_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Line:
    """One override of the policy.

    Attributes:
        node: name of the node.
        precision: "float32", or the low dtype.
        module: path of the module.
        op: canonical op.
        share: of the mean square error that the start predicts: what would come back without this line alone, while
            all others stay; negative: what would go.
        seconds: what a step takes longer for this line, with the casts that it costs or spares; negative: less long.
        why: one clause.
    """

    node: str
    precision: str
    module: str
    op: str
    share: float
    seconds: float
    why: str

    def __str__(self) -> str:
        return f"{self.op}{f' of {self.module}' if self.module else ''}: {self.why}, {self.seconds * 1e6:+.3g} us"


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a policy.

    Attributes:
        predicted_error: root mean square of the error of the loss, or of the length of the outputs' if there is none,
            from the roundings of the batches that were audited.
        measured_error: the same, of the batches that were held out.
        predicted_seconds: of a step, by the costs of the device, of what differs between dtypes.
        measured_seconds: of a step on the held-out batches, all of it.
    """

    predicted_error: float
    measured_error: float
    predicted_seconds: float
    measured_seconds: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """A measured policy. ``print(tuned)`` tells what it changes; ``to_toml()`` is a file for ``Policy.from_toml``.

    Attributes:
        policy: that of the start with further overrides: ``convert(model, policy=tuned.policy)``.
        lines: the overrides that were added, those with the largest part in the error first.
        start: figures of the model as it was.
        tuned: figures under the policy.
        asked: the budget, in words.
        remarks: what else is to be known.
        target: what has the error: "loss", or "outputs" where there is none.
    """

    policy: Policy
    lines: tuple[Line, ...]
    start: Figures
    tuned: Figures
    asked: str
    remarks: tuple[str, ...] = ()
    target: Literal["loss", "outputs"] = "loss"

    @property
    def predicted_time(self) -> float:
        """Of a step, as a fraction of the start's."""
        return self.tuned.predicted_seconds / self.start.predicted_seconds

    @property
    def measured_time(self) -> float:
        """Of a step, as a fraction of the start's."""
        return self.tuned.measured_seconds / self.start.measured_seconds

    def to_toml(self) -> str:
        """The policy as a file, with a comment a line."""
        why = {f"{json.dumps(line.node)} = {json.dumps(line.precision)}": str(line) for line in self.lines}
        head = [f"# {line}" for line in (self.headline, *self.remarks)]
        body = [f"{line}  # {why[line]}" if line in why else line for line in self.policy.to_toml().splitlines()]
        return "\n".join([*head, *body, ""])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "asked": self.asked,
            "target": self.target,
            "start": asdict(self.start),
            "tuned": asdict(self.tuned),
            "predicted_time": self.predicted_time,
            "measured_time": self.measured_time,
            "lines": [asdict(line) for line in self.lines],
            "remarks": list(self.remarks),
            "policy": self.policy.to_toml(),
        }

    @property
    def headline(self) -> str:
        """The verdict, in one line."""
        start, tuned = self.start, self.tuned
        return (
            f"{self.asked}: {len(self.lines)} lines; error of the {self.target} {start.measured_error:.3e} -> "
            f"{tuned.measured_error:.3e} (predicted {start.predicted_error:.3e} -> {tuned.predicted_error:.3e}), "
            f"time of a step x {self.measured_time:.3f} (predicted x {self.predicted_time:.3f})"
        )

    def __str__(self) -> str:
        return plain(self.__rich__())

    def __rich__(self) -> RenderableType:
        cells = [
            (f"{line.share:+.2%}", f"{line.seconds * 1e6:+.3g} us", line.precision, line.node, line.op, line.module)
            for line in self.lines[:_SHOWN]
        ]
        parts: list[RenderableType] = [columns(("error saved", "time", "becomes", "node", "op", "module"), cells)]
        if len(self.lines) > _SHOWN:
            parts.append(f"and {len(self.lines) - _SHOWN} more lines: tuned.lines, tuned.to_toml()")
        parts += [f"Note: {remark}" for remark in self.remarks]
        return titled(self.headline, stacked(parts))
