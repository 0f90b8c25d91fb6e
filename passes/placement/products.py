"""Recognize products whose precision the operands decide: squares, and sums over a single value.

Where a value is multiplied by itself, its square leaves float16's range from 256 on, which no product of two others of
that size does often. In float16 such ops are FULL, whatever autocast does::

    %a = square(%x)                          # always
    %b = mul(%x, %x)                         # where both factors are one value; so with %x.detach(), or two equal views
    %c = einsum("ij,ij->i", %x, %x)          # where both have the same subscripts
    %d = tensordot(%x, %x, 2)                # where all dimensions are summed over

``OpRule.squares`` says of which ops that is to be asked. A Gram matrix (``x @ x.T``) stays as it is: nearly all of it
is products of different values, for which the matrix units are there.

A product that is known to sum over a single value is elementwise, however it is written: each element of the result is
one product of two values. Matrix units gain nothing there, and low operands would be rounded for nothing (positions
times frequencies: 301 is 300 in bfloat16). So such an op is PROMOTE as ``mul`` is::

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

from fxprec.passes.dtypes.fake_results import fake_value
from fxprec.passes.graph.annotations import NO_OP, Rule, arg_nodes, argument, notes
from fxprec.passes.ops.equations import equation_of
from fxprec.passes.ops.rule import OpRule
from fxprec.passes.ops.table import facts_at, row_of

#: Why such an op promotes.
ELEMENTWISE: Final = "sums over one value only: an elementwise product, the widest of its float inputs wins"
#: How many calls back two values are compared.
_MOST_CALLS_BACK: Final = 8


def is_square(node: Node) -> bool:
    """Return whether the op multiplies a value by itself, element by element; it may sum the products up."""
    row = facts_at(node)
    if row.squares is None:
        return False
    if row.squares == "always":
        return True
    if row.squares == "power":
        exponent = argument(node, 1, "exponent", 2)
        return not isinstance(exponent, int | float) or exponent > 1
    factors = [source for _, source in arg_nodes(node)]  # only one of x * 2, which is no square
    if row.squares == "subscripts":
        equation = equation_of(node)
        return equation is not None and _has_square(equation.operands, factors)
    if len(factors) < 2 or not same_value(factors[-2], factors[-1]):
        return False
    return row.squares == "factors" or _contracts_all(node, factors[-1], row)


def same_value(a: Node, b: Node, depth: int = _MOST_CALLS_BACK) -> bool:
    """Return whether both are known to hold the same values in the same places; views and copies are seen through."""
    a, b = _seen_through(a), _seen_through(b)
    if a is b:
        return True
    if a.op != b.op or a.target != b.target or not depth:
        return False
    if a.op == "get_attr":  # of one graph, where one name is one attribute
        return True
    row = _row(a)  # random numbers are KEEP
    return row is not None and row.rule is not Rule.KEEP and _same((a.args, a.kwargs), (b.args, b.kwargs), depth)


def _same(a: Any, b: Any, depth: int) -> bool:
    if isinstance(a, Node) and isinstance(b, Node):
        return same_value(a, b, depth - 1)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_same(x, y, depth) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key], depth) for key in a)
    return type(a) is type(b) and a == b


def _seen_through(node: Node) -> Node:
    """Return what a value was before it was copied, cast or detached, or viewed in its own shape."""
    while (row := _row(node)) is not None and node.args and isinstance(source := node.args[0], Node):
        if not (row.same or (row.view and (_in_shape_of(node, source) or _lies_alike(node, source)))):
            break
        node = source
    return node


def _in_shape_of(view: Node, source: Node) -> bool:
    """Return whether a view shows all as it is: ``x.view_as(x)``, ``x.reshape(x.shape)``, ``x.expand(x.size())``."""
    if len(view.args) != 2 or view.kwargs or not isinstance(shape := view.args[1], Node):
        return False
    if notes(shape).op.name in ("getattr", "size"):
        return shape.args == (source,) or shape.args == (source, "shape")
    return shape is source


def _lies_alike(a: Node, b: Node) -> bool:
    """Return whether a view has the shape and the strides of its source: each element is in its old place."""
    first, second = a.meta.get("val"), b.meta.get("val")
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    strided = first.layout == second.layout == torch.strided
    return strided and first.shape == second.shape and first.stride() == second.stride()


def _contracts_all(node: Node, factor: Node, row: OpRule) -> bool:
    """Return whether no dimension is left of what is multiplied by itself: a square, and no Gram matrix.

    Of unknown rank, a LOW op (matmul) counts as a Gram matrix, any other (inner) as a square.
    """
    rank = _rank(factor)
    if row.squares == "vectors":
        return rank == 1 or (rank is None and row.rule is not Rule.LOW)
    dims = argument(node, 2, "dims", 2)
    if isinstance(dims, int):
        return rank is None or dims >= rank
    if not isinstance(dims, tuple | list) or len(dims) != 2:
        return True
    one, other = ([each] if isinstance(each, int) else each for each in dims)
    return list(one) == list(other) and (rank is None or len(one) >= rank)


def _rank(node: Node) -> int | None:
    """Return how many dimensions a value has; None where nobody knows."""
    if (sizes := _sizes(node)) is not None:
        return len(sizes)
    op = notes(node).op
    if op is NO_OP or node.kwargs:
        return None
    if op.name in ("flatten", "ravel") and len(node.args) == 1:
        return 1
    if op.name in ("view", "reshape") and node.args[1:] in ((-1,), ((-1,),), ([-1],)):
        return 1
    return None


def _has_square(subscripts: Sequence[object], operands: list[Node]) -> bool:
    pairs = [*zip(subscripts, operands, strict=False)]
    return any(
        own == other and same_value(operand, earlier)
        for number, (own, operand) in enumerate(pairs)
        for other, earlier in pairs[:number]
    )


def _row(node: Node) -> OpRule | None:
    op = notes(node).op
    return row_of(op.name) if op is not NO_OP and not op.in_place else None


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
    value = fake_value(node)
    if isinstance(value, torch.Tensor):
        return [size if type(size) is int else None for size in value.shape]
    return notes(node).sizes
