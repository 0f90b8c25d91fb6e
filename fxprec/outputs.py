"""Look into and rebuild the containers that models take and return: pytrees, and dataclasses nobody registered."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["has_low_input", "restore_dtypes"]


def restore_dtypes(output: Any, low: torch.dtype) -> Any:
    """Every tensor of the low dtype as FP32, in the container it came in."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype == low else output
    leaves, spec = pytree.tree_flatten(output)
    if not any(isinstance(leaf, Tensor) or dataclasses.is_dataclass(leaf) for leaf in leaves):
        return output
    return pytree.tree_unflatten([_restore_leaf(leaf, low) for leaf in leaves], spec)


def has_low_input(inputs: Any, low: torch.dtype) -> bool:
    """Whether the caller passed a tensor of the low dtype: then low outputs may be the model's own."""
    return any(isinstance(leaf, Tensor) and leaf.dtype == low for leaf in pytree.tree_leaves(inputs))


def _restore_leaf(leaf: Any, low: torch.dtype) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.float() if leaf.dtype == low else leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        values = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
        restored = {name: restore_dtypes(value, low) for name, value in values.items()}
        if any(restored[name] is not value for name, value in values.items()):
            return dataclasses.replace(leaf, **restored)
    return leaf
