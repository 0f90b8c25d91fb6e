"""formats: what takes over channels_last from a convolution, and which writes a copy would hide."""

from __future__ import annotations

import pytest
from torch.fx import Graph

from fxprec.passes.ops.formats import first_lost_write, values_in_channels_last
from graph_text import graph_of

CONV = """
    %w: bfloat16 = placeholder
    %x: bfloat16 = placeholder
    %y: bfloat16 = conv2d(%x, %w, None, 1, 1)
"""


def inside(graph: Graph, through_views: bool = False) -> list[str]:
    convolutions = {node for node in graph.nodes if node.name == "y"}
    return [node.name for node in graph.nodes if node in values_in_channels_last(graph, convolutions, through_views)]


def test_what_takes_over_the_order():
    graph = graph_of(
        CONV
        + """
    %relu: bfloat16 = relu(%y)
    %half: bfloat16 = select(%relu, 0, 0)
    %again: bfloat16 = relu(%half)
    %dim: nothing = dim(%relu)
    %drop: bfloat16 = dropout(%relu, 0.5, True)
    %sum: bfloat16 = add(%x, %x)
    return (%again, %dim, %drop, %sum)"""
    ).graph
    assert inside(graph) == ["y", "relu"]
    assert inside(graph, through_views=True) == ["y", "relu", "again"], "behind a view, which is none itself"


@pytest.mark.parametrize(
    ("text", "writer"),
    [
        ("%v: bfloat16 = view(%y, 4)\n %m: bfloat16 = mul_(%v, 2)\n return %y", "m"),
        ("%v: bfloat16 = view(%y, 4)\n %m: bfloat16 = mul_(%y, 2)\n return %v", "m"),
        ("%v: bfloat16 = flatten(%y, 1)\n %m: bfloat16 = mul_(%v, 2)\n return %y", "m"),
        ("%m: bfloat16 = mul_(%y, 2)\n %v: bfloat16 = view(%y, 4)\n return %v", None),
        ("%m: bfloat16 = relu_(%y)\n %v: bfloat16 = relu(%m)\n return %v", None),
        ("%m: bfloat16 = add_(%x, %y)\n return (%x, %m)", "m"),
        ("%m: bfloat16 = mul_(%x, 2)\n return %y", None),
        ("%b: bfloat16 = batch_norm(%y, %w, %w, None, None, True)\n return %b", None),
        ("%r: bfloat16 = relu(%y)\n %v: bfloat16 = view(%r, 4)\n %m: bfloat16 = mul_(%v, 2)\n return %r", "m"),
    ],
)
def test_writes_that_a_copy_would_hide(text, writer):
    graph = graph_of(CONV + "\n".join(f"    {line.strip()}" for line in text.splitlines())).graph
    convolutions = {node for node in graph.nodes if node.name == "y"}
    found = first_lost_write(graph, values_in_channels_last(graph, convolutions))
    assert (found and found.name) == writer
