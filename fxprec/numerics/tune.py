"""A policy that is measured: the fastest within an error of the loss, or the most exact within a time."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time as clock
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxprec.costs.files import costs_of
from fxprec.errors import ConversionError
from fxprec.inspection.nodes import op_name, places
from fxprec.model.module import conversion_of
from fxprec.numerics.audit import NotFiniteError, ledger_of
from fxprec.numerics.kept import kept as unchanged
from fxprec.numerics.ledger import Ledger
from fxprec.numerics.locate import keep_finite
from fxprec.numerics.problem import Batch, Loss, Problem
from fxprec.numerics.trial import under
from fxprec.numerics.tuned import Figures, Line, Tuned
from fxprec.passes.context import Context
from fxprec.passes.costs.device_costs import DeviceCosts
from fxprec.passes.decide import decide
from fxprec.passes.graph.annotations import Rule, module_path, notes, weight_path
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.table import facts_of
from fxprec.passes.placement.tradeoff import EXACT, Outcome, TradeOff, cheapest_within, computes_full, most_exact_within
from fxprec.passes.policy.policy import Policy
from fxprec.settings import Settings

#: Of the batches, one in so many is held out, to measure on.
_HELD_OUT: Final = 4
#: Steps that are timed, of each of the two models in turns: at least so many, and for so many seconds.
_STEPS, _SECONDS = 5, 1.0


def tune(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss | None = None,
    *,
    error: float | None = None,
    time: float | None = None,
) -> Tuned:
    """Find the policy that keeps the loss's error within a budget in the least time, or the time with the least error.

    A copy of the model in which all is low that may be is audited: so the squared error is known that each value adds
    where it is rounded. With the costs of the device that gives a minimum cut of time + weight * squared error, for any
    weight; the weight is found by bisection on the curve of the best that can be had (``passes.placement.tradeoff``).
    Ops become FP32 where that is worth its time, and low where the policy keeps them in FP32 for little. What overrides
    of the model's policy say stays, and pins of safety do.

    Of the batches every fourth is held out: they tell what is measured. Errors are per batch; those of few batches are
    noise: a hundred are a good start, of the size that is trained on. The model is left as it was.

    Args:
        model: converted.
        batches: at least two, each ``(*inputs, target)``, without a loss ``inputs``; or dicts of named inputs.
        loss: as ``fxprec.numerics.audit`` takes it; without any, the error is that of the outputs along its direction.
        error: the most that the root mean square of the loss's error over batches may be, in units of the loss.
        time: the most that a step may take, as a fraction of what it takes now.

    Returns:
        The policy, as ``convert`` takes it with the other settings unchanged; with predicted and measured figures.

    Raises:
        ConversionError: the model is not converted, or frozen; at level O0 or O3; placed as autocast does.
        TypeError: arguments of other types.
        ValueError: both budgets or none, one that is not positive, or that cannot be met: says what can; fewer than two
            batches; an error that is inf or nan.

    Sources: Eisner and Severance, JACM 1976 (the curve); DESIGN 11.
    """
    problem = Problem.of(model, loss, "tune")
    settings = _settings_of(model)
    _check_budget(error, time)
    calibration, held_out = _split([*problem.batches(batches)])
    study = _Study.of(problem, settings, calibration)
    start = study.decided(settings.policy)
    if error is not None:
        found, asked = cheapest_within(study.trade, error**2 - study.constant), f"an error of at most {error:g}"
    else:
        assert time is not None
        found, asked = most_exact_within(study.trade, time * start.seconds), f"at most {time:g} of the time"
    if found is None:
        raise ValueError(study.why_not(error, time, start))
    if start.square <= found.square and start.seconds <= found.seconds:
        found = start
    policy, lines, reached = study.policy_for(found, start)
    models = [under(model, policy=each) for each in (settings.policy, policy)]
    errors = [_root_mean_square(ledger_of(Problem(each, loss), held_out)) for each in models]
    seconds = _times(models, loss, held_out)
    before, after = (
        Figures(math.sqrt(each.square + study.constant), own, each.seconds, taken)
        for each, own, taken in zip((start, reached), errors, seconds, strict=True)
    )
    return Tuned(policy, lines, before, after, asked, tuple(study.remarks(found, reached)))


def _settings_of(model: nn.Module) -> Settings:
    settings = conversion_of(model).settings
    level = settings.policy.level
    if level in ("O0", "O3"):
        why = "nothing is lowered" if level == "O0" else "the parameters themselves are low"
        raise ConversionError(f"tune starts from level O1 or O2; this model is at {level}, where {why}")
    if settings.placement != "mincut":
        raise ConversionError('tune places casts by a minimum cut: convert with placement="mincut", the default')
    return settings


def _check_budget(error: float | None, time: float | None) -> None:
    if (error is None) == (time is None):
        raise ValueError("give one budget: error=, in units of the loss, or time=, a fraction of what a step takes now")
    name, value = ("error", error) if time is None else ("time", time)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value} must be positive and finite")


def _split(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Those to audit, and those to measure on."""
    if len(batches) < 2:
        raise ValueError(f"tune wants at least two batches, one of them to measure on; there is {len(batches)}")
    step = min(_HELD_OUT, len(batches))
    held_out = batches[step - 1 :: step]
    return [batch for number, batch in enumerate(batches) if (number + 1) % step], [*held_out]


@dataclass(frozen=True, slots=True)
class _Study:
    """What is known of a model: its graphs before any decision, and what their roundings cost.

    Attributes:
        graphs: of the original program, annotated with ops, dtypes and sizes.
        context: of the model's settings, with costs.
        squares: value -> the mean square error that its rounding adds.
        constant: what ops outside of the graphs add.
        kept: nodes that are no choice: their values overflow where they are low.
    """

    graphs: tuple[GraphModule, ...]
    context: Context
    lower: object
    trade: TradeOff
    constant: float
    kept: tuple[str, ...]

    @classmethod
    def of(cls, problem: Problem, settings: Settings, batches: Sequence[Batch]) -> _Study:
        """Capture the original program, and audit all that may be low at once."""
        costs = settings.lower if isinstance(settings.lower, DeviceCosts) else costs_of(settings.device, settings.dtype)
        if settings.dtype not in costs.curves:
            raise ConversionError(
                f"there are no costs of {dtype_name(settings.dtype)} ({costs}): python -m fxprec calibrate"
            )
        gradients = torch.is_grad_enabled() and any(p.requires_grad for p in problem.model.parameters())
        context = replace(settings.context(gradients), costs=costs)
        graphs = _original_graphs(problem, batches)
        kept: list[str] = []
        while True:
            policy = settings.policy.override(nodes=dict.fromkeys(kept, torch.float32))
            trade = TradeOff(graphs, replace(context, policy=policy), {})
            low = {node.name: settings.dtype for node in trade.choices if not _is_served(node, context)}
            trial = under(problem.model, policy=policy.override(nodes=low), lower="always")
            try:
                ledger = ledger_of(Problem(trial, problem.loss), batches, opened=True)
            except NotFiniteError:
                more = [name for name in keep_finite(trial, problem.loss, batches) if name not in kept]
                if not more:
                    raise
                kept += more
                continue
            low_graphs = [captured.gm for captured in conversion_of(trial).captured]
            squares, constant = _squares(ledger, low_graphs, graphs, trade)
            trade = TradeOff(graphs, replace(context, policy=policy), squares)
            return cls(graphs, context, settings.lower, trade, constant, tuple(kept))

    def decided(self, policy: Policy) -> Outcome:
        """What a policy gives."""
        costs = self.context.costs if self.lower != "always" else None
        for gm in self.graphs:
            decide(gm, replace(self.context, policy=policy, costs=costs))
        return self.trade.decided()

    def policy_for(self, wanted: Outcome, start: Outcome) -> tuple[Policy, tuple[Line, ...], Outcome]:
        """Overrides of the ops that the policy decides otherwise: first of those that set others' dtypes."""
        nodes: dict[str, torch.dtype] = {}
        known = {node: wanted.full[variable] for node, variable in self.trade.choices.items()}
        known |= {node: True for gm in self.graphs for node in gm.graph.nodes if node.name in self.kept}
        for leads in (True, False, False):
            self.decided(self.context.policy.override(nodes=nodes))
            for node, full in known.items():
                follows = not _leads(node) and (leads or facts_of(notes(node).op.name).view)
                if computes_full(node) is full or follows or (not full and _is_served(node, self.context)):
                    continue
                nodes[node.name] = torch.float32 if full else self.context.low
        policy = self.context.policy.override(nodes=nodes)
        reached = self.decided(policy)
        return policy, self._lines(nodes, start, reached), reached

    def _lines(self, nodes: Mapping[str, torch.dtype], start: Outcome, reached: Outcome) -> tuple[Line, ...]:
        """Each override, with what taking it back alone would change."""
        found: dict[str, Line] = {}
        for node in (node for gm in self.graphs for node in gm.graph.nodes if node.name in nodes):
            share, seconds, why = 0.0, 0.0, "overflows where it is low"
            variable = self.trade.choices.get(node)
            if variable is not None:
                without = [*reached.full]
                without[variable] = not without[variable]
                other = self.trade.outcome(without)
                share = (other.square - reached.square) / (start.square + self.constant) if start.square else 0.0
                seconds = reached.seconds - other.seconds
                why = f"{abs(share):.2g} of the start's mean square error {'less' if share >= 0 else 'more'}"
            precision = dtype_name(nodes[node.name])
            found[node.name] = Line(node.name, precision, module_path(node), op_name(node), share, seconds, why)
        return tuple(sorted(found.values(), key=lambda line: -abs(line.share)))

    def why_not(self, error: float | None, time: float | None, start: Outcome) -> str:
        """A budget cannot be met: which can."""
        if error is not None:
            least = self.trade.cut(EXACT)
            left, fraction = math.sqrt(least.square + self.constant), least.seconds / start.seconds
            return (
                f"error={error:g} cannot be met: with all in FP32 that may be, {left:.3g} is left, "
                f"at {fraction:.3g} of the time"
            )
        fraction = self.trade.cut(0.0).seconds / start.seconds
        return f"time={time:g} cannot be met: the fastest policy takes {fraction:.3g} of the time"

    def remarks(self, wanted: Outcome, reached: Outcome) -> Iterator[str]:
        """What else is to be known."""
        yield f"times by the costs of {self.context.costs}"
        if reached.full != wanted.full:
            others = sum(reached.full[v] is not wanted.full[v] for v in set(self.trade.choices.values()))
            if others:
                yield f"{others} ops that only move values, or read low and compute in FP32, were left to convert"
        if self.kept:
            yield f"in FP32, as they overflow where they are low: {', '.join(self.kept)}"
        for node, why in self.trade.unpriced.items():
            yield f"{node.name} stays low, its time is unknown: {why}"


def _original_graphs(problem: Problem, batches: Sequence[Batch]) -> tuple[GraphModule, ...]:
    """Of the program as it is without a conversion, with sizes."""
    rules = conversion_of(problem.model).settings.policy.rules
    trial = under(problem.model, policy=Policy("O0", (), rules), lower="always")
    with unchanged(trial):
        for batch in batches:
            Problem(trial, problem.loss).run(batch)
    return tuple(captured.gm for captured in conversion_of(trial).captured)


def _squares(
    ledger: Ledger, low: Sequence[GraphModule], graphs: Sequence[GraphModule], trade: TradeOff
) -> tuple[dict[Node, float], float]:
    """Value of the original graphs -> the mean square error of its rounding; and what belongs to none."""
    names = [{place.name: place.node for place in places(0, gm)} for gm in graphs]
    made = [{place.name: place.node for place in places(0, gm)} for gm in low]
    weights = {weight_path(node): node for known in names for node in known.values() if node.op == "get_attr"}
    squares: dict[Node, float] = defaultdict(float)
    constant = 0.0
    for row in ledger.rows:
        node = weights.get(row.node) if row.kind == "weight" else None
        if row.kind == "node" and row.graph < len(graphs):
            prefix, _, _ = row.node.rpartition(".")
            inner = made[row.graph][row.node]
            while inner.target in CASTS:
                inner = inner.all_input_nodes[0]
            node = names[row.graph].get(f"{prefix}.{inner.name}" if prefix else inner.name)
        square = row.squares / len(ledger.samples)
        roots = () if node is None else trade.roots(node)
        for root in roots:
            squares[root] += square / len(roots)
        constant += 0.0 if roots else square
    return squares, constant


def _is_served(node: Node, context: Context) -> bool:
    """Whether a kernel reads and writes low, and computes in FP32 inside: which of them it is follows from others."""
    row = facts_of(notes(node).op.name)
    return context.native_mixed and (context.device in row.mixed or row.dtype_keyword)


def _leads(node: Node) -> bool:
    """Whether the dtypes of others follow from the op's, and not its from theirs."""
    return facts_of(notes(node).op.name).rule in (Rule.LOW, Rule.FULL)


def _root_mean_square(ledger: Ledger) -> float:
    return math.sqrt(sum(sample.measured**2 for sample in ledger.samples) / len(ledger.samples))


def _times(models: Sequence[nn.Module], loss: Loss | None, batches: Sequence[Batch]) -> list[float]:
    """Seconds of a step of each model, measured in turns: the median of the steps."""
    taken: list[list[float]] = [[] for _ in models]
    with contextlib.ExitStack() as stack:
        for each in models:
            stack.enter_context(unchanged(each))
        until = clock.perf_counter() + _SECONDS
        batches = [*itertools.islice(itertools.cycle(batches), max(_STEPS, len(batches)))]
        while True:
            for batch in batches:
                for model, own in zip(models, taken, strict=True):
                    own.append(_seconds_of_step(Problem(model, loss), batch))
            if clock.perf_counter() > until:
                return [statistics.median(own) for own in taken]


def _seconds_of_step(problem: Problem, batch: Batch) -> float:
    """Of forward and, where weights want gradients, backward."""
    began = clock.perf_counter()
    value = problem.run(batch)
    total = value if isinstance(value, Tensor) else sum(each.sum() for each in value)
    if isinstance(total, Tensor) and total.requires_grad:
        total.sum().backward()
    if isinstance(total, Tensor) and total.is_cuda:
        torch.cuda.synchronize(total.device)
    return clock.perf_counter() - began
