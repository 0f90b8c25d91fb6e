"""The op table: canonical op name -> rule, as data. (Skeleton: the rows follow.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fxprec.passes.ir import Rule

__all__ = ["OP_TABLE", "OpRule", "rule_of"]


@dataclass(frozen=True, slots=True)
class OpRule:
    """What is known of one canonical op.

    Attributes:
        rule: LOW, FULL, FOLLOW, PROMOTE or KEEP.
        why: one clause, shown in the report and in docs/precision.md.
        ports: the argument positions or keyword names that carry the rule's dtype; None: every float tensor argument
            (nested lists included). The other float arguments keep their original dtype (a norm's weight, running
            statistics).
        result: how the dtype of the result follows from the inputs in the original program:
            "promote" (type promotion over the float tensor arguments and scalars), "first" (the first tensor
            argument's), "bool", "int64", "int32", "none" (no tensor: sizes, numbers, None), "dtype" (the dtype keyword,
            else as for "fallback"), "float" (as promote, but integers become float32), "unknown" (ask FakeTensor); or a
            tuple of these for several results; "first*" for a list/tuple of unknown length, each as the first.
        native_promotion: the eager kernel takes mixed low/FP32 inputs and promotes inside: no cast is needed to
            compute in FP32.
        mixed: device types on which the eager kernel reads a low data port, computes in FP32 inside with the other
            ports FP32, and writes low (free ports): {"cpu"} for layer_norm.
        dtype_keyword: the op takes ``dtype=`` and accumulates in it while reading low natively (sum, mean).
        view: the result aliases the first argument.
    """

    rule: Rule
    why: str
    ports: tuple[int | str, ...] | None = None
    result: str | tuple[str, ...] = "promote"
    native_promotion: bool = False
    mixed: frozenset[str] = frozenset()
    dtype_keyword: bool = False
    view: bool = False


OP_TABLE: Final[Mapping[str, OpRule]] = MappingProxyType({})


def rule_of(name: str) -> OpRule | None:
    """The row of a canonical op name (no trailing underscore), or None where the table has none."""
    return OP_TABLE.get(name)
