"""Products that sum over a single value, where the sizes are known: they are elementwise, however they are written.

Each element of the result is one product of two values. Matrix units gain nothing there, and low operands would be
rounded for nothing (positions times frequencies: 301 is 300 in bfloat16). So such an op is PROMOTE as ``mul`` is::

    %a = matmul(%column, %row)           # (n, 1) @ (1, m), as outer(x, y) would be
    %b = linear(%x, %w)                  # a weight of one input feature
    %c = einsum("ij,jk->ik", %x, %y)     # where j has the size 1

``OpRule.depth`` says where an op has the size that it sums over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.fx import Node

from fxprec.passes.graph.annotations import arg_nodes, argument, notes
from fxprec.passes.ops.equations import equation_of
from fxprec.passes.ops.table import facts_at

#: Why such an op promotes.
ELEMENTWISE: Final = "sums over one value only: an elementwise product, the widest of its float inputs wins"


def is_elementwise(node: Node) -> bool:
    """Return whether a product is known to sum over one value only."""
    row = facts_at(node)
    if row.depth == "subscripts":
        return _sums_sizes_of_one(node)
    given = [*node.args, *node.kwargs.values()]
    if row.depth == "chain":
        return all(map(_ends_in_one, [source for _, source in arg_nodes(node)][:-1]))
    left = given[row.factors[0]] if row.depth == "last" and len(given) > row.factors[0] else None
    return isinstance(left, Node) and _ends_in_one(left)


def _ends_in_one(node: Node) -> bool:
    """Return whether the last dimension is known to have the size 1: from shapes, or from the call that made it so."""
    sizes = _sizes(node)
    if sizes is not None:
        return bool(sizes) and sizes[-1] == 1
    name = notes(node).op.name
    if name == "unsqueeze":
        return argument(node, 1, "dim") == -1
    if name in ("view", "reshape"):
        shape: Any = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple | list) else node.args[1:]
        return bool(shape) and shape[-1] == 1
    if name == "getitem" and isinstance(node.args[1], tuple):
        return node.args[1][-1:] == (None,)
    return False


def _sums_sizes_of_one(node: Node) -> bool:
    equation = equation_of(node)
    operands = [source for _, source in arg_nodes(node)]
    if equation is None or not equation.summed or len(operands) != len(equation.operands):
        return False
    known: dict[object, int | None] = {}
    for indices, operand in zip(equation.operands, operands, strict=True):
        sizes = _sizes(operand)
        if sizes is not None and len(sizes) == len(indices) and "..." not in indices:
            known.update(zip(indices, sizes, strict=True))
        elif indices and _ends_in_one(operand):
            known[indices[-1]] = 1
    return all(known.get(index) == 1 for index in equation.summed)


def _sizes(node: Node) -> Sequence[int | None] | None:
    """Return the sizes of a value, None for those that change from call to call; None where nobody knows its rank."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, torch.Tensor):
        return [size if type(size) is int else None for size in value.shape]
    return notes(node).sizes
