"""The user's classes and functions, and those that a conversion puts in their places.

A wrapper stands in the place of a method and enters the conversion. A user's outer torch.compile breaks at it and keeps
our graphs. While a capture of our own runs, it sees the user's functions in their places: a forward that calls a
converted ``encode`` is one graph still.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, Final

from torch import nn
from torch.compiler import is_dynamo_compiling

from fxprec.capture.capturing import CAPTURING
from fxprec.torch_internals import hide_from_dynamo, shown_to_dynamo

#: In the namespace of a class of ours: the user's class. On a function of ours: what gives the user's function.
ORIGINAL: Final = "_fxprec_original"


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, converted or not, as its user wrote it."""
    cls = type(module)
    return vars(cls).get(ORIGINAL, cls)


def original_function(function: Any) -> Any:
    """Return the user's function in whose place this one stands, or the function itself."""
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
    # A descriptor decides what an instance gets: each kind is called as it would be.
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
        # A descriptor of a built-in function, say: what it gives is asked for at each call.
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


#: What an outer ``torch.compile(fullgraph=True)`` says, which would break there, and a strict ``torch.export``.
NOT_TRACED: Final = (
    "a model converted by fxprec captures its own graphs; to export or compile one, use fxprec.graph_module(model)"
)


class Wrappers:
    """The wrappers of one model, which its captures see through.

    Attributes:
        tracing: id of the thread that traces the model symbolically, if one does: its calls of wrappers run the user's
            functions (``model/swapped.py``).
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[FunctionType] = weakref.WeakSet()
        self.tracing: int | None = None
        self._compiling = 0

    def of_class(self, cls: type[nn.Module], name: str, enter: Callable[..., Any]) -> FunctionType:
        """Make what takes the place of ``cls.name`` in a subclass: ``enter(module, args, kwargs)``."""
        # A plain function is looked up at each call, since the class may get another one later. Of a descriptor that
        # gives another object at each look, the one found now is kept.
        known = unbound_method(cls, name)
        plain = known is getattr(cls, name)

        @functools.wraps(known)
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # dynamo looks into this only in captures of our own (``compiled``), which are to trace the user's method.
            if is_dynamo_compiling():
                return (getattr(cls, name) if plain else known)(self, *args, **kwargs)
            return enter(self, args, kwargs)

        return self._add(method, lambda: getattr(cls, name))

    def of_instance(self, function: Callable[..., Any], enter: Callable[..., Any]) -> Callable[..., Any]:
        """Make what takes the place of a bound function among an instance's attributes: ``enter(args, kwargs)``.

        A bound method for a bound method: some take its ``__func__``, wrap that, and bind it again.
        """
        bound = isinstance(function, MethodType)

        @functools.wraps(function.__func__ if bound else function)
        def method(*args: Any, **kwargs: Any) -> Any:
            given = args[1:] if bound else args
            return function(*given, **kwargs) if is_dynamo_compiling() else enter(given, kwargs)

        wrapper = self._add(method, lambda: function)
        return MethodType(wrapper, function.__self__) if bound else wrapper

    def share(self, wrappers: Iterable[FunctionType]) -> None:
        """See through these, too, which another model of the same class has."""
        self._all.update(wrappers)

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Have the user's own functions run for the time of a symbolic trace in this thread, which holds CAPTURING."""
        self.tracing = threading.get_ident()
        try:
            yield
        finally:
            self.tracing = None

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        """Let dynamo look into the wrappers for the time of one compilation."""
        with CAPTURING, contextlib.ExitStack() as stack:
            # Compilations nest, as dynamo may run wrapped code in one: the outermost shows the wrappers.
            if not self._compiling:
                stack.enter_context(shown_to_dynamo([*self._all]))
            self._compiling += 1
            try:
                yield
            finally:
                self._compiling -= 1

    def _add(self, wrapper: Any, original: Callable[[], Any]) -> FunctionType:
        hide_from_dynamo(wrapper, NOT_TRACED)
        mark(wrapper, ORIGINAL, original)
        self._all.add(wrapper)
        return wrapper
