"""What a get_attr node fetches: a parameter, a buffer, or the body that a higher-order op calls."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node


def attribute_of(node: Node) -> Any:
    """What a get_attr node fetches; None where its graph has no module, or the module no such attribute."""
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def body_of(node: Node) -> GraphModule | None:
    """The body that a node fetches for a higher-order op, from the module of its own graph; None: it is none."""
    value = attribute_of(node) if node.op == "get_attr" and "." not in str(node.target) else None
    return value if isinstance(value, GraphModule) else None
