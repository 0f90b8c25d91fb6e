"""Bytes of hand-made graphs: views, in-place ops and weights do not count as activations, casts count as cost."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from fxprec.inspection.figures import Activations, activations, weights
from fxprec.inspection.nodes import places
from fxprec.passes.graph.annotations import NON_TENSOR, UNKNOWN, Op, Precision, Rule
from fxprec.passes.graph.casts import cast

LOW, FP32 = torch.bfloat16, torch.float32


def annotated(node, op, output, numel, dtype: object = FP32, **meta):
    node.meta = {"op": Op(*op.split("!")), "numel": numel, "dtype": dtype, **meta}
    node.meta["precision"] = Precision.arriving(output, output, Rule.FOLLOW, "")
    return node


def test_each_value_counts_once():
    graph = Graph()
    x = graph.placeholder("x")
    x.meta = {"dtype": FP32, "numel": 100}
    low = annotated(graph.call_function(cast, (x, LOW)), "to", LOW, 100, inserted=True)
    relu = annotated(graph.call_function(torch.relu, (low,)), "relu", LOW, 100)
    view = annotated(graph.call_method("view", (relu, -1)), "view", LOW, 100)
    add = annotated(graph.call_method("add_", (view, 1.0)), "add!True", LOW, 100)
    top = annotated(graph.call_method("max", (add, -1)), "max", LOW, (10, 10), (FP32, torch.int64))
    annotated(graph.call_function(torch.sin, (top,)), "sin", LOW, None)
    annotated(graph.call_method("double", (top,)), "sin", None, 7, torch.float64)
    annotated(graph.call_method("tell", (top,)), "sin", None, (3, None), (UNKNOWN, NON_TENSOR))
    assert activations(graph.nodes) == Activations(
        original=4 * (100 + 10 + 3), rewritten=2 * (100 + 100 + 10) + 4 * 3, casts=200, values=4, unknown=1
    )


def test_the_text_is_honest_about_costs():
    assert "saves 1 kB" in str(Activations(original=2000, rewritten=1000, values=1))
    assert "costs 500 B" in str(Activations(original=2000, rewritten=2500, casts=2500, values=1))
    assert "3 values of unknown shape" in str(Activations(2, 1, 0, 1, 3))
    assert "example_inputs" in str(Activations(unknown=3))


def test_a_tied_weight_has_one_shadow():
    root = nn.Module()
    root.a = nn.Linear(4, 4, bias=False)
    root.b = nn.Linear(4, 4, bias=False)
    root.b.weight = root.a.weight
    graph = Graph()
    for name in ("a.weight", "b.weight"):
        source = graph.get_attr(name)
        source.meta["kind"] = "parameter"
        annotated(graph.call_function(cast, (source, LOW)), "to", LOW, 16, inserted=True)
    gm = GraphModule(root, graph)
    assert activations(gm.graph.nodes) == Activations()
    found = weights(root, (gm,), list(places(0, gm)))
    assert (found.parameters, found.shadows, found.shadow_bytes) == ({"float32": 64}, 1, 32)
    root.a.weight.data = root.a.weight.data.bfloat16()
    frozen = weights(root, (gm,), list(places(0, gm)))
    assert (frozen.parameters, frozen.shadows) == ({"bfloat16": 32}, 0)
