"""Tell dtypes of results that depend on a call's arguments: ``max(x)``, ``max(x, dim)``, ``x[0]``, ``x.to(y.dtype)``.

Each function answers for the ops whose row names it (``OpRule.special``), or gives None: then ``OpRule.result`` says
it. If the call names a dtype, that is the result's (``propagate``): then only the functions of getitem, getattr and
``to`` are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from torch.fx import Node

from fxprec.passes.dtypes.fake_results import fake_result
from fxprec.passes.dtypes.promotion import NUMBERS, Operands, first, promote
from fxprec.passes.graph.annotations import NON_TENSOR, UNKNOWN, DTypeInfo, argument, notes
from fxprec.passes.ops.names import cast_target, dtype_argument
from fxprec.passes.ops.spellings import NO_TENSOR_ATTRIBUTES, RESULT_FIELDS, TENSOR_ATTRIBUTES
from fxprec.passes.ops.table import facts_at
from fxprec.passes.torch_internals import OpOverload, schema_of


@dataclass(frozen=True, slots=True)
class Known:
    """Facts that a walk knows besides the dtypes in ``node.meta``.

    Attributes:
        low: the low dtype: a fake value captured under autocast may have it for an original FP32.
        weights_are_low: they became so by the conversion, at O3.
        floats: nodes whose value is a Python float; one that holds another number counts as an int.
        dtypes: nodes whose value is a dtype (``x.dtype``) -> that dtype.
    """

    low: torch.dtype
    weights_are_low: bool = False
    floats: set[Node] = field(default_factory=set)
    dtypes: dict[Node, DTypeInfo] = field(default_factory=dict)

    def requested(self, node: Node) -> DTypeInfo | None:
        """Return the dtype that the call itself asks for: a constant, or ``dtype=x.dtype``."""
        dtype = dtype_argument(node)
        if dtype is not None:
            return dtype
        given = node.kwargs.get("dtype")
        return self.dtypes.get(given, UNKNOWN) if isinstance(given, Node) else None


Answer: TypeAlias = "Callable[[Known, Node, Operands], DTypeInfo | None]"


def _getitem(known: Known, node: Node, operands: Operands) -> DTypeInfo:
    base, index = node.args[0], node.args[1]
    info = notes(base).dtype if isinstance(base, Node) else NON_TENSOR
    if not isinstance(info, tuple):
        return info
    if isinstance(index, slice):
        try:
            return info[index] or info
        except TypeError:  # a bound that is a node
            return info
    return info[index] if isinstance(index, int) and -len(info) <= index < len(info) else info[0]


def _getattr(known: Known, node: Node, operands: Operands) -> DTypeInfo:
    base, name = node.args[0], str(node.args[1])
    info = notes(base).dtype if isinstance(base, Node) else NON_TENSOR
    if name == "dtype":
        known.dtypes[node] = info
    if name in NO_TENSOR_ATTRIBUTES:
        return NON_TENSOR
    if isinstance(info, tuple):
        position = RESULT_FIELDS.get(name, 0)
        return info[position] if position < len(info) else UNKNOWN
    if name in TENSOR_ATTRIBUTES:
        return info
    if name in ("real", "imag"):
        return info.to_real() if isinstance(info, torch.dtype) and info.is_complex else info
    return fake_result(node, known.low)


def _to(known: Known, node: Node, operands: Operands) -> DTypeInfo:
    target = cast_target(node)
    if target is not None:
        return target
    if node.target == "type" and len(node.args) == 1 and not node.kwargs:
        return NON_TENSOR  # x.type() is a string
    for other in (*node.args[1:], *node.kwargs.values()):
        if isinstance(other, Node):
            if other in known.dtypes:
                return known.dtypes[other]
            if notes(other).dtype is not NON_TENSOR:  # type_as(other), to(other)
                return notes(other).dtype
    return first(operands)


def _bits(known: Known, node: Node, operands: Operands) -> DTypeInfo | None:
    """x.view(y.dtype). At O3 a low ``y`` was FP32 before its weights became low."""
    found = (known.dtypes.get(each) for each in (*node.args[1:], *node.kwargs.values()) if isinstance(each, Node))
    dtype = next((each for each in found if each is not None), None)
    return torch.float32 if known.weights_are_low and dtype in (known.low, UNKNOWN) else dtype


def _extreme(known: Known, node: Node, operands: Operands) -> DTypeInfo:
    """max(x), max(x, dim), max(x, y); median(x), median(x, dim)."""
    if len(operands.tensors) > 1:
        return promote(operands)
    value = first(operands)
    if isinstance(node.target, OpOverload):
        return value if len(schema_of(node.target).returns) == 1 else (value, torch.int64)
    return (value, torch.int64) if len(node.args) > 1 or "dim" in node.kwargs else value


def _pool(known: Known, node: Node, operands: Operands) -> DTypeInfo | None:
    """max_pool2d(x, ..., return_indices=True)"""
    position = facts_at(node).return_indices
    if position is None or isinstance(node.target, OpOverload) or not argument(node, position, "return_indices"):
        return None
    return (first(operands), torch.int64)


def _native_norm(known: Known, node: Node, operands: Operands) -> DTypeInfo | None:
    """torch.native_layer_norm and its kin give two statistics too; aten's overloads say so themselves."""
    native = getattr(node.target, "__name__", "").lstrip("_").startswith("native_")
    return (first(operands),) * 3 if native and not isinstance(node.target, OpOverload) else None


def _unique(known: Known, node: Node, operands: Operands) -> DTypeInfo:
    value = node.meta.get("val")
    extra = bool(argument(node, 2, "return_inverse", False)) + bool(argument(node, 3, "return_counts", False))
    if isinstance(value, tuple | list):
        extra = len(value) - 1
    return (first(operands), *(torch.int64,) * extra) if extra else first(operands)


def _sequence(known: Known, node: Node, operands: Operands) -> DTypeInfo | None:
    """arange: the dtype of its numbers."""
    return _float_sequence(known, node, operands) if operands.numbers in (float, complex) else torch.int64


def _float_sequence(known: Known, node: Node, operands: Operands) -> DTypeInfo | None:
    """linspace: a float whatever its numbers are."""
    default = torch.get_default_dtype()
    return default.to_complex() if operands.numbers is complex else default


def _full(known: Known, node: Node, operands: Operands) -> DTypeInfo | None:
    """torch.full(size, value): the size's integers do not count."""
    value = argument(node, 1, "fill_value")
    if isinstance(value, Node):
        numbers: type | None = float if value in known.floats else int
    else:
        numbers = type(value) if type(value) in NUMBERS else None
    found = _sequence(known, node, operands._replace(numbers=numbers))
    return torch.bool if found is torch.int64 and numbers is bool else found


def _constant(known: Known, node: Node, operands: Operands) -> DTypeInfo | None:
    """torch.tensor(data) and the like."""
    if operands.tensors:
        return first(operands)
    if operands.numbers in (float, complex) or operands.numbers is None:
        return torch.get_default_dtype() if operands.numbers is not complex else None
    return torch.bool if operands.numbers is bool else torch.int64


#: ``OpRule.special`` -> who answers.
SPECIAL: Final[Mapping[str, Answer]] = MappingProxyType(
    {
        "part": _getitem,
        "attribute": _getattr,
        "cast": _to,
        "bits": _bits,
        "extreme": _extreme,
        "pool": _pool,
        "native_norm": _native_norm,
        "unique": _unique,
        "where": lambda known, node, operands: (torch.int64,) if len(node.args) + len(node.kwargs) == 1 else None,
        "nonzero": lambda known, node, operands: (torch.int64,) if node.kwargs.get("as_tuple") else None,
        "div": lambda known, node, operands: promote(operands) if node.kwargs.get("rounding_mode") else None,
        "buckets": lambda known, node, operands: torch.int32 if node.kwargs.get("out_int32") else torch.int64,
        "sequence": _sequence,
        "float_sequence": _float_sequence,
        "full": _full,
        "constant": _constant,
        # x.new_tensor(data): the dtype of x
        "like": lambda known, node, operands: first(operands) if operands.tensors else torch.get_default_dtype(),
        "each": lambda known, node, operands: tuple(info for info, _ in operands.tensors),
        "normal": lambda known, node, operands: None if operands.tensors else torch.get_default_dtype(),
    }
)
