"""Look into and rebuild what models take and return: pytrees, and the containers that nobody registered as such."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, dtype

from fxprec.torch_internals import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["has_low_input", "restore_dtypes"]


def restore_dtypes(output: Any, low: dtype) -> Any:
    """Every tensor of the low dtype as FP32, in the container it came in; one tensor in two places stays one."""
    return _restored(output, low, {})


def has_low_input(inputs: Any, low: dtype) -> bool:
    """Whether the caller passed a tensor of the low dtype: then low outputs may be the model's own."""
    return any(isinstance(leaf, Tensor) and leaf.dtype == low for leaf in _leaves(inputs))


def _leaves(value: Any) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        parts = _parts(leaf)
        if parts is None:
            yield leaf
        else:
            for part in parts.values():
                yield from _leaves(part)


def _restored(value: Any, low: dtype, done: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.dtype != low:
            return value
        if id(value) not in done:
            done[id(value)] = value.float()
        return done[id(value)]
    leaves, spec = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return _restored_object(value, low, done)
    restored = [_restored(leaf, low, done) for leaf in leaves]
    if all(new is old for new, old in zip(restored, leaves, strict=True)):
        return value
    return tree_unflatten(restored, spec)


def _restored_object(value: Any, low: dtype, done: dict[int, Tensor]) -> Any:
    """A copy with other parts, made without its constructor, which may do more than hold them."""
    parts = _parts(value)
    restored = {key: _restored(part, low, done) for key, part in (parts or {}).items()}
    if parts is None or all(restored[key] is part for key, part in parts.items()):
        return value
    copied = copy.copy(value)
    for key, part in restored.items():
        if isinstance(value, dict | list):
            copied[key] = part
        else:
            object.__setattr__(copied, key, part)  # a frozen one, too
    return copied


def _parts(value: Any) -> dict[Any, Any] | None:
    """What an unregistered container holds; None for anything else."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {**{field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, **_attributes(value)}
    return None


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})
