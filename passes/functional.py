"""In-place row operations on memory that nobody else sees, as ordinary ones: so they can join a region.

Before, and after::

    %conv = conv2d(%x, %w)                 %conv = conv2d(%x, %w)
    %relu = relu_(%conv)                   %relu = relu(%conv)
    %add = add(%conv, 1)                   %add = add(%relu, 1)          # reads what was written

Only where the memory was made in this graph, by an op that gives fresh memory, and no view of it exists: then there is
no way to see the difference.
"""

from __future__ import annotations

import operator
from typing import Final

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from fxprec.kernels.rows.lowering import LOWERINGS
from fxprec.passes.aliases import alias_roots
from fxprec.passes.ir import Op
from fxprec.passes.op_table import rule_of

__all__ = ["make_functional"]

_OPERATORS: Final = {
    operator.iadd: torch.add, operator.isub: torch.sub, operator.imul: torch.mul, operator.itruediv: torch.div,
}  # fmt: skip


def make_functional(graph: Graph) -> bool:
    """Rewrite what can be; says whether anything was."""
    roots = alias_roots(graph)
    members: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        members.setdefault(roots[node], []).append(node)
    changed = False
    position = {node: number for number, node in enumerate(graph.nodes)}
    for root, nodes in members.items():
        writes = [node for node in nodes if node is not root]
        if not writes or not _fresh(root) or not all(_can_change(node) for node in writes):
            continue
        current = root
        for node in writes:
            _rewrite(node, current)
            for user in [*current.users]:
                if user is not node and position[user] > position[node]:
                    user.replace_input_with(current, node)
            current = node
        changed = True
    return changed


def _fresh(root: Node) -> bool:
    """Whether the node made the memory itself: an op that we know, and no view or tuple of views."""
    op: Op | None = root.meta.get("op")
    row = rule_of(op.name) if op is not None else None
    return row is not None and op is not None and not row.view and not op.in_place and op.name not in ("to", "getitem")


def _can_change(node: Node) -> bool:
    """Whether it is an in-place row operation whose result has the dtype of what it writes to, and how to say so."""
    op: Op | None = node.meta.get("op")
    if op is None or not op.in_place or op.name not in LOWERINGS:
        return False
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or node.meta["precision"].output is not source.meta["precision"].output:
        return False
    others = [a for a in node.all_input_nodes if a is not source]
    if any(other.meta["precision"].output is not source.meta["precision"].output for other in others):
        return False  # out of place it would promote
    return _functional_target(node) is not None


def _functional_target(node: Node) -> object:
    if node.kwargs.get("inplace") is True:
        return node.target
    if node.op == "call_method":
        name = str(node.target)
        return name[:-1] if name.endswith("_") and not name.endswith("__") else None
    if node.target in _OPERATORS:
        return _OPERATORS[node.target]  # type: ignore[index]
    name = getattr(node.target, "__name__", "")
    for home in (torch, F):
        if name.endswith("_") and getattr(home, name, None) is node.target:
            return getattr(home, name[:-1], None)
    return None


def _rewrite(node: Node, source: Node) -> None:
    node.target = _functional_target(node)  # type: ignore[assignment]
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
    node.update_arg(0, source)
    node.meta["op"] = node.meta["op"]._replace(in_place=False)
