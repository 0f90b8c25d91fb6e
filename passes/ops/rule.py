"""A row of the op table, and the short form in which the tables write many rows at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from fxprec.passes.graph.annotations import Rule

__all__ = ["OpRule", "Squares", "Writes", "having", "rows", "table"]

Squares: TypeAlias = Literal["always", "factors", "vectors", "dimensions", "subscripts", "power"]


class Writes(NamedTuple):
    """Ports that are written to unless a flag (its position, its name, what it is where it is left out) says no."""

    ports: tuple[int | str, ...]
    flag: tuple[int, str, bool]


@dataclass(frozen=True, slots=True)
class OpRule:
    """What is known of one canonical op.

    Attributes:
        rule: LOW, FULL, FOLLOW, PROMOTE or KEEP.
        why: one clause, shown in the report and in docs/precision.md.
        ports: the argument positions or keyword names that carry the rule's dtype; None: every float tensor argument
            (nested lists included). The other float arguments keep their original dtype (a norm's weight, running
            statistics).
        result: how the dtype of the result follows from the inputs in the original program. A ``torch.dtype`` among
            the arguments of the call (``dtype=torch.float32``) always wins; else:

            ==============  ====================================================================================
            "promote"       torch's type promotion over the tensor arguments and numbers
            "tensors"       the same over the tensor arguments only: numbers are dimensions, factors of a product, ...
            "first"         the first tensor argument's
            "float"         as "promote", but integers and bool become the default float
            "accumulate"    the first's, but integers and bool become int64 (sum, prod)
            "real"          the first's, but complex becomes its real part's (abs, norms)
            "float_real"    as "float", but complex becomes its real part's (distances)
            "complex"       as "float", but real becomes complex
            "float64"       float64, of complex complex128
            "default"       torch.get_default_dtype()
            "bool", "int64", "int32"   itself
            "none"          no tensor: sizes, numbers, None
            "unknown"       ask FakeTensor
            "first*"        a list of unknown length, each as the first (any of the above can have the star)
            a tuple         several results
            ==============  ====================================================================================
        native_promotion: the eager kernel takes mixed low/FP32 inputs and promotes inside: no cast is needed to
            compute in FP32.
        mixed: device types on which the eager kernel reads a low data port, computes in FP32 inside with the other
            ports FP32, and writes low (free ports): {"cpu"} for layer_norm.
        dtype_keyword: the op takes ``dtype=`` and accumulates in it while reading low natively (sum, mean).
        view: the result may alias the first argument.
        low_kernel: whether there is a kernel for low inputs at all, forward and backward: without one a FULL op stays
            FULL even where a level or a placement would have it run low.
        autocast: what torch.autocast's CUDA lists say where ``rule`` says something better; for placement="autocast".
        writes: what a call writes to although its name does not say so, and when.
        wide: a LOW op whose kernel puts out FP32, whatever it reads.
        same: the result holds the first argument's values, each in its place: a copy, a cast, a detached one.
        squares: whether the op multiplies a value by itself, which leaves float16's range from 256 on: there such a
            call is FULL. ``passes.squares`` asks:

            ==============  ====================================================================================
            "always"        it does
            "factors"       where its last two tensors are one value
            "vectors"       likewise, and it is a vector: else the result is a Gram matrix
            "dimensions"    likewise, and ``dims`` names all its dimensions
            "subscripts"    where two operands with equal subscripts are one value
            "power"         where the exponent is above 1 (FULL as it is, but its result may be written elsewhere)
            ==============  ====================================================================================
    """

    rule: Rule
    why: str
    ports: tuple[int | str, ...] | None = None
    result: str | tuple[str, ...] = "promote"
    native_promotion: bool = False
    mixed: frozenset[str] = frozenset()
    dtype_keyword: bool = False
    view: bool = False
    low_kernel: bool = True
    autocast: Rule | None = None
    writes: Writes | None = None
    wide: bool = False
    same: bool = False
    squares: Squares | None = None


def rows(rule: Rule, why: str, names: str, **options: Any) -> dict[str, OpRule]:
    """One row for each of the blank-separated names, all alike."""
    row = OpRule(rule, why, **options)
    return dict.fromkeys(names.split(), row)


def having(group: Mapping[str, OpRule], names: str, **options: Any) -> dict[str, OpRule]:
    """The rows of a group, with further facts on those that are named."""
    return {**group, **{name: replace(group[name], **options) for name in names.split()}}


def table(*groups: Mapping[str, OpRule]) -> Mapping[str, OpRule]:
    """All groups in one read-only table; a name in two of them is a mistake."""
    merged: dict[str, OpRule] = {}
    for group in groups:
        if twice := merged.keys() & group.keys():
            raise ValueError(f"op table: {', '.join(sorted(twice))} in two places; keep one row for each op")
        merged.update(group)
    return MappingProxyType(merged)
