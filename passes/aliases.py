"""Which nodes may share memory, and who writes to it. A cast counts as sharing: it gives a tensor that already fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from torch.fx import Graph, Node

from fxprec.passes.ir import Op, arg_nodes
from fxprec.passes.op_table import rule_of
from fxprec.passes.torch_internals import OpOverload, schema_of

__all__ = ["alias_roots", "written_by", "written_roots"]

#: In training they move their running statistics.
_MOVE_STATISTICS: Final = frozenset({"batch_norm", "instance_norm"})


def alias_roots(graph: Graph) -> dict[Node, Node]:
    """Node -> the node that made the memory which it may share, through views and in-place writes; else itself."""
    roots: dict[Node, Node] = {}
    for node in graph.nodes:
        base = node.args[0] if _shares(node) else node
        roots[node] = roots.get(base, base) if isinstance(base, Node) else node
    return roots


def written_by(node: Node) -> Iterator[Node]:
    """The arguments that a call writes to, as far as its name or schema tells."""
    op: Op | None = node.meta.get("op")
    if op is None:
        return
    if op.in_place:
        yield from (source for port, source in arg_nodes(node) if port == 0)
    elif op.name in _MOVE_STATISTICS:
        yield from (source for port, source in arg_nodes(node) if port not in (0, "input"))
    elif isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
        written = {
            key
            for position, argument in enumerate(schema_of(node.target).arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for key in (position, argument.name)
        }
        yield from (source for port, source in arg_nodes(node) if port in written)


def written_roots(graph: Graph, roots: Mapping[Node, Node]) -> set[Node]:
    """The roots of memory that somebody writes to."""
    return {roots[target] for node in graph.nodes for target in written_by(node)}


def _shares(node: Node) -> bool:
    op: Op | None = node.meta.get("op")
    if op is None or not node.args:
        return False
    row = rule_of(op.name)
    return op.in_place or (row is not None and row.view)
