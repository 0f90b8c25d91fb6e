"""Finds what get_attr nodes fetch, and the graphs below a graph.

A get_attr node fetches a parameter, a buffer, or the body that a higher-order op calls (checkpoint, branch, loop).
Below a graph are these bodies, and the graphs of its fused regions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch.fx import GraphModule, Node

from fxprec.kernels.rows.program.region_graph import RegionModule


def attribute_of(node: Node) -> Any:
    """Return what a get_attr node fetches; None where its graph has no module, or the module no such attribute."""
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def attributes_in(gm: GraphModule) -> dict[Node, Any]:
    """Map every get_attr node to what it fetches, as ``attribute_of`` says."""
    return {node: attribute_of(node) for node in gm.graph.find_nodes(op="get_attr")}


def bodies_in(gm: GraphModule) -> dict[Node, GraphModule]:
    """Map each get_attr node that fetches a body for a higher-order op to that body, in the order of the graph."""
    if not any(isinstance(child, GraphModule) for child in gm.children()):
        return {}  # most graphs have none, and thousands of weights to look through
    found = ((node, body_of(node)) for node in gm.graph.find_nodes(op="get_attr"))
    return {node: body for node, body in found if body is not None}


def body_of(node: Node) -> GraphModule | None:
    """Return the body that a node fetches for a higher-order op, from the module of its own graph; None: it is none."""
    value = attribute_of(node) if node.op == "get_attr" and "." not in str(node.target) else None
    return value if isinstance(value, GraphModule) else None


def subgraphs(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield the graphs that ``gm`` itself calls, each once, in the order of the calls."""
    found = bodies_in(gm)
    for node in gm.graph.find_nodes(op="call_module"):
        if (region := subgraph_of(gm, node)) is not None:
            found[node] = region
    yield from {id(found[node]): found[node] for node in sorted(found)}.values()


def subgraph_of(gm: GraphModule, node: Node) -> GraphModule | None:
    """Return the graph that a node of ``gm`` stands for: a body that it fetches, or the fused region that it calls."""
    if node.op != "call_module":
        return body_of(node)
    called = gm.get_submodule(str(node.target))
    return called.graph_module if isinstance(called, RegionModule) else None


def every_graph(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield ``gm`` and the graphs below it, at any depth, callers first."""
    yield gm
    for sub in subgraphs(gm):
        yield from every_graph(sub)


def bodies_before(gm: GraphModule) -> list[GraphModule]:
    """Return the bodies below ``gm``, at any depth, each before its caller, and ``gm`` last; no fused regions."""
    return [*chain.from_iterable(map(bodies_before, _bodies(gm))), gm]


def bodies_behind(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield ``gm`` and the bodies below it, each behind its caller: also one that a pass has just made there."""
    yield gm
    for body in _bodies(gm):
        yield from bodies_behind(body)


def _bodies(gm: GraphModule) -> list[GraphModule]:
    """Return the bodies that ``gm`` itself calls, each once."""
    return [*{id(body): body for body in bodies_in(gm).values()}.values()]
