"""Writes a region's graph as text without the nodes' names: a key that regions of equal computation share."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxprec.kernels.rows.program.region_node import is_inserted, op_name


def structure_of(gm: GraphModule) -> str:
    """Return a text that is equal for graphs that compute the same from their inputs."""
    known = gm.meta.get("structure")
    if known is None:
        known = gm.meta["structure"] = "\n".join(_lines(gm))
    return known


def _lines(gm: GraphModule) -> list[str]:
    numbers: dict[Node, str] = {}
    lines = []
    for node in gm.graph.nodes:
        numbers[node] = f"%{len(numbers)}"

        def number(argument: Node) -> Any:
            return _Name(numbers[argument])

        args, kwargs = map_arg((node.args, node.kwargs), number)
        op = op_name(node)
        inserted = " inserted" if is_inserted(node) else ""
        lines.append(f"{op}{inserted} {args!r} {sorted(kwargs.items(), key=lambda item: item[0])!r}")
    return lines


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
