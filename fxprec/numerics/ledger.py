"""The ledger of an audit: rows that add up to a measured error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from fxprec.inspection.measured import Subject
from fxprec.inspection.prices import Alternative
from fxprec.inspection.text import as_json, columns, layers_together, plain, stacked, titled
from fxprec.tape.recorder import Decision

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Rows that are printed.
_SHOWN: Final = 10
#: Causes of a flip that are printed.
_SHOWN_CAUSES: Final = 3


@dataclass(frozen=True, slots=True)
class OpPart:
    """Op of torch within a row, such as the division in a dropout; of a fused region's kernel one of its nodes.

    Attributes:
        op: ``aten::div_``; name of the node, as if it ran by itself; "kernel, rest": what the kernel loses otherwise.
        rounding, bend: as of the row.
    """

    op: str
    rounding: float
    bend: float


@dataclass(frozen=True, slots=True)
class Row:
    """Part of one place of the model in the error.

    Attributes:
        node: name of the node; path of the weight; name of an op that runs outside of the graphs.
        kind: "node", "weight" (its low copy) or "outside".
        graph: position of its graph among ``fxprec.graphs(model)``; -1 outside of them.
        backward: it is the computation of gradients there.
        module: path of the module.
        op: canonical op, or "shadow" of a weight.
        compute: dtype of the arithmetic; "" outside of the graphs.
        source: ``model.py:12``.
        why: the reason for its dtypes.
        rounding: what the place itself lost, in units of the error; summed over batches.
        bend: what is not linear in what came in: a maximum, a route or a ReLU that decided otherwise.
        squares: of the rounding, summed over batches.
        lost: the error that it made itself, and ``size`` of its exact result: sums of squares, over batches.
        share: of the sum of ``squares`` of all rows: the part of the mean square error that it would take along.
        parts: its ops of torch, where there are several.
        other: what the other dtype would cost; None where there is none to choose.
        saves: the part of the mean square error that is gone with ``override`` in FP32, as it was measured (it may be
            below 0); None where it was not. ``saves_error``: its standard error over batches; None of a single one.
        override: the nodes that take the row's rounding along: its own, or the readers of its weight or cast; of a row
            that a route bent, those that decided over it.
    """

    node: str
    kind: Literal["node", "weight", "outside"]
    graph: int
    backward: bool
    module: str
    op: str
    compute: str
    source: str
    why: str
    rounding: float
    bend: float
    squares: float
    lost: float
    size: float
    share: float
    parts: tuple[OpPart, ...] = ()
    other: Alternative | None = None
    saves: float | None = None
    saves_error: float | None = None
    override: tuple[str, ...] = ()

    @property
    def contribution(self) -> float:
        """Rounding and bend: of one batch those of all rows add up to the error."""
        return self.rounding + self.bend

    @property
    def local_error(self) -> float:
        """The error that it made itself, relative to its result: root mean square."""
        return math.sqrt(self.lost / self.size) if self.size else math.sqrt(self.lost)

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return as_json(self, "contribution", "local_error", without=("lost", "size"))


@dataclass(frozen=True, slots=True)
class Sample:
    """Batch of an audit, with its measured and its explained error.

    Attributes:
        low: the loss of the model as it runs, also where its gradients are the target; None where there is none.
        reference: that of the reference.
        measured: the error: low minus reference; of outputs and gradients its length.
        explained: the sum of the rows' contributions.
    """

    low: float | None
    reference: float | None
    measured: float
    explained: float


class GradientError(NamedTuple):
    """Error of a parameter's gradient, root mean square over batches.

    Attributes:
        error: its length.
        norm: the length of the reference's gradient.
    """

    error: float
    norm: float

    @property
    def relative(self) -> float:
        """Error over norm; inf where the reference's gradient is 0."""
        return self.error / self.norm if self.norm else math.inf if self.error else 0.0


@dataclass(frozen=True, slots=True)
class Cause:
    """Rounding that alone flips elements of a decision.

    Attributes:
        node, kind, graph: as of a row of the ledger: its row has the same.
        flipped: how many elements.
    """

    node: str
    kind: Literal["node", "weight", "outside"]
    graph: int
    flipped: int


@dataclass(frozen=True, slots=True)
class Route:
    """Op that decided otherwise than the reference: it read floats, and gave indices or a mask.

    Attributes:
        node: name of the node; of the op outside of the graphs.
        graph, module, source: as of a row of the ledger.
        op: of torch: ``aten::topk``.
        flipped: how many elements are others than in the reference, of all batches.
        count: how many there are.
        causes: roundings that flip some of them alone, most first. Flips that an earlier one made are counted likewise.
        by_none: elements that no rounding flips alone: several together do. Of each it must be known.
    """

    node: str
    graph: int
    module: str
    source: str
    op: str
    flipped: int
    count: int
    causes: tuple[Cause, ...]
    by_none: int

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return as_json(self)

    def __str__(self) -> str:
        where = self.node + (f" ({self.source})" if self.source else "")
        # Few causes tell where to look; all of them are in ``causes``.
        alone = [f"{cause.node} {cause.flipped}" for cause in self.causes[:_SHOWN_CAUSES]]
        alone += [f"{len(self.causes) - _SHOWN_CAUSES} more"] if len(self.causes) > _SHOWN_CAUSES else []
        causes = "; ".join([f"alone flip: {', '.join(alone)}"] * bool(alone) + [f"by none alone {self.by_none}"])
        return f"{where} decides {self.flipped} of {self.count} elements otherwise than the reference; {causes}"


@dataclass(frozen=True, slots=True)
class Ledger:
    """Ledger of an audit: which op costs how much of an error. ``print(ledger)`` shows a verdict and ten rows.

    Attributes:
        target: "loss", "outputs" (where there is no loss: their error along its own direction) or "gradients" (of all
            parameters, likewise).
        rows: those with a part in the target, largest first: by contribution for one batch, else by mean square.
        samples: the batches.
        parameters: of gradients: path -> the error of its gradient.
        remarks: what is not as it should be: ops without a float64 kernel, and the like.
        swallowed: names of nodes, or ops, that give inf or nan, which another op makes finite again: no masks.
        decisions: numbers that Python read, and that the reference has otherwise, where something comes of that: the
            row "read by Python" has what; all others are of the ops that ran.
        routes: of ``audit(..., routes=True)``: decisions that the reference takes otherwise, and what flips them.
        subject: what it is of, so that a page takes no other model's; None where rows are folded.
    """

    target: Literal["loss", "outputs", "gradients"]
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]
    parameters: Mapping[str, GradientError] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    swallowed: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    routes: tuple[Route, ...] = ()
    subject: Subject | None = field(default=None, repr=False)

    @property
    def measured(self) -> float:
        """The error; over several batches its root mean square."""
        if len(self.samples) == 1:
            return self.samples[0].measured
        return math.sqrt(sum(sample.measured**2 for sample in self.samples) / len(self.samples))

    @property
    def explained(self) -> float:
        """Sum of the rows' contributions; over several batches its root mean square."""
        if len(self.samples) == 1:
            return self.samples[0].explained
        return math.sqrt(sum(sample.explained**2 for sample in self.samples) / len(self.samples))

    @property
    def bend(self) -> float:
        """The sum of all bends over that of all contributions: how far the error is from linear."""
        total = sum(row.contribution for row in self.rows)
        return sum(row.bend for row in self.rows) / total if total else 0.0

    def folded(self) -> Ledger:
        """Return the ledger with repeated layers as one: ``blocks.0.mlp`` and ``blocks.1.mlp`` are ``blocks.*.mlp``."""
        rows = [_together(*each) for each in layers_together(self.rows, lambda row: (row.backward, row.compute))]
        # A folded row stands for several nodes: a page could not lay it over the graph.
        return replace(self, rows=ordered(rows, len(self.samples)), subject=None)

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return as_json(self, "measured", "explained", without=("subject",))

    def __str__(self) -> str:
        return plain(self.__rich__())

    def __rich__(self) -> RenderableType:
        rows = self.rows[:_SHOWN]
        # Of one batch the signed error is the whole; over batches it is the root of the sum of squares.
        scale = math.sqrt(sum(row.squares for row in self.rows)) if len(self.samples) > 1 else abs(self.measured)
        saves = any(row.saves is not None for row in self.rows)
        table = columns(
            (
                "part",
                "contribution",
                "rounding",
                "bend",
                "share",
                *(["an override saves"] if saves else []),
                "computes",
                "node",
                "module",
                "source",
                "why",
                "otherwise",
            ),
            [
                (
                    f"{row.contribution / scale:+.1%}" if scale else "-",
                    f"{row.contribution:+.2e}",
                    f"{row.rounding:+.2e}",
                    f"{row.bend:+.2e}",
                    f"{row.share:.1%}",
                    *([_saves(row)] if saves else []),
                    row.compute,
                    row.node + (" (backward)" if row.backward else ""),
                    row.module,
                    row.source,
                    row.why,
                    "" if row.other is None else str(row.other),
                )
                for row in rows
            ],
        )
        parts: list[RenderableType] = [table]
        if len(self.rows) > len(rows):
            parts.append(f"and {len(self.rows) - len(rows)} more rows: ledger.rows, ledger.folded()")
        parts += [f"Route: {route}" for route in self.routes[:_SHOWN]]
        parts += [f"Note: {remark}" for remark in self.remarks]
        return titled(self.headline, stacked(parts))

    @property
    def headline(self) -> str:
        """The verdict, in one line."""
        # A single batch has a signed error that rows add up to; over batches only squares add up.
        one = len(self.samples) == 1
        sample = self.samples[0]
        if one and self.target == "loss" and sample.low is not None and sample.reference is not None:
            error = f"loss {sample.low:.6g}, reference {sample.reference:.6g}: error {self.measured:+.3e}"
        else:
            over = "" if one else f" over {len(self.samples)} batches"
            error = f"error of the {self.target}{over}: {self.measured:.3e}{'' if one else ' (root mean square)'}"
        if self.parameters:
            error += f", of a length of {math.hypot(*(each.norm for each in self.parameters.values())):.4g}"
        if not self.rows:
            return f"{error}; no op has a part in it"
        top = self.rows[0]
        size = f"{top.contribution / self.measured:+.0%} of it" if one and self.measured else f"{top.share:.0%} of it"
        return f"{error}; {abs(self.bend):.2%} of it is bend; largest: {top.node}, {size}"


def _saves(row: Row) -> str:
    if row.saves is None:
        return ""
    return f"{row.saves:.0%}" + (f" ± {row.saves_error:.0%}" if row.saves_error is not None else "")


def ordered(rows: Iterable[Row], batches: int) -> tuple[Row, ...]:
    """Return rows largest first: by contribution for one batch, else by mean square."""
    return tuple(sorted(rows, key=lambda row: -(abs(row.contribution) if batches == 1 else row.squares)))


def _together(name: str, module: str, rows: list[Row]) -> Row:
    # What the layers agree in is the first one's; what they lost adds up.
    first = rows[0]
    return Row(
        name, first.kind, first.graph, first.backward, module, first.op, first.compute, first.source, first.why,
        sum(row.rounding for row in rows), sum(row.bend for row in rows), sum(row.squares for row in rows),
        sum(row.lost for row in rows), sum(row.size for row in rows), sum(row.share for row in rows),
    )  # fmt: skip
