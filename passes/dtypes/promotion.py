"""Tell the dtype of a result from its inputs: by torch's type promotion, and by the other kinds the op table names.

It follows from the dtypes of the operands and from which of them are 0-dim. A tensor operand is (dtype, the node that
makes it): a 0-dim tensor only counts by its category, like a Python number, where there is a dimensioned one; a
one-element vector counts in full.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import torch
from torch.fx import Node

from fxprec.passes.graph.annotations import NON_TENSOR, UNKNOWN, DTypeInfo, is_castable, notes
from fxprec.passes.ops.table import facts_of

#: Python number types, narrowest first.
NUMBERS: Final = (bool, int, float, complex)


class Operands(NamedTuple):
    """Operands of a call.

    Attributes:
        tensors: dtype and producer of every argument that is or may be a tensor, in order.
        numbers: the widest Python number type among the other arguments, None where there is none.
        equal: the op wants all its float tensors in one dtype, so that one known tells the others.
    """

    tensors: tuple[tuple[DTypeInfo, Node], ...]
    numbers: type | None
    equal: bool


Kind: TypeAlias = Callable[[Operands], DTypeInfo]


def is_zero_dim(node: Node) -> bool:
    """Return whether the value is known to be a 0-dim tensor; what nobody knows counts as dimensioned.

    Known is: what was captured with shapes, a 0-dim parameter or buffer, the result of a reduction over everything,
    and that of an elementwise op whose tensors are all 0-dim. ``propagate`` writes the answer to
    ``annotations.is_zero_dim``, so that a question never walks further than the node's own arguments.
    """
    annotations = notes(node)
    known = annotations.is_zero_dim
    if known is not None:
        return known
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    if node.op == "get_attr":
        return annotations.sizes == ()
    rank = facts_of(annotations.op.name).rank
    if rank == "reduced":
        return len(node.args) == 1 and not ({"dim", "axis"} & node.kwargs.keys())
    sources = node.all_input_nodes
    return rank == "kept" and bool(sources) and all(notes(source).is_zero_dim for source in sources)


def has_dimensions(node: Node) -> bool:
    """Return whether the value is known to be no 0-dim tensor. Of many values neither this nor the opposite is known.

    ``propagate`` writes the answer to ``annotations.has_dimensions``.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    if node.op == "get_attr":
        return bool(notes(node).sizes)
    row = facts_of(notes(node).op.name)
    if row.rank == "some" or (
        row.rank == "kept" and any(notes(source).has_dimensions for source in node.all_input_nodes)
    ):
        return True
    # A reader that takes no 0-dim tensor first (linear) tells, too.
    readers = (user for user in node.users if user.args[:1] == (node,)) if is_castable(notes(node).dtype) else ()
    return any(facts_of(notes(user).op.name).rank == "some" for user in readers)


def promote(operands: Operands) -> DTypeInfo:
    """Return ``torch.result_type`` of tensors and numbers; UNKNOWN as soon as one decisive dtype is."""
    found = {info for info, _ in operands.tensors}
    if not found:
        return NON_TENSOR
    if UNKNOWN in found:
        known = {info for info in found if isinstance(info, torch.dtype) and info.is_floating_point}
        return known.pop() if operands.equal and len(known) == 1 else UNKNOWN
    if len(found) == 1:
        dimensioned, scalar = found.pop(), None
    else:
        dimensioned = _widest(info for info, node in operands.tensors if not is_zero_dim(node))
        scalar = _widest(info for info, node in operands.tensors if is_zero_dim(node))
    return _combine(_combine(dimensioned, scalar), _number_dtype(operands.numbers))


def _widest(infos: Iterable[DTypeInfo]) -> torch.dtype | None:
    found = [info for info in infos if isinstance(info, torch.dtype)]
    return functools.reduce(torch.promote_types, found) if found else None


def _combine(higher: DTypeInfo | None, lower: torch.dtype | None) -> DTypeInfo:
    """Combine dtypes: the lower counts only where its category (bool, int, float, complex) is higher."""
    if not isinstance(higher, torch.dtype):
        return lower if lower is not None else NON_TENSOR if higher is None else higher
    if lower is None or higher.is_complex:
        return higher
    if higher.is_floating_point:
        return higher.to_complex() if lower.is_complex else higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher


def _number_dtype(number: type | None) -> torch.dtype | None:
    fixed = {None: None, bool: torch.bool, int: torch.int64}
    if number in fixed:
        return fixed[number]
    default = torch.get_default_dtype()
    return default.to_complex() if number is complex else default


def _always(info: DTypeInfo) -> Kind:
    return lambda operands: info


def first(operands: Operands) -> DTypeInfo:
    """Return the first tensor argument's dtype."""
    return operands.tensors[0][0] if operands.tensors else NON_TENSOR


def _then(found: Kind, change: Callable[[torch.dtype], torch.dtype]) -> Kind:
    """Return the kind that makes another dtype of what a kind finds, where that is one."""

    def changed(operands: Operands) -> DTypeInfo:
        info = found(operands)
        return change(info) if isinstance(info, torch.dtype) else info

    return changed


def _inexact_or(integer: Callable[[], torch.dtype]) -> Callable[[torch.dtype], torch.dtype]:
    return lambda dtype: dtype if dtype.is_floating_point or dtype.is_complex else integer()


def _to_real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _float64(operands: Operands) -> DTypeInfo:
    info = first(operands)
    return torch.complex128 if isinstance(info, torch.dtype) and info.is_complex else torch.float64


_float: Final = _then(promote, _inexact_or(torch.get_default_dtype))
_real: Final = _then(first, _to_real)
_complex: Final = _then(_float, torch.dtype.to_complex)

#: ``OpRule.result`` -> dtype; tuples, "first*" and "unknown" are for the caller to take apart.
RESULT_KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "promote": promote,
        "tensors": lambda operands: promote(operands._replace(numbers=None)),
        "first": first,
        "float": _float,
        "accumulate": _then(first, _inexact_or(lambda: torch.int64)),
        "real": _real,
        "float_real": _then(_float, _to_real),
        "wide": _then(first, lambda dtype: torch.promote_types(dtype, torch.float32)),
        "float64": _float64,
        "complex": _complex,
        "default": lambda operands: torch.get_default_dtype(),
        "none": _always(NON_TENSOR),
        **{name: _always(getattr(torch, name)) for name in ("bool", "int64", "int32", "uint64", "float32")},
    }
)
