"""What a get_attr node fetches: a parameter, a buffer, or the body that a higher-order op calls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from torch.fx import GraphModule, Node


def attribute_of(node: Node) -> Any:
    """Return what a get_attr node fetches; None where its graph has no module, or the module no such attribute."""
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def attributes_in(gm: GraphModule) -> Iterator[tuple[Node, Any]]:
    """Yield every get_attr node with what it fetches, as ``attribute_of`` says: weights of one module by one look."""
    owners: dict[str, Any] = {"": gm}
    for node in gm.graph.find_nodes(op="get_attr"):
        path, _, name = str(node.target).rpartition(".")
        if path not in owners:
            owners[path] = reduce(lambda owner, part: getattr(owner, part, None), path.split("."), gm)
        yield node, getattr(owners[path], name, None)


def bodies_in(gm: GraphModule) -> dict[Node, GraphModule]:
    """Map each get_attr node that fetches a body for a higher-order op to that body, in the order of the graph."""
    if not any(isinstance(child, GraphModule) for child in gm.children()):
        return {}  # most graphs have none, and thousands of weights to look through
    found = ((node, body_of(node)) for node in gm.graph.find_nodes(op="get_attr"))
    return {node: body for node, body in found if body is not None}


def body_of(node: Node) -> GraphModule | None:
    """The body that a node fetches for a higher-order op, from the module of its own graph; None: it is none."""
    value = attribute_of(node) if node.op == "get_attr" and "." not in str(node.target) else None
    return value if isinstance(value, GraphModule) else None
