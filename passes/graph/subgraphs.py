"""The graphs below a graph: bodies that higher-order ops call (checkpoints, branches, loops), and fused regions."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from fxprec.kernels.rows.program.region_graph import RegionModule
from fxprec.passes.graph.fetched import bodies_in, body_of


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


def bodies_before(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield the bodies below ``gm``, at any depth, each before its caller, and ``gm`` last; no fused regions."""
    for body in _bodies(gm):
        yield from bodies_before(body)
    yield gm


def bodies_behind(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield ``gm`` and the bodies below it, each behind its caller, which may have got it just now."""
    yield gm
    for body in _bodies(gm):
        yield from bodies_behind(body)


def _bodies(gm: GraphModule) -> list[GraphModule]:
    """Return the bodies that ``gm`` itself calls, each once."""
    return [*{id(body): body for body in bodies_in(gm).values()}.values()]
