"""An untouched method of a module, as its entry point runs and watches it."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from operator import attrgetter, is_
from types import FunctionType
from typing import Any, Final

from torch import nn

from fxprec.capture.originals import defined_method, original_class, unbound_method
from fxprec.capture.stepwise import steps_of
from fxprec.model.method_names import MethodName
from fxprec.model.twins import asks_for_class, twin_of

_PARTS: Final = attrgetter("__code__", "__defaults__", "__kwdefaults__")


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
        """Take the method's code as it is now for unchanged."""
        self._twin: nn.Module | None = None
        self._function = getattr(self.original_class, self.name.name, None)
        self._defined = defined_method(self.original_class, self.name.name)
        self._code = _parts_of(self._function)
        for name in ("signature", "steps", "_asks_for_class"):
            self.__dict__.pop(name, None)

    @property
    def code_changed(self) -> bool:
        """Flag: the class got another function since, or the function other code or defaults."""
        if self.of_instance is not None:
            return False
        function = getattr(self.original_class, self.name.name, None)
        if function is not self._function:  # of some descriptors it is another one at each look
            return defined_method(self.original_class, self.name.name) is not self._defined
        return not all(map(is_, _parts_of(function), self._code))

    def stand_in(self, module: nn.Module) -> nn.Module:
        """Return the object that the untouched method runs on: ``module``, or a twin where it may ask for the class."""
        if not self._asks_for_class or type(module) is self.original_class:
            return module
        if self._twin is None or self._twin.__dict__ is not module.__dict__:
            self._twin = twin_of(module)  # one for all calls: dynamo's guards know it
        return self._twin

    @functools.cached_property
    def _asks_for_class(self) -> bool:
        return self.of_instance is None and asks_for_class(self.original_class)

    @property
    def unbound(self) -> Callable[..., Any]:
        """The untouched method as a function whose first argument is the module."""
        bound = self.of_instance
        if bound is None:
            return unbound_method(self.original_class, self.name.name)
        return lambda _, *args, **kwargs: bound(*args, **kwargs)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """Signature of the original, without self."""
        if self.of_instance is not None:
            return inspect.signature(self.of_instance)
        signature = inspect.signature(self.unbound)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    @functools.cached_property
    def steps(self) -> str | None:
        """Object that a call makes in place of running the method, such as "a generator"; None: it runs the method."""
        return steps_of(self.unbound if self.of_instance is None else self.of_instance)

    @property
    def whole(self) -> str:
        """Name of the whole method, for a report."""
        return "the whole forward" if self.key == "forward" else f"the whole of {self.key}"

    @property
    def called_here(self) -> str:
        """Name of the method in a sentence."""
        return "the forward" if self.key == "forward" else self.key


def _parts_of(function: Any) -> tuple[Any, ...]:
    return _PARTS(function) if type(function) is FunctionType else ()
