"""What a run left behind, as flat leaves that can be compared: values, types, dtypes, identity; tensors are copied."""

from __future__ import annotations

import dataclasses
import enum
import math
import random
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
import torch.fx
from torch import Tensor, nn

#: Attributes of a converted module that the original does not have, and what torch keeps for itself.
_APART = frozenset(
    {
        "_fxprec",
        "_is_full_backward_hook",
        "_compiled_call_impl",
        "_graph",
        "dynamo_ctx",
        "_torchdynamo_wrapper_id",
    }
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One value: ``facts`` must be equal, ``number`` may differ by rounding."""

    facts: tuple[Any, ...]
    dtype: torch.dtype | None = None
    number: Tensor | None = None


def portrait(value: Any, path: str = "") -> dict[str, Leaf]:
    """path -> leaf of everything that can be reached from ``value``."""
    return dict(_leaves(value, path, {}))


def _leaves(value: Any, path: str, seen: dict[int, tuple[str, Any]]) -> Iterator[tuple[str, Leaf]]:
    if issubclass(type(value), torch.fx.Proxy):  # left behind by a trace; asking it anything raises
        yield path, Leaf((_kind(value),))
        return
    if isinstance(value, float):
        yield path, Leaf((_kind(value),), None, torch.tensor(value, dtype=torch.float64))
        return
    if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
        yield path, Leaf((_kind(value), repr(value)))
        return
    if id(value) in seen:
        yield path, Leaf(("again", seen[id(value)][0]))
        return
    seen[id(value)] = path, value  # kept alive: an id must not come again
    if isinstance(value, Tensor):
        yield from _tensor(value, path, seen)
    elif isinstance(value, (random.Random, torch.Generator, numpy.random.Generator)):
        yield path, Leaf((_kind(value), _random_state(value)))
    elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)):
        yield path, Leaf((_kind(value), value.__name__))
    elif isinstance(value, types.MethodType):
        yield path, Leaf((_kind(value), value.__name__))
        yield from _leaves(value.__self__, f"{path}.__self__", seen)
    else:
        children = dict(_children(value))
        yield path, Leaf((_kind(value), tuple(children)))
        for name, child in children.items():
            yield from _leaves(child, f"{path}.{name}", seen)


def _kind(value: Any) -> str:
    """Its class; of a converted module the class keeps its name."""
    return type(value).__qualname__


def _tensor(value: Tensor, path: str, seen: dict[int, tuple[str, Any]]) -> Iterator[tuple[str, Leaf]]:
    facts = (_kind(value), tuple(value.shape), value.requires_grad, value.is_inference(), value.layout)
    if value.layout is torch.strided and value.numel():
        owner = seen.setdefault(-value.untyped_storage().data_ptr(), (path, value))[0]
        facts += (f"memory of {owner}",)
    plain = value.detach() if type(value) in (Tensor, nn.Parameter) else value.detach().as_subclass(Tensor)
    dense = plain.to_dense() if value.layout is not torch.strided else plain
    if dense.dtype.is_floating_point or dense.dtype.is_complex:
        number = dense.to(torch.complex128 if dense.dtype.is_complex else torch.float64, copy=True)
        yield path, Leaf(facts, value.dtype, number)
    else:
        yield path, Leaf((*facts, repr(dense.tolist())), value.dtype)
    if value.is_leaf and value.grad is not None:
        yield from _leaves(value.grad, f"{path}.grad", seen)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        for name, child in sorted(value.__dict__.items()):
            if name in _APART:
                continue
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                child = len(child)
            yield name, child
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield f"[{key!r}]" if isinstance(key, _PLAIN) else f"[{_kind(key)}]", child
        yield from _attributes(value)
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        for index, child in enumerate(value):
            yield f"[{index}]", child
        yield from _attributes(value)
    elif isinstance(value, (set, frozenset)):
        for index, child in enumerate(sorted(value, key=repr)):
            yield f"{{{index}}}", child
    elif isinstance(value, enum.Enum):
        yield "name", value.name
    elif not isinstance(value, weakref.ref):
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for name, child in getattr(value, "__dict__", {}).items():
        yield name, child
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _random_state(value: Any) -> str:
    if isinstance(value, random.Random):
        return repr(hash(value.getstate()))
    if isinstance(value, torch.Generator):
        return repr(value.get_state().tolist())
    return repr(value.bit_generator.state)


def error(value: Tensor, reference: Tensor) -> float:
    """The largest difference; infinite where what is not finite differs."""
    if value.shape != reference.shape:
        return math.inf
    if value.dtype is not reference.dtype:
        reference = reference.to(value.dtype)
    finite = torch.isfinite(reference)
    others = value[~finite], reference[~finite]
    if not torch.equal(torch.isfinite(value), finite) or not torch.equal(
        torch.nan_to_num(others[0]), torch.nan_to_num(others[1])
    ):
        return math.inf
    return (value[finite] - reference[finite]).abs().max().item() if finite.any() else 0.0


def size(value: Tensor) -> float:
    """The largest finite magnitude."""
    finite = value[torch.isfinite(value)]
    return finite.abs().max().item() if finite.numel() else 0.0
