"""Make a node without the search of its arguments that ``Graph.create_node`` makes since torch 2.13."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

__all__ = ["new_node"]


def new_node(
    graph: Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str | None = None,
    type_expr: Any = None,
) -> Node:
    """``graph.create_node``; the arguments are assigned afterwards.

    torch 2.13 walks through those that it is given, to warn of SymInts: a third of the time. Assigning them takes a
    quarter of that, and so do older versions lose that quarter.
    """
    node = graph.create_node(op, target, (), {}, name, type_expr)
    if args:
        node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node
