"""Look into and rebuild what models take and return: pytrees, and the containers that nobody registered as such."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator
from enum import Enum
from operator import is_
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, dtype, nn

from fxprec.torch_internals import tree_flatten, tree_leaves, tree_unflatten

#: Default factories of a dataclass's fields that do nothing but make an empty container; or there is none.
_FRESH: Final = (dataclasses.MISSING, list, dict)

#: What is no container, whatever attributes it has: a part of the program.
_NO_CONTAINERS: Final = (type, nn.Module, FunctionType, ModuleType, Tensor, Enum)
#: Values without parts.
_ATOMS: Final = (str, bytes, int, float, complex, type(None), dtype)

#: What an object holds: as a container, by index or key, and as attributes, by name.
_Parts = tuple[dict[Any, Any], dict[str, Any]]


def restore_dtypes(value: Any, low: dtype, done: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return every tensor of the low dtype as FP32, in the container it came in.

    An object that is there twice is cast once, and stays one object.

    Args:
        done: by id what was met so far, and what became of it.
    """
    if isinstance(value, Tensor) and value.dtype != low:
        return value
    done = {} if done is None else done
    if id(value) not in done:
        restored = _widened(value) if isinstance(value, Tensor) else _restored_container(value, low, done)
        # The value lives as long as its id is a key.
        done[id(value)] = value, restored
    return done[id(value)][1]


def has_low_input(inputs: Any, low: dtype) -> bool:
    """Return whether the caller passed a tensor of the low dtype: then low outputs may be the model's own."""
    return any(isinstance(leaf, Tensor) and leaf.dtype == low for leaf in leaves_of(inputs))


def made_by_namedtuple(kind: type) -> bool:
    """Return whether ``collections.namedtuple`` made the constructor, which then only holds the fields."""
    # A class of the user's may stand between the type and the named tuple.
    made = next((base for base in kind.__mro__ if tuple in base.__bases__), None)
    code = getattr(getattr(made, "__new__", None), "__code__", None)
    return (
        code is not None
        and code.co_filename.startswith("<")  # its source is a text of the standard library's
        and kind.__new__ is made.__new__  # type: ignore[union-attr]
        and kind.__init__ is object.__init__
        and type(kind) is type
    )


def made_by_dataclass(kind: type) -> bool:
    """Return whether calling the class with its fields makes an equal object, and does nothing else."""
    return (
        dataclasses.is_dataclass(kind)
        and type(kind) is type
        and not issubclass(kind, dict | list | tuple)
        and not hasattr(kind, "__post_init__")
        and kind.__new__ is object.__new__
        and _is_generated(kind.__init__)
        and (kind.__setattr__ is object.__setattr__ or _is_generated(kind.__setattr__))  # that of frozen ones
        and all(field.init and field.default_factory in _FRESH for field in dataclasses.fields(kind))
    )


def _is_generated(method: Any) -> bool:
    """Return whether ``dataclass`` wrote a method."""
    return getattr(getattr(method, "__code__", None), "co_filename", "").startswith("<")


def has_more_than(value: Any, names: Container[str]) -> bool:
    """Return whether an object has attributes beside these."""
    return any(name not in names for name in getattr(value, "__dict__", ()))


def leaves_of(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Yield what containers of any kind are made of: pytrees, and objects that hold values in attributes.

    Args:
        value: anything.
        seen: by id what was looked into so far, so that objects may refer to each other.
    """
    seen = {} if seen is None else seen
    for leaf in tree_leaves(value):
        items, attributes = parts_of(leaf) or ({}, attributes_of(leaf))
        if not items and not attributes:
            yield leaf
        elif id(leaf) not in seen:
            seen[id(leaf)] = leaf
            for part in (*items.values(), *attributes.values()):
                yield from leaves_of(part, seen)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds by name, in slots and in its ``__dict__``; nothing where it is no container."""
    if isinstance(value, _ATOMS + _NO_CONTAINERS):
        return {}
    held: dict[str, Any] = {}
    for base in type(value).__mro__:
        if "__slots__" in vars(base):
            for name, slot in vars(base).items():
                if isinstance(slot, MemberDescriptorType):
                    with contextlib.suppress(AttributeError):  # an empty one
                        held[name] = slot.__get__(value)
    return {**held, **getattr(value, "__dict__", {})}


def _widened(value: Tensor) -> Tensor:
    """Return a tensor as FP32: of an inference tensor another one, else with its gradient, under ``no_grad`` too."""
    with torch.inference_mode(value.is_inference()), torch.set_grad_enabled(not value.is_inference()):
        return value.float()


def _restored_container(value: Any, low: dtype, done: dict[int, tuple[Any, Any]]) -> Any:
    parts = parts_of(value)
    if parts is not None:
        items, attributes = ({key: restore_dtypes(part, low, done) for key, part in held.items()} for held in parts)
        same = all(map(is_, items.values(), parts[0].values())) and all(
            map(is_, attributes.values(), parts[1].values())
        )
        return value if same else _remade(value, items, attributes)
    leaves, spec = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        _restore_attributes(value, low, done)
        return value
    restored = [restore_dtypes(leaf, low, done) for leaf in leaves]
    if all(new is old for new, old in zip(restored, leaves, strict=True)):
        return value
    return tree_unflatten(restored, spec)


def _restore_attributes(value: Any, low: dtype, done: dict[int, tuple[Any, Any]]) -> None:
    """Cast the tensors in an object's attributes, in place, as nobody knows how to make another object of its class."""
    done[id(value)] = value, value  # it may hold itself
    for name, part in attributes_of(value).items():
        restored = part if isinstance(part, _ATOMS) else restore_dtypes(part, low, done)
        if restored is not part:
            object.__setattr__(value, name, restored)  # of a frozen one, too


def parts_of(value: Any) -> _Parts | None:
    """Return what a container or dataclass holds; None for anything else."""
    # Tensors first: where dynamo traces a graph module, they have no ``__dict__`` to look into.
    if isinstance(value, Tensor):
        return None
    attributes = attributes_of(value)
    if isinstance(value, dict):
        return dict(value), attributes
    # torch.return_types and the like, which pytree knows.
    of_pytree = hasattr(type(value), "n_sequence_fields")
    if isinstance(value, list) or (isinstance(value, tuple) and not of_pytree):
        return dict(enumerate(value)), attributes
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.name in attributes]
        return {}, {**{name: attributes[name] for name in names}, **attributes}  # its fields first, in their order
    return None


def _remade(value: Any, items: dict[Any, Any], attributes: dict[str, Any]) -> Any:
    """Make an object of the same class with other parts, without its constructor, which may do more than hold them."""
    kind = type(value)
    if isinstance(value, tuple):
        made = tuple.__new__(kind, items.values())
    elif isinstance(value, list):
        made = list.__new__(kind)
        list.extend(made, items.values())
    elif isinstance(value, dict):
        base: Any = next(base for base in (OrderedDict, defaultdict, dict) if isinstance(value, base))
        made = base.__new__(kind)
        for key, part in items.items():
            base.__setitem__(made, key, part)
        if isinstance(value, defaultdict):
            made.default_factory = value.default_factory
    else:
        made = object.__new__(kind)
    for name, part in attributes.items():
        object.__setattr__(made, name, part)  # of a frozen one, too
    return made
