"""Reads a region's graph: the notes that the fusion pass wrote at its nodes, and a key that equal computations share.

The notes are in ``node.meta``. ``op``: the canonical op, with its ``name``. ``inserted``: the node is a cast that the
compiler made, to which a kernel need not round: the value is in a register.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg


class RegionModule(nn.Module):
    """Module that stands for a group of nodes of a rewritten graph: passes see its graph, ``FusedRegion`` runs it.

    Attributes:
        graph_module: the nodes, as they were in the graph; returns a tuple.
    """

    graph_module: GraphModule


def op_name(node: Node) -> str:
    """Return the name of a node's canonical op, or its torch.fx opcode where it calls no op."""
    op = node.meta.get("op")
    return op.name if op is not None else node.op


def is_inserted(node: Node) -> bool:
    """Return whether the node is a cast that the compiler made."""
    return bool(node.meta.get("inserted"))


def structure_of(gm: GraphModule) -> str:
    """Return the graph's calls with numbers for nodes: equal for graphs that are the same but for names.

    Shapes and dtypes are not in it: ``derive`` keeps programs by these, for each such text.
    """
    # Kept with the graph, which does not change once it is a region: every plan of every copy asks.
    known = gm.meta.get("structure")
    if known is None:
        known = gm.meta["structure"] = "\n".join(_lines(gm))
    return known


def _lines(gm: GraphModule) -> list[str]:
    numbers: dict[Node, str] = {}
    lines = []
    for node in gm.graph.nodes:
        numbers[node] = f"%{len(numbers)}"

        # Names of nodes differ between equal layers, numbers do not.
        def number(argument: Node) -> Any:
            return _Name(numbers[argument])

        args, kwargs = map_arg((node.args, node.kwargs), number)
        op = op_name(node)
        inserted = " inserted" if is_inserted(node) else ""
        lines.append(f"{op}{inserted} {args!r} {sorted(kwargs.items(), key=lambda item: item[0])!r}")
    return lines


class _Name(str):
    """Text that stands in a list's repr as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
