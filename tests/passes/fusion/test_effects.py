"""Effects: what must keep its order, and sorting a graph by it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx import symbolic_trace

from fxprec.errors import InvariantError
from fxprec.passes.fusion.effects import memory_of, order_of_effects, segments, sort

X = torch.randn(4, 4)


def traced(tools, function, *inputs):
    return tools.rewritten(tools.traced(function, *inputs), tools.context(), until="fold_casts")


def order(gm) -> dict[str, list[str]]:
    return {node.name: [each.name for each in earlier] for node, earlier in order_of_effects(gm.graph).items()}


def test_writes_and_reads_of_one_memory(tools):
    def f(x, b):
        view = b.view(-1)
        b.add_(1)
        after = b * 2
        return view + after.view(-1)

    found = order(traced(tools, f, X, X.clone()))
    assert found["add_"] == ["view"] and found["mul"] == ["add_"]
    assert "add" in found  # it reads a view of what was written


def test_random_numbers_and_unknown_calls(tools):
    def f(x):
        a = torch.rand_like(x)
        b = F.scaled_dot_product_attention(x, x, a)
        return F.dropout(x, 0.5) + torch.bernoulli(b)

    found = order(traced(tools, f, X))
    assert found["scaled_dot_product_attention"] == ["rand_like"]
    assert found["bernoulli"] == ["scaled_dot_product_attention"]
    assert "dropout" not in found  # draws a seed of its own


def test_pure_nodes_have_no_order(tools):
    assert order(traced(tools, lambda x: F.linear(x.relu(), x).exp(), X)) == {}


def test_arguments_may_share_memory_where_one_is_written(tools):
    def f(x, y, z):
        return x.add_(1) + y

    gm = traced(tools, f, X, X, X)
    x, y, z = gm.graph.find_nodes(op="placeholder")
    roots, written = memory_of(gm.graph)
    assert roots[x] is roots[y] is roots[z] and written == {roots[x]}
    gm = traced(tools, lambda x, y: (x * 1).add_(1) + y, X, X)
    roots, written = memory_of(gm.graph)
    assert len({roots[node] for node in gm.graph.find_nodes(op="placeholder")}) == 2
    assert [node.name for node in written] == ["mul"]


def test_stretches_end_at_calls_that_nobody_knows(tools):
    gm = tools.traced(lambda x: x.relu() + 1, X)
    add = next(node for node in gm.graph.nodes if node.name == "add")
    with gm.graph.inserting_before(add):
        gm.graph.call_function(torch._C._set_grad_enabled, (False,))
    tools.rewritten(gm, tools.context(), until="canonicalize")
    found = {node.name: number for node, number in segments(gm.graph).items()}
    assert found == {"x": 0, "relu": 0, "_set_grad_enabled": 1, "add": 1, "output": 1}


def test_sort_by_position_where_nothing_else_is_said():
    gm = symbolic_trace(lambda x: (x.relu() + 1, x.tanh()))
    nodes = list(gm.graph.nodes)
    before = [node.name for node in nodes]
    sort(gm.graph, {}, {node: number for number, node in enumerate(nodes)})
    assert [node.name for node in gm.graph.nodes] == before
    x, relu, add, tanh, output = nodes
    sort(gm.graph, {relu: [tanh]}, {node: number for number, node in enumerate(nodes)})
    assert list(gm.graph.nodes) == [x, tanh, relu, add, output]
    gm.graph.lint()


def test_sort_moves_what_waits_and_nothing_else():
    gm = symbolic_trace(lambda x: (x.relu(), x.tanh(), x.sin()))
    x, relu, tanh, sin, output = gm.graph.nodes
    sort(gm.graph, {}, {x: 0, relu: 3, tanh: 1, sin: 2, output: 4})
    assert list(gm.graph.nodes) == [x, tanh, sin, relu, output]


def test_a_cycle_is_a_bug_that_says_so():
    gm = symbolic_trace(lambda x: x.relu().tanh())
    _, relu, tanh, _ = gm.graph.nodes
    with pytest.raises(InvariantError, match="wait for each other"):
        sort(gm.graph, {relu: [tanh]}, {})
