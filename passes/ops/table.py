"""The op table: canonical op name -> what is known of it. Data, gathered from the files in ``rows``.

The rules agree with the lists of ``torch.autocast`` on CUDA wherever those say something (one exception is written in
``OpRule.autocast``: copies that autocast widens for nothing), and say more where they are silent. An op without a row
is kept: every float argument arrives in its original dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.rows.linalg import LINALG_ROWS
from fxprec.passes.ops.rows.math import MATH_ROWS
from fxprec.passes.ops.rows.nn import NN_ROWS
from fxprec.passes.ops.rows.tensor import TENSOR_ROWS
from fxprec.passes.ops.rule import OpRule, table

__all__ = ["OP_TABLE", "OpRule", "facts_of", "rule_of"]

OP_TABLE: Final[Mapping[str, OpRule]] = table(NN_ROWS, MATH_ROWS, TENSOR_ROWS, LINALG_ROWS)


def rule_of(name: str) -> OpRule | None:
    """The row of a canonical op name (no trailing underscore), or None where the table has none."""
    return OP_TABLE.get(name)


def facts_of(name: str) -> OpRule:
    """The row of a canonical op name; where the table has none, one that states nothing."""
    return OP_TABLE.get(name, _NOTHING_KNOWN)


_NOTHING_KNOWN: Final = OpRule(Rule.KEEP, "")
