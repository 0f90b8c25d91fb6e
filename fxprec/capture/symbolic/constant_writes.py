"""Find a constant that a traced graph would change or give away: the next call would not get it afresh."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Graph, Node

from fxprec.passes.graph.annotations import notes
from fxprec.passes.ops.names import canonical_op
from fxprec.passes.ops.table import rule_of


def spoiled_constant(graph: Graph, made: Collection[str]) -> Node | None:
    """The first node that writes a constant in place, or the output if it returns one.

    Args:
        graph: a traced graph, get_attr nodes with ``meta["kind"]``.
        made: targets of the tensors that were made while tracing: the original makes a new one at each call.
    """
    constants: set[Node] = set()
    fresh: set[Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            if notes(node).kind == "constant":
                constants.add(node)
                if node.target in made:
                    fresh.add(node)
            continue
        if node.op == "output":
            return node if fresh.intersection(node.all_input_nodes) else None
        first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        out = node.kwargs.get("out")
        if first in constants:
            op = canonical_op(node)
            if (op is not None and op.in_place) or node.kwargs.get("inplace"):
                return node
            rule = rule_of(op.name) if op is not None else None
            if rule is None or rule.view:
                constants.add(node)
                if first in fresh:
                    fresh.add(node)
        if isinstance(out, Node) and out in constants:
            return node
    return None
