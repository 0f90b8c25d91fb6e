"""An untouched method of a module, as its entry point runs and watches it.

A conversion swaps the class of the model, and ``type(self)`` tells: ``super(type(self), self)`` finds the forward in
which it stands, ``type(self) is Net`` is false, ``type(self).calls += 1`` writes to another class. So symbolic traces
run on a twin, an object of the user's own class with the very same attributes, and so does all other code that asks for
the class. The model itself stays as it is: other threads call it.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import is_
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

from torch import nn

from fxprec.capture.code_reads import names_in
from fxprec.capture.facts import function_parts
from fxprec.capture.originals import defined_method, original_class, unbound_method
from fxprec.capture.stepwise import steps_of
from fxprec.capture.user_code import is_library

_ASKED_BY: Final = frozenset({"type", "__class__"})


def twin_of(module: nn.Module) -> nn.Module:
    """Return a new twin of a module."""
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
    # The functions that it calls by a global name, and those that they call, may be helpers that take ``self``.
    called = (function.__globals__.get(name) for name in names)
    return any(isinstance(value, FunctionType) and _asks(value, seen) for value in called)


def _functions(cls: type) -> Iterator[FunctionType]:
    """Yield the functions in a class's namespace, in whatever descriptor."""
    for value in vars(cls).values():
        for each in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "func", "__wrapped__"))):
            if isinstance(each, FunctionType):
                yield each


@dataclass(frozen=True, slots=True)
class MethodName:
    """A method: the path of its module in the model ("" for the model itself), and its name there."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    @classmethod
    def parse(cls, text: str) -> MethodName:
        """Return the name that ``str`` wrote so."""
        path, _, name = text.rpartition(".")
        return cls(path, name)


class Method:
    """A method of the model, or of a submodule, as it was before the conversion.

    Args:
        name: of the method.
        number: tells it from others of that name.

    Attributes:
        owner: weakly, the module that has the method; None before it was adopted.
        of_instance: a function that the instance itself has under that name, already bound; None: the class has it.
    """

    def __init__(self, name: MethodName, number: int) -> None:
        self.name = name
        self.number = number
        self.key = str(name)
        self.owner: Callable[[], nn.Module | None] = lambda: None
        self.original_class: type[nn.Module] = nn.Module
        self.of_instance: Callable[..., Any] | None = None
        self.look_again()

    def adopt(self, owner: nn.Module, of_instance: Callable[..., Any] | None = None) -> None:
        """Make it a method of this module from now on."""
        self.owner, self.original_class, self.of_instance = weakref.ref(owner), original_class(owner), of_instance

    def look_again(self) -> None:
        """Take the code as it is now as what ``code_changed`` compares with; forget what came of another one."""
        self._twin: nn.Module | None = None
        self._function = getattr(self.original_class, self.name.name, None)
        self._defined = defined_method(self.original_class, self.name.name)
        self._code = function_parts(self._function) if type(self._function) is FunctionType else None
        for name in ("signature", "runs_later", "_asks_for_class"):
            self.__dict__.pop(name, None)

    @property
    def code_changed(self) -> bool:
        """Return whether the class got another function since, or the function other code or defaults."""
        if self.of_instance is not None:
            return False
        function = getattr(self.original_class, self.name.name, None)
        # Of some descriptors it is another one at each look.
        if function is not self._function:
            return defined_method(self.original_class, self.name.name) is not self._defined
        return self._code is not None and not all(map(is_, function_parts(function), self._code))

    def stand_in(self, module: nn.Module) -> nn.Module:
        """Return what the untouched method runs on: ``module``, or a twin of the original class.

        The twin, where the method's code may ask for the class; it shares the module's ``__dict__``.
        """
        # Code that never asks for the class may run on the model itself, which hooks and threads know.
        if not self._asks_for_class or type(module) is self.original_class:
            return module
        if self._twin is None or self._twin.__dict__ is not module.__dict__:
            # One for all calls: dynamo's guards know it.
            self._twin = twin_of(module)
        return self._twin

    @functools.cached_property
    def _asks_for_class(self) -> bool:
        return self.of_instance is None and asks_for_class(self.original_class)

    @property
    def unbound(self) -> Callable[..., Any]:
        """Return the untouched method as a function whose first argument is the module."""
        bound = self.of_instance
        if bound is None:
            return unbound_method(self.original_class, self.name.name)
        return lambda _, *args, **kwargs: bound(*args, **kwargs)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """Return the signature of the original, without self."""
        if self.of_instance is not None:
            return inspect.signature(self.of_instance)
        signature = inspect.signature(self.unbound)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    @functools.cached_property
    def runs_later(self) -> str | None:
        """Return what a call makes at once, such as "a generator", if the code runs only when that is iterated."""
        return steps_of(self.unbound if self.of_instance is None else self.of_instance)

    @property
    def whole(self) -> str:
        """Name of the whole method, for a report."""
        return "the whole forward" if self.key == "forward" else f"the whole of {self.key}"

    @property
    def called_here(self) -> str:
        """Name of the method in a sentence."""
        return "the forward" if self.key == "forward" else self.key


class Call(NamedTuple):
    """A call of a method of a converted model.

    Attributes:
        method: what was called, as it was before the conversion.
        model: the converted model.
        module: the module of it that has the method.
    """

    method: Method
    model: nn.Module
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def untouched(self) -> Any:
        """Run the method as the user wrote it."""
        return self.method.unbound(self.method.stand_in(self.module), *self.args, **self.kwargs)
