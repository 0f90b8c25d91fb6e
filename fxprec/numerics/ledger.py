"""The ledger of an audit: rows that add up to a measured error; and what overrides of its rows save.

A row's ``share`` of an error is the part of its own roundings. What its node in FP32 saves is another figure: the low
copy of its weight and the casts of its inputs go with it, and a cast of its result may come. So it is measured on
copies of the model, for one override after the other (``with_savings``)::

    linear_1, its weight's low copy, the cast of its input    -> nodes={"linear_1": torch.float32}, for all three rows
    a copy with that, on the same batches                     -> the mean square error that it has

What is gone of a loss's error is told with little noise. Roundings are as good as independent, so a mean square error
is the sum of their squares, and of the square of all bends together. Those of nodes that are and feed the same in both
models are equal but for chance: only what differs counts. Of outputs and gradients, whose error has many elements, it
is the error itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn
from torch.fx import Node

from fxprec.errors import FxprecError
from fxprec.inspection.measured import Subject
from fxprec.inspection.nodes import places
from fxprec.inspection.prices import Alternative
from fxprec.inspection.text import Printed, RenderableType, as_json, layers_together, stacked, table, titled
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.model.conversion import conversion_of
from fxprec.numerics.overrides import readers
from fxprec.numerics.problem import Batch, Problem, converted_anew
from fxprec.passes.graph.annotations import notes, weight_path
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.ops.table import facts_at
from fxprec.tape.recorder import Decision

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
class Ledger(Printed):
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
        return _over_batches([sample.measured for sample in self.samples])

    @property
    def explained(self) -> float:
        """Sum of the rows' contributions; over several batches its root mean square."""
        return _over_batches([sample.explained for sample in self.samples])

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

    def __rich__(self) -> RenderableType:
        rows = self.rows[:_SHOWN]
        # Of one batch the signed error is the whole; over batches it is the root of the sum of squares.
        scale = math.sqrt(sum(row.squares for row in self.rows)) if len(self.samples) > 1 else abs(self.measured)
        cells: dict[str, Callable[[Row], str]] = {
            "part": lambda row: f"{row.contribution / scale:+.1%}" if scale else "-",
            "contribution": lambda row: f"{row.contribution:+.2e}",
            "rounding": lambda row: f"{row.rounding:+.2e}",
            "bend": lambda row: f"{row.bend:+.2e}",
            "share": lambda row: f"{row.share:.1%}",
            "an override saves": _saves,
            "computes": lambda row: row.compute,
            "node": lambda row: row.node + (" (backward)" if row.backward else ""),
            "module": lambda row: row.module,
            "source": lambda row: row.source,
            "why": lambda row: row.why,
            "otherwise": lambda row: "" if row.other is None else str(row.other),
        }
        if all(row.saves is None for row in self.rows):  # nobody asked for it
            del cells["an override saves"]
        parts: list[RenderableType] = [table(cells, rows)]
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


def _over_batches(errors: Sequence[float]) -> float:
    return errors[0] if len(errors) == 1 else math.sqrt(sum(error**2 for error in errors) / len(errors))


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


#: Overrides that are measured where nobody says how many.
MEASURED: Final = 10
#: Of all squares: a bend that is less is no route that is looked into.
_LEAST: Final = 0.001


#: What an override has in FP32: names of nodes.
Names = tuple[str, ...]
#: (problem, batch) -> the ledger of that batch.
Audit = Callable[[Problem, Batch], Ledger]


def with_savings(problem: Problem, ledger: Ledger, batches: Sequence[Batch], audited: Audit, most: int) -> Ledger:
    """Return the ledger with ``saves``, ``saves_error`` and ``override`` of the rows whose override was measured.

    Args:
        problem: whose ledger it is.
        ledger: of all batches.
        batches: those of the ledger.
        audited: makes a ledger as that was made.
        most: overrides that are measured: those whose rows have the largest shares together.
    """
    nodes, weights = _nodes(problem.model)
    total = sum(row.squares + row.bend**2 for row in ledger.rows) or 1.0
    wanted: list[Names] = []
    shares: dict[Names, float] = {}
    for row in ledger.rows:
        # A row that is mostly bend has its cause elsewhere: in the op that decided over its indices.
        bends = row.bend**2 > max(row.squares, _LEAST * total)
        names = (_route(row, nodes) if bends else ()) or _override(row, nodes, weights)
        wanted.append(names)
        if names:
            shares[names] = shares.get(names, 0.0) + (row.squares + bends * row.bend**2) / total
    chosen = sorted(shares, key=lambda names: -shares[names])[:most]
    before = [audited(problem, batch) for batch in batches]
    start, own = [mean_square(each) for each in before], _signatures(problem.model)
    measured: dict[Names, dict[str, Any]] = {}
    for names in chosen if any(start) else ():
        policy = conversion_of(problem.model).settings.policy.override(nodes=dict.fromkeys(names, torch.float32))
        try:
            trial = replace(problem, model=converted_anew(problem.model, policy=policy))
            after = [audited(trial, batch) for batch in batches]
            other = _signatures(trial.model)
            # Nodes that are the same in both models differ by chance: their squares are left out on both sides.
            same = {name for name in own if own[name] == other.get(name)}
            saves, error = saved(start, [_gone(one, two, same) for one, two in zip(before, after, strict=True)])
            measured[names] = {"saves": saves, "saves_error": error, "override": names}
        except (FxprecError, ValueError):  # a node has another name where it is in FP32; an error that is not finite
            continue
    rows = [replace(row, **measured.get(names, {})) for row, names in zip(ledger.rows, wanted, strict=True)]
    left = len(shares) - len(measured)
    remark = (
        "saves: the part of the mean square error that is gone with row.override in FP32, measured on a copy of the "
        f"model for each of {len(measured)} overrides"
        + (f"; savings=N tries more of the {left} others" if left else "")
    )
    return replace(ledger, rows=tuple(rows), remarks=(*ledger.remarks, remark))


def mean_square(ledger: Ledger) -> float:
    """Return the mean square error that the ledger of one batch tells."""
    if ledger.target != "loss":
        return ledger.measured**2
    return sum(row.squares for row in ledger.rows) + sum(row.bend for row in ledger.rows) ** 2


def _gone(before: Ledger, after: Ledger, same: Container[str]) -> float:
    """Return how much less the mean square error of one batch is; ``same``: nodes and weights that did not change."""
    if before.target != "loss":
        return before.measured**2 - after.measured**2
    squares = [sum(row.squares for row in each.rows if row.node not in same) for each in (before, after)]
    bends = [sum(row.bend for row in each.rows) ** 2 for each in (before, after)]
    return squares[0] - squares[1] + bends[0] - bends[1]


def _signatures(model: nn.Module) -> dict[str, frozenset[object]]:
    """Return for each node and weight the facts that its roundings depend on: its dtypes, and who reads them."""
    nodes, weights = _nodes(model)
    found: dict[str, set[object]] = {}
    for (_, name), node in nodes.items():
        precision = notes(node).precision
        readers_of = frozenset(user.name for user in node.users)
        found.setdefault(name, set()).add((precision.compute, precision.output, readers_of))
    for path, own in weights.items():
        read = frozenset((each.name, notes(each).precision.compute) for node in own for each in readers(node))
        found.setdefault(path, set()).add(read)
    return {name: frozenset(each) for name, each in found.items()}


def saved(start: Sequence[float], gone: Sequence[float]) -> tuple[float, float | None]:
    """Return the part of the sum of errors that is gone, and its standard error (jackknife over batches).

    Args:
        start: mean square errors of the batches.
        gone: how much less they are with the override.
    """
    whole, less, count = sum(start), sum(gone), len(start)
    if count < 2:
        return less / whole, None
    without = [(less - own) / (whole - other) for own, other in zip(gone, start, strict=True) if whole > other]
    mean = sum(without) / len(without)
    return less / whole, math.sqrt((count - 1) / count * sum((each - mean) ** 2 for each in without))


def _nodes(model: nn.Module) -> tuple[Mapping[tuple[int, str], Node], Mapping[str, list[Node]]]:
    """Return the nodes by graph and name, and those that read each weight."""
    graphs = [captured.gm for captured in conversion_of(model).captured]
    found = {(number, place.name): place.node for number, gm in enumerate(graphs) for place in places(number, gm)}
    weights: dict[str, list[Node]] = {}
    for node in found.values():
        if node.op == "get_attr":
            weights.setdefault(weight_path(node), []).append(node)
    return found, weights


def _route(row: Row, nodes: Mapping[tuple[int, str], Node]) -> Names:
    """Return what decided over the indices that bent a row; (): there are none.

    Its own roundings know nothing of a route: where low precision takes another expert, the op that gathers its answer
    has the bend, and the product whose maximum was taken is the cause, which may have no row at all.
    """
    node = nodes.get((row.graph, row.node))
    indices = [] if node is None else [each for each in node.all_input_nodes if is_index(notes(each).dtype)]
    return tuple(dict.fromkeys(each.name for index in indices for each in _deciding(index)))


def is_index(dtype: object) -> bool:
    """Return whether values of a dtype are positions, or yes and no."""
    return isinstance(dtype, torch.dtype) and not dtype.is_floating_point and not dtype.is_complex


def _deciding(index: Node) -> list[Node]:
    """Return the nodes in low precision that are next above an index."""
    found: list[Node] = []
    seen, left = {index}, [index]
    while left:
        for each in left.pop().all_input_nodes:
            if each not in seen and isinstance(notes(each).dtype, torch.dtype | tuple):  # and no size
                seen.add(each)
                low = notes(each).precision.compute in LOW_DTYPES and each.target not in CASTS
                (found if low and not facts_at(each).view else left).append(each)
    return found


def _override(row: Row, known: Mapping[tuple[int, str], Node], weights: Mapping[str, list[Node]]) -> Names:
    """Return the nodes that are to be in FP32 for a row's rounding to go; (): there are none."""
    if row.kind == "weight":
        found = [reader for node in weights.get(row.node, []) for reader in readers(node)]
    elif (node := known.get((row.graph, row.node))) is not None:
        found = readers(node) if node.target in CASTS else [node]
    else:
        found = []
    return tuple(dict.fromkeys(node.name for node in found if not facts_at(node).arrives))
