"""The functions that stand in the places of a converted module's methods: each enters the conversion.

A user's outer torch.compile breaks at them and keeps our graphs. While a capture of our own runs, it sees the user's
functions in their places: a forward that calls a converted ``encode`` is one graph still.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, Final

from torch import nn
from torch.compiler import is_dynamo_compiling

from fxprec.capture.capturing import CAPTURING
from fxprec.capture.originals import ORIGINAL, mark, unbound_method
from fxprec.torch_internals import hide_from_dynamo, shown_to_dynamo

#: What an outer ``torch.compile(fullgraph=True)`` says, which would break there, and a strict ``torch.export``.
NOT_TRACED: Final = (
    "a model converted by fxprec captures its own graphs; to export or compile one, use fxprec.graph_module(model)"
)


class Wrappers:
    """The wrappers of one model, which its captures see through."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[FunctionType] = weakref.WeakSet()
        self._tracing: int | None = None
        self._compiling = 0

    def of_class(self, cls: type[nn.Module], name: str, enter: Callable[..., Any]) -> FunctionType:
        """Make what takes the place of ``cls.name`` in a subclass: ``enter(module, args, kwargs)``."""
        known = unbound_method(cls, name)
        plain = known is getattr(cls, name)

        @functools.wraps(known)
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():  # for a capture of ours: from any other one it is hidden
                return (getattr(cls, name) if plain else known)(self, *args, **kwargs)
            return enter(self, args, kwargs)

        return self._add(method, lambda: getattr(cls, name))

    def of_instance(self, function: Callable[..., Any], enter: Callable[..., Any]) -> Callable[..., Any]:
        """Make what takes the place of a bound function among an instance's attributes: ``enter(args, kwargs)``.

        A bound method for a bound method: some take its ``__func__``, wrap that, and bind it again.
        """
        if isinstance(function, MethodType):

            @functools.wraps(function.__func__)
            def bound(_: Any, *args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if is_dynamo_compiling() else enter(args, kwargs)

            return MethodType(self._add(bound, lambda: function), function.__self__)

        @functools.wraps(function)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_dynamo_compiling() else enter(args, kwargs)

        return self._add(method, lambda: function)

    def share(self, wrappers: Iterable[FunctionType]) -> None:
        """See through these, too, which another model of the same class has."""
        self._all.update(wrappers)

    @property
    def traced_here(self) -> bool:
        """Return whether this thread traces the model: then the user's own functions run."""
        return self._tracing is not None and self._tracing == threading.get_ident()

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """For the time of a symbolic trace in this thread, which holds CAPTURING."""
        self._tracing = threading.get_ident()
        try:
            yield
        finally:
            self._tracing = None

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        """For the time of one compilation by dynamo, which looks into the wrappers."""
        with CAPTURING, contextlib.ExitStack() as stack:
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
