"""What another rule would cost: the casts and bytes that a conversion with that rule has more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.inspection.prices import Prices
from fxprec.inspection.report import NodeRow
from fxprec.model.conversion import conversion_of
from fxprec.numerics import audit
from fxprec.passes.graph.annotations import notes
from fxprec.passes.graph.casts import CASTS
from made_costs import device

#: Products take 30 us in FP32 and 10 low, each of three; a cast 1 us, forward and backward; all else 2 and 1.
COSTS = device(30, 10, cast=1, pointwise=(2, 1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        h = x + self.second(h)
        return self.norm(h).softmax(-1)


def converted(**nodes: torch.dtype) -> nn.Module:
    policy = fxprec.Policy.preset("O1").override(nodes=nodes)
    return fxprec.convert(Net(), (torch.randn(4, 8),), dtype=torch.bfloat16, policy=policy)[0]


def casts_and_bytes(model: nn.Module) -> tuple[int, int]:
    """Casts of values in a forward, and the bytes that floats are read and written with, views apart."""
    casts = moved = 0
    for node in fxprec.graph_module(model).graph.nodes:
        if node.target in CASTS and node.all_input_nodes[0].op != "get_attr":
            casts += 1
        if node.op.startswith("call") and not of_weight(node):
            values = (*dict.fromkeys(node.all_input_nodes), node)
            moved += sum(notes(each).numel * notes(each).precision.output.itemsize for each in values)
    return casts, moved


def rows(model: nn.Module) -> dict[str, NodeRow]:
    return {row.node: row for graph in fxprec.report(model).graphs for row in graph.rows if row.kind == "op"}


def of_weight(node: torch.fx.Node) -> bool:
    return node.target in CASTS and node.all_input_nodes[0].op == "get_attr"


@pytest.mark.parametrize("name", ["linear", "gelu", "linear_1", "add", "softmax"])
def test_what_the_other_rule_would_cost(name: str) -> None:
    model = converted()
    alternatives = Prices(conversion_of(model).settings, gradients=True)
    (node,) = (node for node in fxprec.graph_module(model).graph.nodes if node.name == name)
    found = alternatives.other(node)
    assert found is not None and found.precision != str(notes(node).precision.compute).removeprefix("torch.")
    dtype = getattr(torch, found.precision)
    others = {each: getattr(torch, row.compute) for each, row in rows(model).items() if each != "softmax"}
    before, after = casts_and_bytes(model), casts_and_bytes(other := converted(**others | {name: dtype}))
    changed = [each for each, row in rows(other).items() if row.compute != rows(model)[each].compute]
    assert changed == [name], "all others stay"
    assert (found.casts, found.bytes) == (after[0] - before[0], after[1] - before[1])


def test_time_is_that_of_the_costs() -> None:
    model = fxprec.convert(Net(), (torch.randn(4, 8),), dtype=torch.bfloat16)[0]
    settings = dataclasses.replace(conversion_of(model).settings, lower=COSTS)
    graph = fxprec.graph_module(model).graph
    nodes = {node.name: node for node in graph.nodes}
    found = Prices(settings, gradients=True).other(nodes["linear_1"])
    assert found is not None and found.casts == 1  # of what the gelu makes: the sum reads any dtype
    # Two products each way less or more: forward, and backward to input and weight. A shadow is a cast of its gradient
    # and a part of the refresh, and the cast of a value has its backward.
    assert found.seconds == pytest.approx(3 * 20e-6 + 2e-6 - 2 * 1e-6, abs=2.5e-6)
    alone = Prices(settings, gradients=False).other(nodes["linear_1"])
    assert alone is not None and alone.seconds == pytest.approx(20e-6 + 1e-6, abs=1e-9)


def test_what_has_no_other() -> None:
    model = fxprec.convert(Net(), (torch.randn(4, 8),), dtype=torch.bfloat16)[0]
    alternatives = Prices(conversion_of(model).settings, gradients=True)
    none = [node.name for node in fxprec.graph_module(model).graph.nodes if alternatives.other(node) is None]
    assert {"x", "first_weight", "first_weight_bf16", "x_bf16", "output"} <= set(none) and "linear" not in none


SAME = ("linear", "gelu", "linear_1")


@pytest.mark.parametrize("settings", [{}, {"capture": "dynamo"}, {"fuse": "aten"}, {"level": "O2"}])
def test_an_audit_knows_the_sizes_of_its_run(settings: Any) -> None:
    """Also of a model that was converted without inputs; and nothing of that is left on its graphs."""
    x = torch.randn(4, 8)
    others: list[dict[str, Any]] = []
    for known in ((x,), None):
        model = fxprec.convert(Net(), known, dtype=torch.bfloat16, **settings)[0]
        model(x)
        before = [[dict(node.meta) for node in gm.graph.nodes] for gm in fxprec.graphs(model)]
        ledger = audit(model, [(x, x)], F.mse_loss)
        assert [[dict(node.meta) for node in gm.graph.nodes] for gm in fxprec.graphs(model)] == before
        others.append({row.node: row.other for row in ledger.rows if row.other is not None})
        assert all(None not in (each.bytes, each.seconds) for each in others[-1].values())
    first, second = others
    if not settings:  # of others casts lie elsewhere where sizes are known at first
        assert len(first) == len(second) == 6 and [first[n] for n in SAME] == [second[n] for n in SAME]
        nodes = {node.name: node for node in fxprec.graph_module(converted()).graph.nodes}
        alternatives = Prices(conversion_of(converted()).settings, gradients=True)
        for name in ("linear", "gelu", "linear_1", "add", "softmax"):
            assert first[name] == alternatives.other(nodes[name])


def test_sizes_that_nobody_knows() -> None:
    model = fxprec.convert(Net(), dtype=torch.bfloat16)[0]
    (node,) = (node for node in fxprec.graph_module(model).graph.nodes if node.name == "linear_1")
    found = Prices(conversion_of(model).settings, gradients=True).other(node)
    assert found is not None and (found.casts, found.bytes, found.seconds) == (1, None, None)
    assert str(found) == "float32: +1 casts"
