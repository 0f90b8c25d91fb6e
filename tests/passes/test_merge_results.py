"""merge_results: one node for each of several results, and as many as there are for parts of a tensor."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule, symbolic_trace

from fxprec.passes.canonicalize import canonicalize
from fxprec.passes.merge_results import merge_results
from fxprec.passes.propagate import propagate


def accesses(gm: GraphModule, tools) -> int:
    """The number of accesses that are left, in a graph that computes what it did."""
    context, x = tools.context(), torch.randn(4, 6)
    before = gm(x)
    canonicalize(gm, context)
    propagate(gm, context)
    merge_results(gm, context)
    assert not merge_results(gm, context).changed
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(x), before)
    return sum(node.target in (operator.getitem, getattr) for node in gm.graph.nodes)


@pytest.mark.parametrize(("function", "left"), [
    (lambda t: (t[0], t.values, t[-2], t[0]), 1),
    (lambda t: (t[0], t.indices, t[1]), 2),
    (lambda t: t[0][0] + t[0][0], 3),  # the second is a part of a tensor, and a new one each time
])  # fmt: skip
def test_of_results_by_position_and_name(function, left, tools):
    assert accesses(symbolic_trace(lambda x: function(x.float().topk(2))), tools) == left
    assert accesses(symbolic_trace(lambda x: function(x.float().max(-1))), tools) == left


@pytest.mark.parametrize(("function", "left"), [
    (lambda t: (t[0], t[1], t[0]), 2),
    (lambda t: (t[1], t[-1]), 2),  # nobody knows how many there are
    (lambda t: (t[:1][0], t[:1][0]), 4),  # each slice is a tuple of its own
])  # fmt: skip
def test_of_lists(function, left, tools):
    assert accesses(symbolic_trace(lambda x: function(x.float().chunk(2))), tools) == left


def test_of_a_tensor_each_is_a_new_one(tools):
    assert accesses(symbolic_trace(lambda x: (x.float()[0], x.float().T)), tools) == 2
    assert accesses(symbolic_trace(lambda x: (lambda h: (h[0], h[0], h.T, h.T))(x.float())), tools) == 4


def test_a_list_that_is_written_to_keeps_them(tools):
    graph = Graph()
    x = graph.placeholder("x")
    results = graph.call_function(torch.ops.aten.unbind.int, (x,))
    before = graph.call_function(operator.getitem, (results, 0))
    graph.call_function(operator.setitem, (results, 0, x))
    graph.output((before, graph.call_function(operator.getitem, (results, 0))))
    assert accesses(GraphModule({}, graph), tools) == 2
