"""Tune a policy by measurement: the fastest within an error of the loss, or the most exact within a time.

The study of a model comes first: its original graphs, what each rounding costs, and what any policy gives of both.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time as clock
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxprec.errors import ConversionError
from fxprec.inspection.nodes import inputs_of, op_name, places
from fxprec.model.conversion import conversion_of
from fxprec.model.warm_up import kept
from fxprec.numerics.audit import InputErrors, NotFiniteError, ledger_of
from fxprec.numerics.cures import further_arguments
from fxprec.numerics.ledger import Ledger
from fxprec.numerics.locate import keep_finite
from fxprec.numerics.overrides import Words, in_fewer_lines, overridden
from fxprec.numerics.problem import Batch, Loss, Problem, not_in_inference_mode, under
from fxprec.numerics.tuned import Figures, Line, Tuned
from fxprec.passes.context import Context
from fxprec.passes.costs.device_costs import DeviceCosts
from fxprec.passes.decide import decide
from fxprec.passes.graph.annotations import Rule, module_path, notes, weight_path
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.table import facts_at
from fxprec.passes.placement.tradeoff import EXACT, Outcome, TradeOff, cheapest_within, computes_full, most_exact_within
from fxprec.passes.policy.policy import Policy
from fxprec.passes.torch_internals import HigherOrderOperator
from fxprec.settings import Lower, Settings

#: Of the batches, one in so many is held out, to measure on.
_HELD_OUT: Final = 4
#: Steps that are timed, of each of the two models in turns: at least so many, and for so many seconds.
_STEPS, _SECONDS = 5, 0.5


@not_in_inference_mode
def tune(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss | None = None,
    *,
    error: float | None = None,
    time: float | None = None,
) -> Tuned:
    """Find the policy that keeps the loss's error within a budget in the least time, or the time with the least error.

    A copy of the model in which all is low that may be is audited: so the squared error is known that each op adds
    where it rounds its result, and each reader where it reads a value rounded. With the costs of the device that gives
    a minimum cut of time + weight * squared error, for any weight; the weight is found by bisection on the curve of the
    best that can be had (``passes.placement.tradeoff``). Ops become FP32 where that is worth its time, and low where
    the policy keeps them in FP32 for little. What overrides of the model's policy say stays, and pins of safety do. Of
    a model at level O0, which is all FP32, the policy is one of level O1.

    Of the batches every fourth is held out: they tell what is measured. Errors are per batch; those of few batches are
    noise: a hundred are a good start, of the size that is trained on. The model is left as it was.

    Args:
        model: converted.
        batches: at least two, each ``(*inputs, target)``, without a loss ``inputs``; or dicts of named inputs.
        loss: as ``fxprec.numerics.audit`` takes it; without any, the error is the length of the outputs'.
        error: the most that the root mean square of the error over batches may be, in units of the loss (or output).
        time: the most that a step may take, as a fraction of what it takes now.

    Returns:
        The policy, as ``convert`` takes it with the other settings unchanged; with predicted and measured figures.

    Raises:
        ConversionError: the model is not converted, or frozen; at level O3; placed as autocast does.
        TypeError: arguments of other types.
        ValueError: both budgets or none, one that is not positive, or that cannot be met: says what can; fewer than two
            batches; an error that is inf or nan.

    Sources: Eisner and Severance, JACM 1976 (the curve); Hutchinson, Communications in Statistics 19, 1990 (the length
        of outputs' errors, by random signs); DESIGN 11.
    """
    return search(model, batches, loss, error, time, lambda _: None)


class Told(list[Batch]):
    """List of batches that reports whenever one is taken, to ``say``."""

    def __init__(self, what: str, batches: Iterable[Batch], say: Callable[[str], None]) -> None:
        super().__init__(batches)
        self._what, self._say = what, say

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(super().__iter__(), 1):
            self._say(f"{self._what}: batch {number} of {len(self)}")
            yield batch


def search(
    model: nn.Module, batches: Iterable[Batch], loss: Loss | None, error: float | None, time: float | None,
    say: Callable[[str], None],
) -> Tuned:  # fmt: skip
    """Search as ``tune`` does; ``say`` is told what is done, as that takes a while."""
    problem = Problem.of(model, loss, "tune")
    settings = _settings_of(model)
    lowering = replace(settings.policy, level="O1") if settings.policy.level == "O0" else settings.policy
    _check_budget(error, time)
    calibration, held_out = _split([*problem.batches(batches)])
    calibration, held_out = Told("auditing", calibration, say), Told("measuring", held_out, say)
    study = Study.of(problem, replace(settings, policy=lowering), calibration)
    start = study.decided(settings.policy)
    base = start if lowering is settings.policy else study.decided(lowering)
    say("deciding")
    if error is not None:
        found, asked = cheapest_within(study.trade, error**2 - study.constant), f"an error of at most {error:g}"
    else:
        assert time is not None
        found, asked = most_exact_within(study.trade, time * start.seconds), f"at most {time:g} of the time"
    if found is None:
        raise ValueError(study.why_not(error, time, start))
    # The bisection ends near a budget, not at the best within it: the start may be better in both.
    if start.square <= found.square and start.seconds <= found.seconds:
        found = start
    policy, lines, reached = study.policy_for(found, base)
    models = [under(model, policy=each) for each in (settings.policy, policy)]
    ledgers = [ledger_of(Problem(each, loss), held_out) for each in models]
    seconds = _times(models, loss, held_out)
    before, after = (
        Figures(math.sqrt(each.square + study.constant), abs(ledger.measured), each.seconds, taken)
        for each, ledger, taken in zip((start, reached), ledgers, seconds, strict=True)
    )
    target = "outputs" if ledgers[0].target == "outputs" else "loss"
    remarks = (*study.remarks(start, base, found, reached, error), *_missed(before, after, error, time, len(held_out)))
    against = "the start" if lowering is settings.policy else "O1"
    return Tuned(policy, lines, before, after, asked, remarks, target, against, _call_of(settings))


def _missed(before: Figures, after: Figures, error: float | None, time: float | None, batches: int) -> Iterator[str]:
    """Say where what was measured on the held-out batches exceeds what was asked: the search goes by predictions."""
    on = "on the held-out batch" if batches == 1 else f"on {batches} held-out batches"
    if error is not None and not after.measured_error <= error:
        yield (
            f"the budget is missed {on}: an error of {after.measured_error:.3g} was measured, {error:g} was asked. "
            "Give more batches, as an error of few of them is noise, or ask for less"
        )
    taken = after.measured_seconds / before.measured_seconds
    if time is not None and taken > time:
        yield (
            f"the budget is missed {on}: a step takes {taken:.3f} of the time before, at most {time:g} was asked. "
            "Costs of this machine (python -m fxprec calibrate) predict better than shipped ones; or ask for less"
        )


def _call_of(settings: Settings) -> str:
    """Return the call of ``convert`` with these settings and a policy."""
    # A policy file has no dtype, costs or kernels, and all of them decide: the file's comment tells them.
    costs = ""
    if isinstance(settings.lower, DeviceCosts):
        costs = f"; costs are those of {settings.lower}, which DeviceCosts.from_dict reads from a file"
    elif settings.lower != "always":
        costs = f"; costs of the device were those of {settings.device_costs}"
    further = further_arguments(settings)
    return f"fxprec.convert(model, example_inputs, dtype={settings.dtype}{further}, policy=policy){costs}"


def _settings_of(model: nn.Module) -> Settings:
    settings = conversion_of(model).settings
    if settings.policy.level == "O3":
        raise ConversionError(
            "at level O3 the parameters themselves are low, and their FP32 values, with which tune compares, are gone: "
            "convert the FP32 model at O2, whose activations are low, too, and tune that; or keep ops in FP32 by "
            'overrides, Policy.preset("O3").override(ops={"softmax": torch.float32})'
        )
    if settings.placement != "mincut":
        raise ConversionError('tune places casts by a minimum cut: convert with placement="mincut", the default')
    return settings


def _check_budget(error: float | None, time: float | None) -> None:
    if (error is None) == (time is None):
        raise ValueError(
            "give one budget: error=, in units of the loss (or outputs), or time=, a fraction of what a step takes now"
        )
    name, value = ("error", error) if time is None else ("time", time)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value} must be positive and finite")


def _split(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Return batches to audit, and batches to measure on."""
    if len(batches) < 2:
        raise ValueError(f"tune wants at least two batches, one of them to measure on; there is {len(batches)}")
    # Every fourth, and not the last ones: batches may be sorted.
    step = min(_HELD_OUT, len(batches))
    held_out = batches[step - 1 :: step]
    return [batch for number, batch in enumerate(batches) if (number + 1) % step], [*held_out]


def _times(models: Sequence[nn.Module], loss: Loss | None, batches: Sequence[Batch]) -> list[float]:
    """Return seconds of a step of each model, measured in turns: the median of the steps."""
    taken: list[list[float]] = [[] for _ in models]
    with contextlib.ExitStack() as stack:
        for each in models:
            stack.enter_context(kept(each))
        # At least some steps, and long enough for a median that repeats.
        until = clock.perf_counter() + _SECONDS
        batches = [*itertools.islice(itertools.cycle(batches), max(_STEPS, len(batches)))]
        # In turns, so that a change of the machine's clock or load meets both models.
        while True:
            for batch in batches:
                for model, own in zip(models, taken, strict=True):
                    began = clock.perf_counter()
                    values, _ = Problem(model, loss).step(batch, 1.0)
                    if values[0].is_cuda:
                        torch.cuda.synchronize(values[0].device)
                    own.append(clock.perf_counter() - began)
            if clock.perf_counter() > until:
                return [statistics.median(own) for own in taken]


@dataclass(frozen=True, slots=True)
class Study:
    """Original graphs of a model, before any decision, with the cost of each rounding.

    Attributes:
        graphs: of the original program, annotated with ops, dtypes and sizes.
        context: of the model's settings, with costs.
        lower: as of the settings.
        trade: the cut, with the mean square error that each rounding adds.
        constant: what ops outside of the graphs add.
        kept: nodes that are no choice: their values overflow where they are low.
        modules: paths of the model's modules.
    """

    graphs: tuple[GraphModule, ...]
    context: Context
    lower: Lower
    trade: TradeOff
    constant: float
    kept: tuple[str, ...]
    modules: frozenset[str]

    @classmethod
    def of(cls, problem: Problem, settings: Settings, batches: Sequence[Batch]) -> Study:
        """Capture the original program, and audit it with all low that may be."""
        costs = settings.device_costs
        if settings.dtype not in costs.curves:
            raise ConversionError(
                f"there are no costs of {dtype_name(settings.dtype)} ({costs}): python -m fxprec calibrate"
            )
        # Without gradients only the forward is priced and audited.
        gradients = torch.is_grad_enabled() and any(p.requires_grad for p in problem.model.parameters())
        context = replace(settings.context(gradients), costs=costs)
        graphs = _original_graphs(problem, batches)
        # What overflows where it is low is no choice: it is kept in FP32, and the audit begins anew.
        in_fp32: list[str] = []
        while True:
            policy = settings.policy.override(nodes=dict.fromkeys(in_fp32, torch.float32))
            trade = TradeOff(graphs, replace(context, policy=policy), {}, {})
            low = {node.name: settings.dtype for node in trade.choices if not _is_served(node, context)}
            trial = under(problem.model, policy=policy.override(nodes=low), lower="always")
            reads = InputErrors(settings.dtype)
            ledger: Ledger | NotFiniteError
            try:
                ledger = ledger_of(Problem(trial, problem.loss), batches, opened=True, reads=reads, signs=True)
            except NotFiniteError as error:
                ledger = error
            if isinstance(ledger, NotFiniteError) or ledger.swallowed:
                more = [name for name in keep_finite(trial, problem.loss, batches) if name not in in_fp32]
                in_fp32 += more
                if more:
                    continue
            if isinstance(ledger, NotFiniteError):
                raise ledger
            low_graphs = [captured.gm for captured in conversion_of(trial).captured]
            squares, constant = _squares(ledger, low_graphs, graphs, trade)
            of_reads = _squares_of_reads(ledger, reads, graphs, trade)
            trade = TradeOff(graphs, replace(context, policy=policy), squares, of_reads)
            modules = frozenset(name for name, _ in problem.model.named_modules())
            return cls(graphs, context, settings.lower, trade, constant, tuple(in_fp32), modules)

    def decided(self, policy: Policy) -> Outcome:
        """Return the error and the time that a policy gives."""
        costs = self.context.costs if self.lower != "always" else None
        for gm in self.graphs:
            decide(gm, replace(self.context, policy=policy, costs=costs))
        return self.trade.decided()

    def policy_for(self, wanted: Outcome, base: Outcome) -> tuple[Policy, tuple[Line, ...], Outcome]:
        """Return overrides of the ops that the policy decides otherwise: first of those that set others' dtypes."""
        nodes: dict[str, torch.dtype] = {}
        # Overrides name nodes, and a policy decides the rest by rules: what follows from a leading op needs no line.
        known = {node: wanted.full[variable] for node, variable in self.trade.choices.items()}
        known |= {node: True for gm in self.graphs for node in gm.graph.nodes if node.name in self.kept}
        # Overrides of leading ops move the ops that follow: only what is still otherwise after them gets its own, and
        # that once more.
        for leads in (True, False, False):
            self.decided(self.context.policy.override(nodes=nodes))
            for node, full in known.items():
                facts = facts_at(node)
                follows = facts.rule not in (Rule.LOW, Rule.FULL) and (leads or facts.view)
                if computes_full(node) is full or follows or (not full and _is_served(node, self.context)):
                    continue
                nodes[node.name] = torch.float32 if full else self.context.low
        words = self._words(nodes)
        policy = overridden(self.context.policy, _told_in(nodes, words))
        reached = self.decided(policy)
        return policy, self._lines(nodes, words, base, reached), reached

    def _words(self, nodes: Mapping[str, torch.dtype]) -> dict[str, Words]:
        """Return shorter patterns for these overrides."""
        everywhere = [place.node for gm in self.graphs for place in places(0, gm)]

        def decisions(words: Mapping[str, Words]) -> list[tuple[object, ...]] | None:
            policy = overridden(self.context.policy, _told_in(nodes, words))
            if words and not policy.has_tables:
                return None
            self.decided(policy)
            return [(each.reads, each.compute, each.output) for each in (notes(node).precision for node in everywhere)]

        # Shorter words are good only if every node of every graph is decided as by the single lines.
        before = decisions({})
        return in_fewer_lines(nodes, everywhere, self.modules, lambda words: decisions(words) == before)

    def _lines(
        self, nodes: Mapping[str, torch.dtype], words: Mapping[str, Words], base: Outcome, reached: Outcome
    ) -> tuple[Line, ...]:
        """Return a line for each decision, with what taking it back alone would change."""
        found: dict[str, Line] = {}
        for node in (node for gm in self.graphs for node in gm.graph.nodes if node.name in nodes):
            share, seconds = 0.0, 0.0
            variable = self.trade.choices.get(node)
            if variable is not None:
                # A line is worth what is lost without it alone, while all others stay.
                without = [*reached.full]
                without[variable] = not without[variable]
                other = self.trade.outcome(without)
                share = (other.square - reached.square) / (base.square + self.constant) if base.square else 0.0
                seconds = reached.seconds - other.seconds
            precision = dtype_name(nodes[node.name])
            own = words.get(node.name, ("nodes", node.name))
            found[node.name] = Line(
                node.name, precision, module_path(node), op_name(node), share, seconds, variable is None, own
            )
        return tuple(sorted(found.values(), key=lambda line: -abs(line.share)))

    def why_not(self, error: float | None, time: float | None, start: Outcome) -> str:
        """Explain why a budget cannot be met, and name one that can."""
        if error is not None:
            # The message gives a budget that can be met: that is the next thing that its reader wants.
            least = self.trade.cut(EXACT)
            left, fraction = math.sqrt(least.square + self.constant), least.seconds / start.seconds
            return (
                f"error={error:g} cannot be met: with all in FP32 that may be, {left:.3g} is left, "
                f"at {fraction:.3g} of the time" + "".join(f"; {each}" for each in self._stay_low())
            )
        fraction = self.trade.cut(0.0).seconds / start.seconds
        return f"time={time:g} cannot be met: the fastest policy takes {fraction:.3g} of the time"

    def remarks(
        self, start: Outcome, base: Outcome, wanted: Outcome, reached: Outcome, error: float | None
    ) -> Iterator[str]:
        """Yield remarks; ``base``: of the policy without overrides; ``error``: the budget, if it is one."""
        if base is not start:
            yield "the policy is of level O1, which lowers: its lines say what is otherwise than there"
        if error is not None and start.square + self.constant <= error**2:
            yield "the start keeps to the budget already: what is changed saves time"
        variables = set(self.trade.choices.values())
        if all(reached.full[v] for v in variables) and not (base is start and all(start.full[v] for v in variables)):
            yield "all is FP32, as at level O0: by these costs nothing gains from being lower"
        yield f"times by the costs of {self.context.costs}; python -m fxprec calibrate measures those of this machine"
        if others := sum(reached.full[v] is not wanted.full[v] for v in variables):
            yield f"{others} ops that only move values, or read low and compute in FP32, were left to convert"
        if reached.square > wanted.square * (1 + 1e-9) or reached.seconds > wanted.seconds * (1 + 1e-9):
            error, limit = (math.sqrt(each.square + self.constant) for each in (reached, wanted))
            yield (
                f"convert comes to an error of {error:.3g} and {reached.seconds:.3g} s where {limit:.3g} and "
                f"{wanted.seconds:.3g} s were decided: the budget may be missed"
            )
        if self.kept:
            yield f"in FP32, as they overflow where they are low: {', '.join(self.kept)}"
        yield from self._stay_low()

    def _stay_low(self) -> Iterator[str]:
        """Yield ops that are no choice, as nobody knows what they cost; those of a reason together."""
        reasons: dict[str, list[str]] = defaultdict(list)
        for node, why in self.trade.unpriced.items():
            reasons[why].append(node.name)
        for why, names in reasons.items():
            yield f"{', '.join(names)} {'stay' if len(names) > 1 else 'stays'} low, time unknown: {why}"


def _told_in(nodes: Mapping[str, torch.dtype], words: Mapping[str, Words]) -> dict[Words, torch.dtype]:
    """Return the overrides of these nodes: each by its kind and pattern if it has any, else by name."""
    return {words.get(name, ("nodes", name)): precision for name, precision in nodes.items()}


def _original_graphs(problem: Problem, batches: Sequence[Batch]) -> tuple[GraphModule, ...]:
    """Return the graphs of the program as it is without a conversion, with sizes."""
    rules = conversion_of(problem.model).settings.policy.rules
    trial = under(problem.model, policy=Policy("O0", (), rules), lower="always")
    with kept(trial):
        for batch in batches:
            Problem(trial, problem.loss).run(batch)
    return tuple(captured.gm for captured in conversion_of(trial).captured)


def _squares(
    ledger: Ledger, low: Sequence[GraphModule], graphs: Sequence[GraphModule], trade: TradeOff
) -> tuple[dict[Node, float], float]:
    """Return value -> mean square error of its rounding, for the original graphs, and the error that belongs to none.

    What a cast loses counts for what it casts.
    """
    names, made = _names_in(graphs), _names_in(low)
    # The low copy of a weight rounds for all its readers: its error is that of the weight's node.
    weights = {weight_path(node): node for known in names for node in known.values() if node.op == "get_attr"}
    squares: dict[Node, float] = defaultdict(float)
    constant = 0.0
    for row in ledger.rows:
        node = weights.get(row.node) if row.kind == "weight" else None
        if row.kind == "node" and row.graph < len(graphs):
            prefix, _, _ = row.node.rpartition(".")
            inner = made[row.graph][row.node]
            # A cast in the rewritten graph has no node in the original one: its rounding is that of the value it casts.
            while inner.target in CASTS or (notes(inner).op.name == "to" and inner.all_input_nodes):
                inner = inner.all_input_nodes[0]
            node = names[row.graph].get(f"{prefix}.{inner.name}" if prefix else inner.name)
        square = row.squares / len(ledger.samples)
        roots = () if node is None else trade.roots(node)
        for root in roots:
            squares[root] += square / len(roots)
        constant += 0.0 if roots else square
    return squares, constant


def _squares_of_reads(
    ledger: Ledger, reads: InputErrors, graphs: Sequence[GraphModule], trade: TradeOff
) -> dict[tuple[Node, Node], float]:
    """Return (value, reader) -> the mean square error that rounding the value for that reader adds."""
    names = _names_in(graphs)
    count = len(reads.batches)
    known: dict[tuple[Node, Node], list[float]] = defaultdict(lambda: [0.0] * count)
    for batch, own in enumerate(reads.batches):
        for (graph, name, position), value in own.items():
            reader = names[graph].get(name) if 0 <= graph < len(graphs) else None
            sources = inputs_of(reader) if reader is not None else []
            if reader is not None and position < len(sources):
                known[sources[position], reader][batch] += value
    ran = {names[row.graph].get(row.node) for row in ledger.rows if row.kind == "node" and row.graph < len(graphs)}
    heirs = trade.heirs()

    def moves(value: Node) -> list[Node]:
        """Return users that hand a value on without any op: views. Rounding one is rounding it for all its readers."""
        users = [
            user
            for user in value.users
            if user.op.startswith("call") and not isinstance(user.target, HigherOrderOperator)
        ]
        return [each for each in dict.fromkeys([*users, *heirs.get(value, ())]) if each not in ran]

    whole: dict[Node, list[float]] = {}

    def of_all_readers(value: Node) -> list[float]:
        if value not in whole:
            own = [known[value, user] for user in value.users if (value, user) in known]
            own += [of_all_readers(each) for each in moves(value)]
            whole[value] = [sum(each) for each in zip(*own, strict=True)] if own else [0.0] * count
        return whole[value]

    values = [value for own in names for value in own.values()]
    into_views = {(value, each): of_all_readers(each) for value in values for each in moves(value)}
    return {pair: sum(each**2 for each in own) / count for pair, own in (known | into_views).items()}


def _names_in(graphs: Sequence[GraphModule]) -> list[dict[str, Node]]:
    """Return for each graph name -> node, with those of the bodies that it calls."""
    return [{place.name: place.node for place in places(0, gm)} for gm in graphs]


def _is_served(node: Node, context: Context) -> bool:
    """Return whether a kernel reads and writes low, and computes in FP32 inside: its dtypes follow from others."""
    row = facts_at(node)
    return context.native_mixed and (context.device in row.mixed or row.dtype_keyword)
