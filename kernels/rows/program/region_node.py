"""Reads the notes in ``node.meta`` of a region's graph, which the fusion pass writes.

``op``: the canonical op, with its ``name``. ``inserted``: the node is a cast that the compiler made, to which a kernel
need not round: the value is in a register.
"""

from __future__ import annotations

from torch.fx import Node


def op_name(node: Node) -> str:
    """Return the name of a node's canonical op, or its torch.fx opcode where it calls no op."""
    op = node.meta.get("op")
    return op.name if op is not None else node.op


def is_inserted(node: Node) -> bool:
    """Return whether the node is a cast that the compiler made."""
    return bool(node.meta.get("inserted"))
