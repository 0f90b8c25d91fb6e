"""The result of ``tune``: a policy, each of its lines with its reason, and predictions beside measurements."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from fxprec.errors import few
from fxprec.inspection.figures import count
from fxprec.inspection.text import Printed, RenderableType, as_json, folded, stacked, table, titled
from fxprec.passes.policy.policy import Policy

#: Overrides that are printed.
_SHOWN: Final = 20
#: Modules that are named for one.
_PLACES: Final = 3


@dataclass(frozen=True, slots=True)
class Line:
    """Decision of the policy on one node that is otherwise than before.

    Attributes:
        node: name of the node.
        precision: "float32", or the low dtype.
        module: path of the module.
        op: canonical op.
        share: of the mean square error that is predicted for the start (of one at level O0, for O1): what would come
            back without this line alone, while all others stay; negative: what would go.
        seconds: what a step takes longer for this line, with the casts that it costs or spares; negative: less long.
        overflows: it is in FP32 as it overflows where it is low.
        override: kind and pattern of the override that says so, which may be about other nodes, too.
    """

    node: str
    precision: str
    module: str
    op: str
    share: float
    seconds: float
    overflows: bool
    override: tuple[str, str]


def told(lines: Sequence[Line], against: str = "the start") -> str:
    """Write an override's reason: ``2 linear of blocks.0-1.up: 0.1 of the start's mean square error less, +3 us``."""
    # These were no choice of the search: their share of the error is not known.
    overflowing = sum(line.overflows for line in lines)
    whys = [f"{overflowing} overflow where they are low"] if overflowing else []
    if overflowing < len(lines):
        share = _share(lines)
        whys.append(f"{abs(share):.2g} of {against}'s mean square error {'less' if share >= 0 else 'more'}")
    where = f" of {places}" if (places := _places(lines)) else ""
    return f"{_ops(lines)}{where}: {', '.join(whys)}, {_time(lines)}"


def _written(lines: Sequence[Line]) -> tuple[str, str]:
    """Return table and line of an override in a file."""
    kind, pattern = lines[0].override
    return f"[{kind}]", f"{json.dumps(pattern, ensure_ascii=False)} = {json.dumps(lines[0].precision)}"


def _share(lines: Sequence[Line]) -> float:
    return sum(line.share for line in lines)


def _time(lines: Sequence[Line]) -> str:
    return f"{sum(line.seconds for line in lines) * 1e6:+.3g} us"


def _ops(lines: Sequence[Line]) -> str:
    return ", ".join(f"{number} {op}" for op, number in Counter(line.op for line in lines).most_common())


def _places(lines: Sequence[Line]) -> str:
    return few(folded(line.module for line in lines if line.module), _PLACES)


#: Columns of the printed table, a row for the lines of an override.
_COLUMNS: Final[dict[str, Callable[[Sequence[Line]], str]]] = {
    "error saved": lambda lines: f"{_share(lines):+.2%}",
    "time": _time,
    "becomes": lambda lines: lines[0].precision,
    "override": lambda lines: " ".join(lines[0].override),
    "nodes": lambda lines: str(len(lines)),
    "ops": _ops,
    "modules": _places,
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Errors and times of a policy, predicted and measured.

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
class Tuned(Printed):
    """A measured policy. ``print(tuned)`` tells what it changes; ``to_toml()`` is a file for ``Policy.from_toml``.

    Attributes:
        policy: that of the start, of O0 at level O1, with further overrides: ``convert(model, policy=...)`` takes it.
        lines: of each node that is decided otherwise, those with the largest part in the error first. Nodes may share
            an override, where their type of op or their module agrees.
        start: figures of the model as it was.
        tuned: figures under the policy.
        asked: the budget, in words.
        remarks: what else is to be known.
        target: what has the error: "loss", or "outputs" where there is none.
        against: what shares of lines are of: the start, or "O1" where that is level O0.
        how: the call of ``convert`` under which the policy decides as it was measured: a file holds the policy alone,
            and the dtype, costs (``lower``) and kernels (``fuse``) decide, too.
    """

    policy: Policy
    lines: tuple[Line, ...]
    start: Figures
    tuned: Figures
    asked: str
    remarks: tuple[str, ...] = ()
    target: Literal["loss", "outputs"] = "loss"
    against: str = "the start"
    how: str = ""

    @property
    def predicted_time(self) -> float:
        """Predicted time of a step, as a fraction of the start's."""
        return self.tuned.predicted_seconds / self.start.predicted_seconds

    @property
    def measured_time(self) -> float:
        """Measured time of a step, as a fraction of the start's."""
        return self.tuned.measured_seconds / self.start.measured_seconds

    def to_toml(self) -> str:
        """Return the policy as a file, with a comment a line."""
        convert = [f"Convert with: {self.how}"] if self.how else []
        text = [f"# {line}" for line in (self.headline, *self.remarks, *convert)]
        # A reason stands behind the line that it is of; equal lines of two tables differ by the table.
        why, within = {_written(lines): told(lines, self.against) for lines in self.overrides()}, ""
        for line in self.policy.to_toml().splitlines():
            within = line if line.startswith("[") else within
            text.append(f"{line}  # {why[within, line]}" if (within, line) in why else line)
        return "\n".join([*text, ""])

    def overrides(self) -> list[tuple[Line, ...]]:
        """Return the lines, those of an override together."""
        found: dict[tuple[str, str], list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.override, []).append(line)
        return [tuple(lines) for lines in found.values()]

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        own = as_json(self, "predicted_time", "measured_time", without=("policy", "against"))
        return own | {"policy": self.policy.to_toml()}

    @property
    def headline(self) -> str:
        """The verdict, in one line."""
        start, tuned = self.start, self.tuned
        changed = f"{count(len(self.lines), 'node')} otherwise, in {count(len(self.overrides()), 'line')}"
        return (
            f"{self.asked}: {changed}; error of the {self.target} {start.measured_error:.3e} -> "
            f"{tuned.measured_error:.3e} (predicted {start.predicted_error:.3e} -> {tuned.predicted_error:.3e}), "
            f"time of a step x {self.measured_time:.3f} (predicted x {self.predicted_time:.3f})"
        )

    def __rich__(self) -> RenderableType:
        overrides = self.overrides()
        parts: list[RenderableType] = [table(_COLUMNS, overrides[:_SHOWN])]
        if len(overrides) > _SHOWN:
            parts.append(f"and {len(overrides) - _SHOWN} more lines: tuned.to_toml(); tuned.lines has every node")
        parts += [f"Note: {remark}" for remark in self.remarks]
        parts += [f"Convert with: {self.how}"] if self.how else []
        return titled(self.headline, stacked(parts))
