"""Cast floating-point tensors in arguments and results. float64 and whole numbers are never touched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.torch_internals import tree_map_only

#: Casts by name: dynamo's graphs tell a cast that was written so from one that merely follows another tensor's dtype.
_CASTS: Final = {torch.float32: Tensor.float, torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16}


def cast_arguments(value: Any, dtype: torch.dtype, device: str) -> Any:
    """Cast tensors on that device type to ``dtype``; looks into lists, tuples and dicts, nested or not."""
    if isinstance(value, Tensor):
        return _CASTS[dtype](value) if _is_castable(value) and value.device.type == device else value
    if isinstance(value, dict):
        return {key: cast_arguments(part, dtype, device) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [cast_arguments(part, dtype, device) for part in value]
        # A namedtuple takes its fields one by one.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def widest(*values: Any) -> torch.dtype | None:
    """Return the dtype that holds all float tensors but float64 ones, where they are of more than one; else None."""
    found = {leaf.dtype for leaf in _leaves(values) if isinstance(leaf, Tensor) and _is_castable(leaf)}
    return reduce(torch.promote_types, found) if len(found) > 1 else None


@dataclass(frozen=True)
class CastOutputs:
    """Forward hook that casts the floating-point tensors that a model returns to ``dtype``."""

    dtype: torch.dtype

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(Tensor, self._cast, output)

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value


def _is_castable(value: Tensor) -> bool:
    return value.is_floating_point() and value.dtype in _CASTS


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _leaves(part)]
    return [value]
