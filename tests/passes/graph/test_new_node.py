"""``new_node`` makes what ``Graph.create_node`` makes."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxprec.passes.graph.new_node import new_node


def made(create):
    """A graph of a placeholder and one more node, by ``create``; and that node."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    return x, create(graph, x)


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        (lambda x: (x, 2), lambda x: {}, None),
        (lambda x: ([x, (x, slice(x, None))],), lambda x: {"dim": 1}, "joined"),
        (lambda x: (), lambda x: {"input": x, "out": {"a": x}}, "x"),
        (lambda x: (), lambda x: {}, None),
    ],
)
def test_it_is_what_create_node_makes(args, kwargs, name):
    plain, expected = made(
        lambda graph, x: graph.create_node("call_function", torch.add, args(x), kwargs(x), name, int)
    )
    x, node = made(lambda graph, x: new_node(graph, "call_function", torch.add, args(x), kwargs(x), name, int))
    assert (node.op, node.target, node.name, node.type) == ("call_function", torch.add, expected.name, int)
    assert str((node.args, node.kwargs)) == str((expected.args, expected.kwargs))
    assert (type(node.args), type(node.kwargs)) == (type(expected.args), type(expected.kwargs))
    assert [*x.users] == ([node] if plain.users else []) and node.all_input_nodes == ([x] if plain.users else [])
    assert node.graph.find_nodes(op="call_function", target=torch.add) == [node]
    node.graph.lint()
