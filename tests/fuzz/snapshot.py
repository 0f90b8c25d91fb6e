"""Everything that can be reached from some objects, as a flat list of (path, value): numbers, tensors, references."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import random
import types
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Leaves", "leaves_of"]

Leaves = list[tuple[str, Any]]

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range}
)
#: Attributes of nn.Module that are empty, or whose keys are numbers drawn by the process; and what a module is called
#: through by ``module.compile()``.
_MODULE = frozenset(
    {name for name in vars(nn.Module()) if name not in ("training", "_parameters", "_buffers", "_modules")}
    | {"_compiled_call_impl"}
)


#: Beside what begins with the library's name: a wrapper's function.
_NOT_THE_MODEL_S = ("__wrapped__",)


def leaves_of(value: Any, namespace: str) -> Leaves:
    """``namespace``: the name of the module whose classes and functions are looked into."""
    walk = _Walk(namespace)
    walk.visit("", value)
    return walk.leaves


class _Walk:
    def __init__(self, namespace: str) -> None:
        self.leaves: Leaves = []
        self._namespace = namespace
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def visit(self, path: str, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.leaves.append((path, value.replace(self._namespace, "") if kind is str else value))
            return
        if issubclass(kind, torch.fx.Proxy):  # which says of itself that it is a tensor
            self.leaves.append((path, "a stand-in that a trace left behind"))
            return
        if isinstance(value, Tensor):
            self.leaves.append((path, value.detach().clone()))
            if value.requires_grad:
                self.leaves.append((path + " requires grad", True))
            if value.is_inference():
                self.leaves.append((path + " is an inference tensor", True))
            return
        known = self._seen.get(id(value))
        if known is not None:
            self.leaves.append((path, f"object {known}"))
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        self._inside(path, value, kind)

    def _inside(self, path: str, value: Any, kind: type) -> None:
        self.leaves.append((path, kind.__qualname__))
        if isinstance(value, dict):
            self._items(path, value)
        elif isinstance(value, list | tuple | deque):
            for i, element in enumerate(value):
                self.visit(f"{path}[{i}]", element)
        elif isinstance(value, set | frozenset):
            self.leaves.append((path, sorted(map(repr, value))))
        elif isinstance(value, nn.Module):
            self._attributes(path, {k: v for k, v in vars(value).items() if k not in _MODULE and k != "forward"})
        elif isinstance(value, types.FunctionType):
            if value.__module__ == self._namespace:
                self.visit(path + ".__defaults__", value.__defaults__)
                self.visit(path + ".__kwdefaults__", value.__kwdefaults__)
                for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                    self.visit(f"{path}.{name}", _content(cell))
            self._attributes(path, vars(value))
        elif isinstance(value, types.MethodType):
            self.visit(path + ".__self__", value.__self__)
        elif isinstance(value, functools.partial):
            self.visit(path + ".partial", (value.func, value.args, value.keywords))
        elif isinstance(value, enum.Enum):
            self.leaves.append((path, value.name))
        elif isinstance(value, type):
            if value.__module__ == self._namespace and not issubclass(value, enum.Enum):
                self._attributes(path, {k: v for k, v in vars(value).items() if k[:2] != "__" and not _of_class(v)})
        elif isinstance(value, random.Random):
            self.leaves.append((path, value.getstate()[1][-1]))
        elif isinstance(value, np.ndarray):
            self.leaves.append((path, value.tolist()))
        elif isinstance(value, np.random.Generator):
            self.leaves.append((path, str(value.bit_generator.state["state"])))
        elif isinstance(value, types.ModuleType):
            if hasattr(value, "__file__") or value.__spec__ is not None:
                return
            self._attributes(path, {k: v for k, v in vars(value).items() if k[:2] != "__"})
        elif dataclasses.is_dataclass(value) or kind.__module__ in (self._namespace, "types"):
            self._attributes(path, getattr(value, "__dict__", {}))
            for name in getattr(kind, "__slots__", ()):
                self.visit(f"{path}.{name}", getattr(value, name, "unset"))
        elif kind is itertools.count:
            self.leaves.append((path, repr(value)))

    def _items(self, path: str, value: dict[Any, Any]) -> None:
        for key, element in value.items():
            self.visit(f"{path}[{key!r}]", element)

    def _attributes(self, path: str, value: Any) -> None:
        for name, element in value.items():
            if not name.startswith("_fxprec") and name not in _NOT_THE_MODEL_S:
                self.visit(f"{path}.{name}", element)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _of_class(value: Any) -> bool:
    return isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
