"""The calls that passes insert: plain functions, so that a printed graph reads as what it does."""

from __future__ import annotations

from typing import Any

import torch

from fxprec.kernels.launch.graph_call import called_as, graph_call
from fxprec.kernels.launch.observers import runs_unseen
from fxprec.kernels.launch.operands import LOW_DTYPES, PLAIN
from fxprec.passes.graph.annotations import CASTABLE
from fxprec.passes.torch_internals import tree_leaves, tree_map


@called_as(torch.Tensor.to)
def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` in ``dtype``, itself where it is that already. Only for values known to be castable floats."""
    return x.to(dtype)


@graph_call
def cast_if_float(x: object, dtype: torch.dtype) -> object:
    """Do as ``cast`` where nobody knew what arrives: what is no FP32, FP16 or BF16 tensor passes untouched.

    A tensor of that dtype is returned without a call of ``to``. That would wrap a tensor which is left over from a
    finished transform of ``torch.func`` in a new object, and the user asks for the gradient of the old one.
    """
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in CASTABLE and x.dtype != dtype else x


@graph_call
def cast_for_caller(x: torch.Tensor, dtype: torch.dtype, *inputs: object) -> torch.Tensor:
    """Cast a result of low weights (O3), unless an input has its dtype: then it is low in the original, too."""
    is_low = any(isinstance(each, torch.Tensor) and each.dtype == x.dtype for each in tree_leaves(inputs))
    return x if is_low else x.to(dtype)


@graph_call
def read_back(wide: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return ``wide`` in the dtype of the low value that it is the FP32 cast of; where it is none, ``low``.

    For casts of the user's that nobody knows without inputs: ``wide = low.type_as(x)``.
    """
    was_low = low.dtype in LOW_DTYPES
    return wide.to(low.dtype) if was_low and wide.dtype is torch.float32 else low


@graph_call
def cast_each(values: Any, dtype: torch.dtype) -> Any:
    """Do as ``cast_if_float`` with each tensor of a list, tuple or dict (``x.max(0)``); containers keep their types."""
    return tree_map(lambda value: cast_if_float(value, dtype), values)


@graph_call
def cast_saturating(x: object, dtype: torch.dtype) -> object:
    """Cast an additive mask: what is finite stays so (FP32's lowest would round to -inf), -inf stays.

    A row of a mask that holds the lowest float everywhere means "attend evenly"; as -inf it would give NaN.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in CASTABLE or x.dtype == dtype:
        return x
    plain = type(x) in PLAIN and x.device.type == "cpu"
    if plain and runs_unseen():  # no tracer and no mode watches: the numbers may be looked at
        low = x.to(dtype)
        if not low.isinf().any():  # to look costs less than to choose, forward and backward
            return low
    limits = torch.finfo(dtype)
    return torch.where(x.isinf(), x, x.clamp(limits.min, limits.max)).to(dtype)


@graph_call
def write_out(out: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Do what ``out=`` does with a result: ``out`` takes its shape, keeps its own dtype, and is returned."""
    if out.shape != value.shape:
        out.resize_(value.shape)
    return out.copy_(value)


#: Calls that only change a dtype. ``read_back`` is none: it chooses between two tensors.
CASTS = frozenset({cast, cast_each, cast_for_caller, cast_if_float, cast_saturating})
