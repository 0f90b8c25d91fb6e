"""Read the equation of an einsum before any size is known: whether it sums, and over what.

============  ===========================================  ==================================
"ij,jk->ik"   ``Form.CONTRACTION``: a product and a sum    j stands in two operands
"i,j->ij"     ``Form.PRODUCT``: elementwise                no index is missing in the result
"ij->i"       ``Form.SUM``                                 j stands in one operand only
"ii->i"       ``Form.VIEW``: a diagonal, a permutation     nothing is summed, of one operand
============  ===========================================  ==================================

Every way to write it is read: blanks, an ellipsis, a result left out, repeated indices, and lists of numbers
(``einsum(x, [0, 1], y, [1, 2], [0, 2])``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

from torch.fx import Node

#: An index, or "..." for all the dimensions that an ellipsis stands for.
Index: TypeAlias = "str | int"

_ELLIPSIS: Final = "..."
_INDICES: Final = re.compile(r"\.\.\.|[A-Za-z]")
_WELL_FORMED: Final = re.compile(r"(?:\.\.\.|[A-Za-z])*")


class Form(StrEnum):
    """Kind of computation that an einsum is."""

    CONTRACTION = "contraction"
    PRODUCT = "product"
    SUM = "sum"
    VIEW = "view"


class Equation(NamedTuple):
    """The indices of each operand and of the result."""

    operands: tuple[tuple[Index, ...], ...]
    result: tuple[Index, ...]

    @property
    def summed(self) -> frozenset[Index]:
        """The indices that the result does not have. A missing ellipsis is summed over, too."""
        return frozenset(index for operand in self.operands for index in operand) - {*self.result}

    @property
    def form(self) -> Form:
        operands_of = Counter(index for operand in self.operands for index in {*operand})
        if any(operands_of[index] > 1 for index in self.summed):
            return Form.CONTRACTION
        if self.summed:
            return Form.SUM
        return Form.VIEW if len(self.operands) == 1 else Form.PRODUCT


def equation_of(node: Node) -> Equation | None:
    """Return the equation of a call of einsum; None where its arguments do not say."""
    text = node.args[0] if node.args else node.kwargs.get("equation")
    if isinstance(text, str):
        return _parse(text)
    # Operands and their lists in turn; of an odd number of arguments the last is the list of the result.
    *pairs, last = node.args if len(node.args) % 2 else (*node.args, None)
    lists = pairs[1::2]
    if not lists or not all(isinstance(each, tuple | list) for each in (*lists, last or ())):
        return None
    return _equation(lists, last)


def _parse(text: str) -> Equation | None:
    terms, arrow, result = "".join(text.split()).partition("->")
    operands = terms.split(",")
    if not all(map(_WELL_FORMED.fullmatch, (*operands, result))):
        return None
    return _equation([*map(_INDICES.findall, operands)], _INDICES.findall(result) if arrow else None)


def _equation(operands: Sequence[Any], result: Any) -> Equation:
    named = tuple(_named(operand) for operand in operands)
    if result is not None:
        return Equation(named, _named(result))
    seen = Counter(index for operand in named for index in operand)
    # left out, it is the ellipsis and each index that stands there once
    return Equation(named, tuple(index for index in seen if index == _ELLIPSIS or seen[index] == 1))


def _named(indices: Sequence[object]) -> tuple[Index, ...]:
    return tuple(index if isinstance(index, str | int) else _ELLIPSIS for index in indices)
