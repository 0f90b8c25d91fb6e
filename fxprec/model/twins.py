"""A module as it was before its conversion: of the user's own class, with the very same attributes.

A conversion swaps the class of the model, and ``type(self)`` tells: ``super(type(self), self)`` finds the forward in
which it stands, ``type(self) is Net`` is false, ``type(self).calls += 1`` writes to another class. Symbolic traces run
on a twin, and so does all other code that asks for the class. The model itself stays as it is: other threads call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Final

from torch import nn

from fxprec.capture.code_reads import names_in
from fxprec.capture.originals import original_class
from fxprec.capture.trusted import is_library

_ASKED_BY: Final = frozenset({"type", "__class__"})


def twin_of(module: nn.Module) -> nn.Module:
    """A new one."""
    twin = object.__new__(original_class(module))
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin


def asks_for_class(cls: type) -> bool:
    """Return whether code of a class, or a function that it calls by a global name, may ask for an object's class."""
    bases = (base for base in cls.__mro__ if not (is_library(base) or base is object))
    seen: set[CodeType] = set()
    return any(_asks(function, seen) for base in bases for function in _functions(base))


def _asks(function: FunctionType, seen: set[CodeType]) -> bool:
    if function.__code__ in seen or is_library(function):
        return False
    seen.add(function.__code__)
    names = names_in(function.__code__)
    if not _ASKED_BY.isdisjoint(names):
        return True
    called = (function.__globals__.get(name) for name in names)
    return any(isinstance(value, FunctionType) and _asks(value, seen) for value in called)


def _functions(cls: type) -> Iterator[FunctionType]:
    """Yield the functions in a class's namespace, in whatever descriptor."""
    for value in vars(cls).values():
        for each in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "func", "__wrapped__"))):
            if isinstance(each, FunctionType):
                yield each
