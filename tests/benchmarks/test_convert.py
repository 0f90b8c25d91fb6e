"""``benchmarks.convert``: budgets on given figures, what is left out, and a tiny run of everything but the timing."""

from __future__ import annotations

import gc
import json

import pytest
import torch

import fxprec.programs.packed_weights
from benchmarks import convert
from benchmarks.reports import convert as convert_costs
from benchmarks.reports.convert import (
    ALL,
    GROUPS,
    REGIONS,
    WAYS,
    Budget,
    Mlp,
    Stack,
    budgets,
    exponent,
    pass_times,
    stacks,
)
from fxprec.passes.runner import PIPELINE

QUICK = (("symbolic_trace", "convert"), ("fx, through modules",), ("dynamo", "convert, dynamo"))


@pytest.fixture(autouse=True)
def _imported_by_now() -> None:
    """Each sample is timed after a collection, which need not go through what the tests before it imported."""
    gc.collect()
    gc.freeze()


def stack(nodes: int, trace: float, ours: float, passes: float) -> Stack:
    """One whose trace has half as many nodes."""
    times = {"symbolic_trace": [trace, 9.0], "convert": [9.0, ours]}
    return Stack(1, nodes, times, {"convert": passes}, {"symbolic_trace": nodes // 2})


def times(rest: float, fuse: float, regions: float) -> dict[str, float]:
    return {ALL: rest + fuse, "fuse": fuse, REGIONS: regions}


def test_what_convert_takes_besides_its_passes():
    """The fastest run of three seconds, one of them in passes, on a trace of half a second: four times the trace."""
    assert stack(1000, 0.5, 3.0, 1.0).over_capture("convert") == 4.0
    assert stack(1000, 0.5, 3.0, 1.0).besides_passes("convert") == (2000, 1.2 * 1000)  # ms, each for 1,000 of its nodes
    assert stack(1000, 0.5, 3.0, 1.0).whole("convert") == (3000, 1.2 * 1000 + 600)
    left_out = Stack(1, 1, {"convert": [1.0]}, {"convert": 0.5})
    assert left_out.over_capture("convert") is left_out.besides_passes("convert") is left_out.whole("convert") is None


def test_budgets_are_kept_by_the_worst_figure():
    small, one, two = stack(100, 1.0, 99.0, 0.0), stack(1000, 1.0, 3.5, 1.0), stack(2000, 1.0, 3.0, 1.0)
    kept = budgets([small, one, two], {1000: times(300, 10, 20), 10000: times(200, 301, 20)})
    assert [(each.what.partition(" per")[0], each.met) for each in kept] == [
        ("convert, without its passes,", False),  # 2.5 s for 1,000 nodes, where 1.2 x 2 s are allowed
        ("convert, all of it,", False),  # 0.6 s more are allowed
        ("all passes but fuse,", True),
        ("fuse,", False),
        ("exponent of all with checks over nodes", False),
        ("exponent of regions over nodes", True),
    ]
    assert [each.value for each in kept[:4]] == [2500, 3500, 300, 301]
    share, whole = budgets([stack(1000, 0.1, 0.5, 0.25)], {})
    assert not share.met and whole.met
    assert str(share) == (
        "convert, without its passes, per 1,000 nodes; by symbolic_trace per 1,000 of its nodes: 250 ms, "
        "budget 240 ms: missed"
    )
    assert whole.what.startswith("convert, all of it, per") and (whole.value, whole.limit) == (500, 840)
    [share, _] = budgets([stack(1000, 0.1, 0.5, 0.375)], {})
    assert share.met and share.value == 125
    assert not budgets([], {})


def test_a_limit_is_met_by_what_equals_it():
    assert Budget("", 300.0, 300.0).met and not Budget("", 300.1, 300.0).met


def test_exponents():
    nodes = [1000, 10000, 100000]
    assert exponent(nodes, [n * 2e-6 for n in nodes]) == pytest.approx(1.0)
    assert exponent(nodes, [n**1.5 for n in nodes]) == pytest.approx(1.5)


def test_what_would_take_too_long_is_left_out(monkeypatch):
    """By what the stacks before it took; once left out it stays out."""
    ran: list[tuple[str, int]] = []

    def way(name, cost, power=1):
        def run(model: Mlp, x: torch.Tensor) -> None:
            ran.append((name, len(model.blocks)))
            clock[0] += cost * len(model.blocks) ** power

        return run

    clock = [0.0]
    ways = {"slow": way("slow", 2.0), "quick": way("quick", 0.125), "square": way("square", 0.25, 2)}
    monkeypatch.setattr(convert_costs.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(convert_costs, "WAYS", ways)
    found = stacks([4, 2, 8, 4], limit=10.0, groups=[("slow", "quick"), ("square",)])
    assert [each.blocks for each in found] == [2, 4, 8]
    assert [[*each.seconds] for each in found] == [["slow", "quick", "square"], ["slow", "quick", "square"], ["quick"]]
    assert found[0].seconds["slow"] == [4.0, 4.0, 4.0]  # and not a fourth time: that is more than twelve seconds
    in_turns = [("slow", 2), ("quick", 2)] * 3 + [("quick", 2)] * 2
    assert [each for each in ran if each[1] == 2] == in_turns + [("square", 2)] * 5
    assert ran.count(("quick", 8)) == 5


@pytest.mark.slow
def test_a_tiny_run_of_stacks():
    before = fxprec.programs.packed_weights.run_passes
    [found] = stacks([2], limit=100.0, groups=QUICK)
    assert fxprec.programs.packed_weights.run_passes is before
    assert [*found.seconds] == [way for group in QUICK for way in group]
    assert [*found.passes] == ["convert", "convert, dynamo"]
    assert all(0 < spent < min(found.seconds[way]) for way, spent in found.passes.items())
    assert found.nodes > 2 * 5
    assert found.captured == {"symbolic_trace": 2 * 5 + 2, "fx, through modules": found.nodes, "dynamo": found.nodes}


def test_export_and_compile_take_the_stack():
    x = torch.randn(2, 16)
    convert_costs.WAYS["torch.export"](Mlp(1), x)
    assert {way for group in GROUPS for way in group} == WAYS.keys()
    assert GROUPS[-1] == ("torch.compile",)  # it leaves most behind


def test_passes_and_regions():
    found = pass_times(60)
    assert [*found] == [*(step.__name__ for step in PIPELINE), ALL, REGIONS]
    assert all(each > 0 for each in found.values())


@pytest.mark.slow
def test_derivations():
    pytest.importorskip("triton")
    found = convert_costs.derivations()
    assert {"fused_layer_norm", "fused_bias_gelu"} <= found.keys()
    assert all(row["nodes"] > 1 and row["first_ms"] > 0 for row in found.values())


def test_one_core_is_given_back(monkeypatch):
    threads = [3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with pytest.raises(ZeroDivisionError), convert.one_core():
        assert threads[-1] == 1
        _ = 1 / 0
    assert threads == [3, 1, 3]


def test_tables():
    found = [stack(1000, 1.0, 2.0, 1.0)]
    table = convert.stack_table(found, 60.0)
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["1", "1000", "1.000", "2.000", "1.00", *"------"]
    passes = convert.pass_table({1000: times(100, 5, 7), 10000: times(100, 5, 7)})
    assert [[*column.cells] for column in passes.columns][1] == ["105", "105", "1.00"]


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(convert, "stacks", lambda layers, limit: [stack(1000, 1.0, 9.0, 1.0)])
    derived = {"fused_gelu": {"nodes": 6, "first_ms": 13.0, "again_ms": 2.0}}
    monkeypatch.setattr(convert, "derivations", lambda: derived)
    arguments = ["--layers", "2", "--nodes", "60", "120", "--output", str(tmp_path)]
    assert convert.main(arguments) == 1  # that stack misses the budget
    assert "per 1,000 of its nodes: 8000 ms, budget 2400 ms: missed" in capsys.readouterr().out
    [path] = tmp_path.glob("*/convert.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["stacks"][0]["over_capture"] == {"convert": 8.0}
    assert [*found["passes_ms_per_1000"]] == ["60", "120"]
    assert found["budgets"][0]["met"] is False
    assert found["derivations"] == derived
    assert found["environment"]["threads"] == torch.get_num_threads()  # not the one core of the timing
