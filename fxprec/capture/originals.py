"""The user's classes and functions behind those that a conversion puts in their places."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

from torch import nn

#: In the namespace of a class of ours: the user's class. On a function of ours: what gives the user's function.
ORIGINAL: Final = "_fxprec_original"


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, converted or not, as its user wrote it."""
    cls = type(module)
    return vars(cls).get(ORIGINAL, cls)


def original_function(function: Any) -> Any:
    """The user's function in whose place this one stands, or the function itself."""
    gives: Callable[[], Any] | None = marked(function, ORIGINAL)
    return function if gives is None else gives()


def mark(function: FunctionType, name: str, value: Any) -> None:
    """Note something on a function of ours."""
    function.__dict__[name] = weakref.ref(function), value


def marked(function: Any, name: str) -> Any:
    """Return what was noted on this very function, or None; ``functools.wraps`` copies notes to one around it."""
    of, value = getattr(function, "__dict__", {}).get(name, (None, None))
    return value if of is not None and of() is getattr(function, "__func__", function) else None


def defined_method(cls: type[nn.Module], name: str) -> Any:
    """Return what a class has under this name, before a descriptor makes anything of it, or None."""
    return inspect.getattr_static(cls, name, None)


def unbound_method(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return what an instance's ``name`` runs, as a function whose first argument is the instance.

    A class may have a function there; or a property that gives one, a static method, a callable that takes no self.
    """
    found = getattr(cls, name)
    raw = defined_method(cls, name)
    if isinstance(raw, FunctionType):
        return found
    if isinstance(raw, property):
        gives: Any = raw.fget

        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return gives(self)(*args, **kwargs)

    elif isinstance(raw, staticmethod | classmethod) or not hasattr(raw, "__get__"):

        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return found(*args, **kwargs)

    elif not has_signature(found):

        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return raw.__get__(self, type(self))(*args, **kwargs)

    else:
        return found
    method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
    return method


def has_signature(function: Any) -> bool:
    """Return whether a callable has a signature, which ``torch.matmul`` and the like, built in, have not."""
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        return False
    return True
