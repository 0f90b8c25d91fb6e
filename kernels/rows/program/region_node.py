"""What the nodes of a region's graph say of themselves, in ``node.meta``: who makes a region writes it.

``op``: the canonical op, with its ``name``. ``inserted``: whether the node is a cast that the compiler made, which the
kernel need not round to: the value is in a register.
"""

from __future__ import annotations

from torch.fx import Node


def op_name(node: Node) -> str:
    """The canonical op of a node, or torch.fx's opcode of one that calls none."""
    op = node.meta.get("op")
    return op.name if op is not None else node.op


def is_inserted(node: Node) -> bool:
    """Whether the node is a cast that the compiler made."""
    return bool(node.meta.get("inserted"))
