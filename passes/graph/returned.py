"""What a graph returns, whatever container or object holds it."""

from __future__ import annotations

from torch.fx import Graph, Node

from fxprec.passes.graph.casts import cast_if_float
from fxprec.passes.graph.grad_mode import grad_mode_at_nodes


def returned_values(graph: Graph) -> list[Node]:
    """Return what the graph returns, each once: of an object that it makes last (a named tuple), what it is made of."""
    found = dict.fromkeys(graph.output_node().all_input_nodes)
    for node in list(found):
        made = node.args[0] if node.target is cast_if_float else node
        if isinstance(made, Node) and made.op == "call_function" and isinstance(made.target, type):
            found.update(dict.fromkeys(made.all_input_nodes))
    return list(found)


def returned_with_gradient(graph: Graph, at_first: bool) -> set[Node]:
    """Return what the graph returns where autograd records. ``at_first``: whether it does where the graph is called."""
    recorded = grad_mode_at_nodes(graph, at_first)
    return {node for node in returned_values(graph) if recorded[node]}
