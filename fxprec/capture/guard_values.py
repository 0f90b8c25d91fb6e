"""Which values a guard can hold, and which globals a traced function reads."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any, Final

import torch
from torch import nn

from fxprec.passes.torch_internals import OpOverload, OpOverloadPacket

__all__ = ["UNGUARDED", "guarded_copy", "plain_reads"]


class _Unguarded(enum.Enum):
    UNGUARDED = "unguarded"


#: For an object whose inside can change without anybody noticing, such as a config object.
UNGUARDED: Final = _Unguarded.UNGUARDED

_NUMBERS_AND_NAMES: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_UNCHANGING: Final = (
    *_NUMBERS_AND_NAMES,
    enum.Enum,
    range,
    slice,
    type,
    type(...),
    nn.Module,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    OpOverload,
    OpOverloadPacket,
)
_SEQUENCES: Final = frozenset({tuple, torch.Size, list, set, frozenset, deque})
_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict})


def guarded_copy(value: Any) -> Any:
    """What a later value is compared with: the value itself, a copy of a container, or UNGUARDED."""
    kind = type(value)
    if kind in _NUMBERS_AND_NAMES or isinstance(value, _UNCHANGING):
        return value
    if kind in _SEQUENCES:
        copies = [guarded_copy(element) for element in value]
        return UNGUARDED if UNGUARDED in _identities(copies) else (tuple if kind is torch.Size else kind)(copies)
    if kind in _MAPPINGS:
        copied = {key: guarded_copy(element) for key, element in value.items()}
        return UNGUARDED if UNGUARDED in _identities(copied.values()) else copied
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        copies = [guarded_copy(element) for element in value]
        return UNGUARDED if UNGUARDED in _identities(copies) else kind(*copies)
    if is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return value
    return UNGUARDED


def _identities(values: Iterable[Any]) -> list[Any]:
    """Only the sentinels: ``in`` would compare everything else by value."""
    return [value for value in values if value is UNGUARDED]


def plain_reads(functions: Iterable[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Numbers, strings and None that these functions read from globals and closures.

    Their code is searched, and that of the functions they name, without torch's and the standard library's. Attributes
    of other modules and mutable globals are not found.

    Returns:
        (globals, names and values) for each namespace, (cell, {name: value}) for each closure variable.
    """
    namespaces: dict[int, tuple[Any, dict[str, Any]]] = {}
    seen: set[int] = set()
    stack = [function for function in functions if isinstance(function, types.FunctionType)]
    while stack:
        function = stack.pop()
        if id(function) in seen or _is_library(function):
            continue
        seen.add(id(function))
        scope = function.__globals__
        for name in _names(function.__code__):
            if name not in scope:
                continue
            value = scope[name]
            if type(value) in _NUMBERS_AND_NAMES:
                namespaces.setdefault(id(scope), (scope, {}))[1][name] = value
            elif isinstance(value, types.FunctionType):
                stack.append(value)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = getattr(cell, "cell_contents", None)
            if isinstance(value, types.FunctionType):
                stack.append(value)
            elif type(value) in _NUMBERS_AND_NAMES:
                namespaces[id(cell)] = (cell, {name: value})
    return list(namespaces.values())


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _is_library(function: types.FunctionType) -> bool:
    package = str(function.__globals__.get("__name__", "")).partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names
