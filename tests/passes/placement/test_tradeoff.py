"""Time against error: every cut is the best of all assignments, by trying them; what is free and what is not."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.passes.graph.annotations import Rule
from fxprec.passes.placement.solver import cost_of, solve
from fxprec.passes.placement.tradeoff import EXACT, Outcome, TradeOff, cheapest_within, most_exact_within
from made_costs import device

BF16 = torch.bfloat16


class Random(nn.Module):
    """A few ops on values that came before, drawn by a seed."""

    def __init__(self, seed: int, size: int = 7) -> None:
        super().__init__()
        self.draw, self.size = random.Random(seed), size
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(size))
        self.plan = [(self.draw.randrange(9), self.draw.random(), self.draw.random()) for _ in range(size)]

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for (kind, first, second), weight in zip(self.plan, self.weights, strict=True):
            a, b = values[int(first * len(values))], values[int(second * len(values))]
            made = {
                0: lambda a=a, w=weight: F.linear(a, w),
                1: lambda a=a, w=weight: F.linear(a, w),
                2: lambda a=a, b=b: a + b,
                3: lambda a=a: a.relu(),
                4: lambda a=a: a.softmax(-1),
                5: lambda a=a: a.transpose(0, 1),
                6: lambda a=a, b=b: a * b,
                7: lambda a=a, b=b: torch.cat([a, b])[:4],
                8: lambda a=a: F.layer_norm(a, (4,)),
            }[kind]()
            values.append(made)
        return values[-1] + values[-2]


@pytest.fixture
def made(tools):
    def make(model, *inputs, squares=None, reads=lambda gm: {}, level="O1", seed=0, **settings):
        """The problem; without squares, with random squared errors of all values and of all that read them."""
        draw = random.Random(seed)
        kinds = ("pointwise", "attention", "attention_backward", "stream")
        low = settings.get("low", torch.bfloat16)
        costs = device(draw.uniform(5, 50), draw.uniform(1, 30), draw.uniform(0, 9), low,
                       **{kind: (draw.uniform(1, 20), draw.uniform(1, 20)) for kind in kinds})  # fmt: skip
        context = tools.context(level, costs=costs, **settings)
        gm = tools.rewritten(tools.traced(model, *inputs), context, until="propagate")
        if squares is not None:
            return TradeOff([gm], context, squares(gm), reads(gm)), gm
        pairs = [(node, reader) for node in gm.graph.nodes for reader in node.users]
        drawn = {each: 10 ** draw.uniform(-10, -6) for each in (*gm.graph.nodes, *pairs)}
        return TradeOff([gm], context, *({e: drawn[e] for e in own} for own in (gm.graph.nodes, pairs))), gm

    return make


def is_possible(trade: TradeOff, full: Sequence[bool]) -> bool:
    """Whether an assignment honours pins and closures."""
    pins = all(full[variable] is pin for variable, pin in trade._time.pins.items())
    return pins and all(full[y] for x, y in trade._time.closures if full[x])


def all_of(trade: TradeOff) -> Iterator[Outcome]:
    """Every assignment of the choices that is possible; what else is free is at its cheapest."""
    variables = list(dict.fromkeys(trade.choices.values()))
    assert len(variables) <= 12
    problem = trade._time
    for values in itertools.product((True, False), repeat=len(variables)):
        pins = {**problem.pins, **dict(zip(variables, values, strict=True))}
        full = solve(replace(problem, pins=pins))
        if is_possible(trade, full):
            yield trade.outcome(full)


@pytest.mark.parametrize("seed", range(12))
def test_a_cut_is_the_least_of_all_assignments(made, seed):
    trade, _ = made(Random(seed), torch.randn(4, 4), seed=seed)
    outcomes = list(all_of(trade))
    assert len(outcomes) > 1
    for weight in (0.0, 1.0, 1e2, 1e4, 1e6, EXACT):
        found = trade.cut(weight)
        value = lambda each, weight=weight: each.seconds * 1e12 + weight * each.square  # noqa: E731
        assert value(found) == pytest.approx(min(map(value, outcomes)), rel=1e-12)
    exact = trade.cut(EXACT)
    equal = [each.seconds for each in outcomes if each.square <= exact.square * (1 + 1e-12)]
    assert exact.seconds == pytest.approx(min(equal), rel=1e-12), "of all that are as exact it is the fastest"


@pytest.mark.parametrize("seed", range(4))
def test_a_move_is_told_by_what_is_around_it(made, seed):
    trade, _ = made(Random(seed), torch.randn(4, 4), seed=seed)
    variables = [*dict.fromkeys(trade.choices.values())]
    for outcome in itertools.islice(all_of(trade), 0, None, 7):
        for group in (*((each,) for each in variables), *trade.pairs):
            for wide in (True, False):
                move = trade.closed(tuple((each, wide) for each in group))
                if move is None:
                    continue
                full = [dict(move).get(variable, own) for variable, own in enumerate(outcome.full)]
                found = trade.moved(outcome, move)
                if found is None:
                    assert full == [*outcome.full]
                    continue
                known = trade.outcome(full)
                assert found.full == known.full and is_possible(trade, full)
                assert found.seconds == pytest.approx(known.seconds, rel=1e-9)
                assert found.square == pytest.approx(known.square, rel=1e-9, abs=1e-20)


@pytest.mark.parametrize("seed", range(12))
def test_a_closed_move_is_the_least_that_is_possible(made, seed):
    """What closures force is in every possible assignment in which the move was made; what is refused is in none."""
    trade, _ = made(Random(seed), torch.randn(4, 4), seed=seed)
    outcomes = list(all_of(trade))
    choices = [*dict.fromkeys(trade.choices.values())]
    for wide, group in itertools.product((True, False), (*((each,) for each in choices), *trade.pairs)):
        move = trade.closed(tuple((each, wide) for each in group))
        made_in = [each for each in outcomes if all(each.full[variable] is wide for variable in group)]
        if move is None:
            assert not made_in
        else:
            assert all(each.full[variable] is own for each in made_in for variable, own in move if variable in choices)


def dominated(found: Outcome, others: Sequence[Outcome]) -> bool:
    return any(
        each.seconds < found.seconds * (1 - 1e-12) and each.square < found.square * (1 - 1e-12) for each in others
    )


@pytest.mark.parametrize("seed", range(12))
def test_budgets_are_kept_and_used(made, seed):
    trade, _ = made(Random(seed), torch.randn(4, 4), seed=seed)
    outcomes = list(all_of(trade))
    exact, fast = trade.cut(EXACT), trade.cut(0.0)
    lost = []
    for share in (0.0, 0.1, 0.3, 0.6, 0.9, 1.0):
        square = exact.square + share * (fast.square - exact.square)
        found = cheapest_within(trade, square)
        assert found is not None and found.square <= square
        best = min(each.seconds for each in outcomes if each.square <= square)
        lost.append(found.seconds / best - 1)
        seconds = fast.seconds + share * (exact.seconds - fast.seconds)
        found = most_exact_within(trade, seconds)
        assert found is not None and found.seconds <= seconds
    assert all(each >= -1e-12 for each in lost) and max(lost) < 0.02
    assert cheapest_within(trade, exact.square / 2 - 1e-30) is None or exact.square == 0
    assert most_exact_within(trade, fast.seconds * 0.99) is None


@pytest.mark.parametrize("count", range(2, 12))
def test_a_limit_is_kept_but_for_the_last_digits_of_its_sum(tools, count):
    """As many of equal ops are low as the time wants, and none of greater error because sums differ by their order."""

    def branches(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, weight) for _ in range(count + 1))

    context = tools.context(costs=device(0.7, 0.1, cast=0.1))
    gm = tools.rewritten(tools.traced(branches, *torch.randn(2, 3, 3)), context, until="propagate")
    *equal, other = gm.graph.find_nodes(op="call_function", target=F.linear)
    trade = TradeOff([gm], context, {**dict.fromkeys(equal, 1e-9), other: 1e-3}, {})
    full = [*trade.cut(EXACT).full]
    for node in equal:
        full[trade.choices[node]] = False
    target = trade.outcome(full)
    assert trade.cut(0.0).seconds < target.seconds < trade.cut(EXACT).seconds
    for seconds in (math.nextafter(target.seconds, 0), target.seconds, math.nextafter(target.seconds, 1)):
        assert most_exact_within(trade, seconds) == target


class Residual(nn.Module):
    """A stream that starts in FP32, a branch to it, and a reader of a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        stream = x + F.linear(F.gelu(F.linear(x, self.up)), self.down)
        return F.linear(stream.transpose(0, 1).contiguous(), self.head).softmax(-1)


def named(trade: TradeOff, found: Outcome) -> dict[str, bool]:
    return {node.name: found.full[variable] for node, variable in trade.choices.items()}


def named_variables(trade: TradeOff) -> dict[str, int]:
    return {node.name: variable for node, variable in trade.choices.items()}


def test_what_is_free(made):
    trade, _ = made(Residual(), torch.randn(4, 4))
    full, low = named(trade, trade.cut(EXACT)), named(trade, trade.cut(0.0))
    assert full.keys() == {"linear", "gelu", "linear_1", "add", "transpose", "contiguous", "linear_2", "softmax"}
    assert all(full.values())
    low = [node for node, wide in low.items() if not wide]
    assert {"linear", "linear_1", "linear_2"} <= set(low)


def test_the_stream_and_a_softmax_are_low_where_that_is_faster(made):
    trade, _ = made(Residual(), torch.randn(4, 4), squares=lambda gm: {})
    costs = device(50, 1, cast=20, pointwise=(9, 1))
    context = replace(trade._constraints.context, costs=costs)
    trade = TradeOff([next(iter(trade.choices)).graph.owning_module], context, {}, {})
    assert not any(named(trade, trade.cut(0.0)).values())


def test_what_is_not_free(made):
    def unsafe(x: Tensor, weight: Tensor) -> Tensor:
        h = F.linear(x, weight)
        h = h.masked_fill(h > 0, torch.finfo(torch.float32).min)
        return (h.exp() + 1e-12).log()

    trade, _ = made(unsafe, torch.randn(4, 4), torch.randn(4, 4), low=torch.float16)
    assert set(named(trade, trade.cut(0.0))) == {"linear"}, "FULL ops of float16 and unsafe numbers stay"
    policy = fxprec.Policy.preset("O1").override(nodes={"linear": torch.float32}, ops={"add": torch.float32})
    trade, _ = made(Residual(), torch.randn(4, 4), policy=policy)
    assert {"linear", "add"}.isdisjoint(named(trade, trade.cut(0.0))), "what the user says stays"


def stream_of_two(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    stream = x.cos()
    return F.linear(stream, a).sum() + F.linear(stream.transpose(0, 1).contiguous(), b).sum()


def by_name(**squares: float):
    """Squared errors of values, and of (value, reader) pairs: ``cos_linear``."""
    return {
        "squares": lambda gm: {node: squares[node.name] for node in gm.graph.nodes if node.name in squares},
        "reads": lambda gm: {
            (node, reader): squares[f"{node.name}__{reader.name}"]
            for node in gm.graph.nodes
            for reader in node.users
            if f"{node.name}__{reader.name}" in squares
        },
    }


@pytest.mark.parametrize(
    ("low", "square"),
    [
        ((), 0.0),
        (("linear",), 1e-5),
        (("linear_1",), 4e-6),
        (("linear", "linear_1"), 1.4e-5),
        (("contiguous", "linear_1"), 2e-6),
        (("transpose", "contiguous", "linear_1"), 1e-6),
        (("transpose", "contiguous", "linear", "linear_1"), 1.1e-5),
        (("cos", "transpose", "contiguous", "linear", "linear_1"), 1e-3),
        (("cos",), 1e-3),
    ],
)
def test_a_value_is_rounded_by_its_op_for_all_or_by_readers_for_each(made, low, square):
    """In a chain of ops that only move values it is paid for where FP32 becomes low."""
    figures = by_name(
        cos=1e-3, cos__linear=1e-5, cos__transpose=1e-6, transpose__contiguous=2e-6, contiguous__linear_1=4e-6
    )
    trade, _ = made(stream_of_two, *torch.randn(3, 4, 4), **figures)
    full = [*trade.cut(EXACT).full]
    for node, variable in trade.choices.items():
        full[variable] = node.name not in low
    assert trade.outcome(full).square == pytest.approx(square, rel=1e-9, abs=0)


def test_a_reader_that_is_low_whatever_is_decided_rounds_what_is_in_fp32(made):
    policy = fxprec.Policy.preset("O1").override(nodes={"linear": BF16})
    figures = by_name(cos=1e-3, cos__linear=1e-5, x__cos=1.0)
    trade, _ = made(stream_of_two, *torch.randn(3, 4, 4), policy=policy, **figures)
    exact = trade.cut(EXACT)
    assert exact.square == pytest.approx(1e-5, rel=1e-9, abs=0) and named(trade, exact)["cos"]


def test_what_the_user_widens_has_no_more_digits_than_it_had(made):
    def widens(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.linear(x, a).to(torch.bfloat16).float(), b)

    figures = by_name(linear=1e-3, linear__to=1e-4, to__float_1=0.0, float_1__linear_1=1e-5)
    trade, gm = made(widens, *torch.randn(3, 4, 4), **figures)
    assert {node.name for node in gm.graph.nodes} >= {"to", "float_1", "linear_1"}
    for wide, square in ((True, 1e-4), (False, 1e-3)):
        full = [*trade.cut(0.0).full]
        full[named_variables(trade)["linear"]] = wide
        assert trade.outcome(full).square == pytest.approx(square, rel=1e-9, abs=0)


def test_ops_of_one_name_are_decided_together(tools):
    graphs = []
    for width in (4, 64):  # of which the first gains nothing
        graphs.append(
            tools.rewritten(
                tools.traced(lambda x, w: F.linear(x, w), *torch.randn(2, width, width)),
                tools.context("O1", costs=device(10, 1)),
                until="propagate",
            )
        )
    first, second = ([node for node in gm.graph.nodes if node.name == "linear"] for gm in graphs)
    trade = TradeOff(graphs, tools.context("O1", costs=device(10, 1)), {first[0]: 1e-6, second[0]: 1.0}, {})
    for weight in (0.0, 1.0, 1e3, 1e9):
        found = trade.cut(weight).full
        assert found[trade.choices[first[0]]] == found[trade.choices[second[0]]]


def test_predictions_are_those_of_the_costs(made):
    trade, _ = made(Residual(), torch.randn(4, 4), squares=lambda gm: {})
    fast, exact = trade.cut(0.0), trade.cut(EXACT)
    assert 0 < fast.seconds <= exact.seconds and fast.square == exact.square == 0
    assert math.isclose(fast.seconds, (trade._base + cost_of(trade._time, [*fast.full])) * 1e-12)


def filled(x: Tensor, w: Tensor) -> Tensor:
    """Memory that is FP32 for what is written to it."""
    return (F.linear(x, w) * 2).masked_fill_(x > 0, -3.4e38).relu()


@pytest.mark.parametrize("program", [*map(Random, range(8)), filled], ids=[*map(str, range(8)), "filled"])
def test_seconds_are_those_of_ops_and_casts(made, program):
    """Also of ops that are faster in FP32, and of what is FP32 in any case."""
    inputs = torch.randn(1 if isinstance(program, Random) else 2, 4, 4)
    for seed in range(3):
        trade, _ = made(program, *inputs, seed=seed)
        priced, decided = trade._constraints.priced, trade._constraints.decided
        for outcome in itertools.islice(all_of(trade), 40):
            seconds = cost_of(replace(trade._time, unary={}), [*outcome.full]) * 1e-12
            for node, known in decided.items():
                if node.op.startswith("call") and (known.rule is not Rule.KEEP or node in priced):
                    variable = priced[node][2] if node in priced else known.out
                    full, low = trade.price(node) or (0.0, 0.0)
                    seconds += full if variable is not None and outcome.full[variable] else low
            assert outcome.seconds == pytest.approx(seconds, rel=1e-9)


def test_what_is_left_of_a_budget_is_used(made):
    """Equal branches change sides at one weight: between none and all of them the curve has no corner."""

    def branches(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return torch.stack([F.linear(x, weight).sum() for weight in (a, b, c, d)])

    def squares(gm):
        return {node: 1e-6 for node in gm.graph.nodes if node.name.startswith("linear")}

    trade, _ = made(branches, *torch.randn(5, 4, 4), squares=squares, seed=3)
    context = replace(trade._constraints.context, costs=device(30, 10))
    graph = next(iter(trade.choices)).graph
    trade = TradeOff([graph.owning_module], context, squares(graph.owning_module), {})
    found = cheapest_within(trade, 2.5e-6)
    assert (
        found is not None
        and sum(not found.full[v] for n, v in trade.choices.items() if n.name.startswith("linear")) == 2
    )
    found = most_exact_within(trade, (trade.cut(0.0).seconds + 3 * trade.cut(EXACT).seconds) / 4 * 1.001)
    assert found is not None and found.square == pytest.approx(1e-6)
