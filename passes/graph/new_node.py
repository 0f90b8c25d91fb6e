"""Make a node, and give it arguments, without what torch.fx does besides."""

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
    """Do as ``graph.create_node``; the arguments are assigned afterwards.

    torch 2.13 walks through those that it is given, to warn of SymInts: a third of the time.
    """
    node = graph.create_node(op, target, (), {}, name, type_expr)
    set_arguments(node, args, kwargs)
    return node


def set_arguments(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Assign a node's arguments. It cannot take all of a kind away: an empty ``args`` or ``kwargs`` is not written.

    ``Node.__setattr__`` takes the node out of the graph's tables by op and target and puts it back, though neither
    changes. This goes past it, to the setters of the properties ``args`` and ``kwargs``, which update ``users``
    (``tests/passes/graph/test_new_node.py`` holds that).
    """
    if args:
        object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", kwargs)
