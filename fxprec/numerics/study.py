"""Study a model before its policy is tuned: its graphs, what their roundings cost, what a policy gives."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from fxprec.errors import ConversionError
from fxprec.inspection.nodes import op_name, places
from fxprec.model.module import conversion_of
from fxprec.numerics.audit import InputErrors, NotFiniteError, ledger_of
from fxprec.numerics.fewer_lines import Words, in_fewer_lines, overridden
from fxprec.numerics.ledger import Ledger
from fxprec.numerics.locate import keep_finite
from fxprec.numerics.problem import Batch, Problem, under
from fxprec.numerics.problem import kept as unchanged
from fxprec.numerics.tuned import Line
from fxprec.passes.context import Context
from fxprec.passes.decide import decide
from fxprec.passes.graph.annotations import Rule, module_path, notes, weight_path
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.table import facts_of
from fxprec.passes.placement.tradeoff import EXACT, Outcome, TradeOff, computes_full
from fxprec.passes.policy.policy import Policy
from fxprec.passes.torch_internals import HigherOrderOperator
from fxprec.settings import Lower, Settings
from fxprec.tape.attribution import inputs_of


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
        gradients = torch.is_grad_enabled() and any(p.requires_grad for p in problem.model.parameters())
        context = replace(settings.context(gradients), costs=costs)
        graphs = _original_graphs(problem, batches)
        # What overflows where it is low is no choice: it is kept in FP32, and the audit begins anew.
        kept: list[str] = []
        while True:
            policy = settings.policy.override(nodes=dict.fromkeys(kept, torch.float32))
            trade = TradeOff(graphs, replace(context, policy=policy), {}, {})
            low = {node.name: settings.dtype for node in trade.choices if not _is_served(node, context)}
            trial = under(problem.model, policy=policy.override(nodes=low), lower="always")
            reads = InputErrors(settings.dtype)
            ledger, fault = None, None
            try:
                ledger = ledger_of(Problem(trial, problem.loss), batches, opened=True, reads=reads, signs=True)
            except NotFiniteError as error:
                fault = error
            if ledger is None or ledger.swallowed:
                more = [name for name in keep_finite(trial, problem.loss, batches) if name not in kept]
                kept += more
                if more:
                    continue
            if ledger is None:
                assert fault is not None
                raise fault
            low_graphs = [captured.gm for captured in conversion_of(trial).captured]
            squares, constant = _squares(ledger, low_graphs, graphs, trade)
            trade = TradeOff(
                graphs, replace(context, policy=policy), squares, _squares_of_reads(ledger, reads, graphs, trade)
            )
            modules = frozenset(name for name, _ in problem.model.named_modules())
            return cls(graphs, context, settings.lower, trade, constant, tuple(kept), modules)

    @property
    def all_low(self) -> list[bool]:
        """Assignment in which no choice is FP32."""
        full = [*self.trade.cut(0.0).full]
        for variable in self.trade.choices.values():
            full[variable] = False
        return full

    def decided(self, policy: Policy) -> Outcome:
        """Return the error and the time that a policy gives."""
        costs = self.context.costs if self.lower != "always" else None
        for gm in self.graphs:
            decide(gm, replace(self.context, policy=policy, costs=costs))
        return self.trade.decided()

    def policy_for(self, wanted: Outcome, base: Outcome) -> tuple[Policy, tuple[Line, ...], Outcome]:
        """Return overrides of the ops that the policy decides otherwise: first of those that set others' dtypes."""
        nodes: dict[str, torch.dtype] = {}
        known = {node: wanted.full[variable] for node, variable in self.trade.choices.items()}
        known |= {node: True for gm in self.graphs for node in gm.graph.nodes if node.name in self.kept}
        # Overrides of leading ops move the ops that follow: only what is still otherwise after them gets its own, and
        # that once more.
        for leads in (True, False, False):
            self.decided(self.context.policy.override(nodes=nodes))
            for node, full in known.items():
                follows = not _leads(node) and (leads or facts_of(notes(node).op.name).view)
                if computes_full(node) is full or follows or (not full and _is_served(node, self.context)):
                    continue
                nodes[node.name] = torch.float32 if full else self.context.low
        words = self._words(nodes)
        policy = overridden(self.context.policy, nodes, words)
        reached = self.decided(policy)
        return policy, self._lines(nodes, words, base, reached), reached

    def _words(self, nodes: Mapping[str, torch.dtype]) -> dict[str, Words]:
        """Return shorter patterns for these overrides."""
        everywhere = [place.node for gm in self.graphs for place in places(0, gm)]

        def decisions(words: Mapping[str, Words]) -> list[tuple[object, ...]] | None:
            policy = overridden(self.context.policy, nodes, words)
            if words and not policy.has_tables:
                return None
            self.decided(policy)
            found = (notes(node).precision for node in everywhere)
            return [(each.reads, each.compute, each.output) for each in found]

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
        if reached.full != wanted.full:
            others = sum(reached.full[v] is not wanted.full[v] for v in set(self.trade.choices.values()))
            if others:
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


def _original_graphs(problem: Problem, batches: Sequence[Batch]) -> tuple[GraphModule, ...]:
    """Return the graphs of the program as it is without a conversion, with sizes."""
    rules = conversion_of(problem.model).settings.policy.rules
    trial = under(problem.model, policy=Policy("O0", (), rules), lower="always")
    with unchanged(trial):
        for batch in batches:
            Problem(trial, problem.loss).run(batch)
    return tuple(captured.gm for captured in conversion_of(trial).captured)


def _squares(
    ledger: Ledger, low: Sequence[GraphModule], graphs: Sequence[GraphModule], trade: TradeOff
) -> tuple[dict[Node, float], float]:
    """Return value -> mean square error of its rounding, for the original graphs, and the error that belongs to none.

    What a cast loses counts for what it casts.
    """
    names = _names(graphs)
    made = [{place.name: place.node for place in places(0, gm)} for gm in low]
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
    names = _names(graphs)
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


def _names(graphs: Sequence[GraphModule]) -> list[dict[str, Node]]:
    """Return for each graph name -> node, with those of the bodies that it calls."""
    return [{place.name: place.node for place in places(0, gm)} for gm in graphs]


def _is_served(node: Node, context: Context) -> bool:
    """Return whether a kernel reads and writes low, and computes in FP32 inside: its dtypes follow from others."""
    row = facts_of(notes(node).op.name)
    return context.native_mixed and (context.device in row.mixed or row.dtype_keyword)


def _leads(node: Node) -> bool:
    """Return whether the dtypes of others follow from the op's, and not its from theirs."""
    return facts_of(notes(node).op.name).rule in (Rule.LOW, Rule.FULL)
