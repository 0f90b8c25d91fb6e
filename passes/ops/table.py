"""The op table: canonical op name -> what is known of it. Data, gathered from the files in ``rows``.

The rules agree with the lists of ``torch.autocast`` on CUDA wherever those say something (one exception is written in
``OpRule.autocast``: copies that autocast widens for nothing), and say more where they are silent. An op without a row
is kept: every float argument arrives in its original dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from torch.fx import Node

from fxprec.passes.graph.annotations import Rule, notes
from fxprec.passes.ops.rows.math import LINALG_ROWS, MATH_ROWS
from fxprec.passes.ops.rows.nn import NN_ROWS
from fxprec.passes.ops.rows.tensor import TENSOR_ROWS
from fxprec.passes.ops.rule import OpRule, table

OP_TABLE: Final[Mapping[str, OpRule]] = table(NN_ROWS, MATH_ROWS, TENSOR_ROWS, LINALG_ROWS)


#: aten overloads that give more results than the function whose row they share: in the words of ``OpRule.result``.
OVERLOAD_RESULTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "native_dropout": ("first", "bool"),
        **dict.fromkeys(("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
                         "fractional_max_pool2d", "fractional_max_pool3d"), ("first", "int64")),
        # with the logsumexp of each row, seeds, and for the flash and cuDNN kernels lengths
        "_scaled_dot_product_flash_attention_for_cpu": ("first", "wide"),
        "_scaled_dot_product_efficient_attention": ("first", "float32", "int64", "int64"),
        "_scaled_dot_product_flash_attention":
            ("first", "float32", "none", "none", "none", "none", "uint64", "uint64", "first"),
        "_scaled_dot_product_cudnn_attention":
            ("first", "float32", "none", "none", "none", "none", "int64", "int64", "none"),
    }
)  # fmt: skip


class _Facts(dict[str, OpRule]):
    """The op table, with a row that states nothing for every other name."""

    def __missing__(self, name: str) -> OpRule:
        return _NOTHING_KNOWN


_NOTHING_KNOWN: Final = OpRule(Rule.KEEP, "")

#: Return the row of a canonical op name (no trailing underscore), or None where the table has none.
row_of: Final = OP_TABLE.get

#: Return the row of a canonical op name; where the table has none, one that states nothing.
facts_of: Final[Callable[[str], OpRule]] = _Facts({"": _NOTHING_KNOWN, **OP_TABLE}).__getitem__


def facts_at(node: Node) -> OpRule:
    """Return ``facts_of`` the op of a node."""
    return facts_of(notes(node).op.name)
