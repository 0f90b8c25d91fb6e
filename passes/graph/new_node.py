"""Make a node without the search of its arguments that ``Graph.create_node`` makes since torch 2.13."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node


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

    torch 2.13 walks through those that it is given, to warn of SymInts: a third of the time. They are assigned past
    ``Node.__setattr__``, which takes the node out of the tables by op and target and puts it back: neither changes.
    """
    node = graph.create_node(op, target, (), {}, name, type_expr)
    if args:
        object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", kwargs)
    return node
