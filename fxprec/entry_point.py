"""One method of a converted model: its untouched code, and how its graphs are captured."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from fxprec.dynamic import DynamicGraphs
from fxprec.settings import Settings
from fxprec.static import StaticGraphs
from fxprec.stepwise import steps_of
from fxprec.weights import Weights

__all__ = ["EntryPoint"]


class EntryPoint:
    """What a converted module runs in the place of one of its methods.

    Args:
        settings, weights: those of the conversion.
        name: of the method.
        original_class: the class of the module before its conversion.
        of_instance: a function that the instance itself has under that name, already bound; None: the class has it.
        net: makes the context for what runs outside of the graphs.
    """

    def __init__(
        self,
        settings: Settings,
        weights: Weights,
        name: str,
        original_class: type[torch.nn.Module],
        of_instance: Callable[..., Any] | None,
        net: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.name = name
        self.original_class = original_class
        self.of_instance = of_instance
        self._settings, self._weights, self._net = settings, weights, net
        self.start_over()

    def start_over(self) -> None:
        """Forget every capture: the code is another one now."""
        self.static = StaticGraphs(self._settings.capture)
        self.dynamic = DynamicGraphs(self._settings, self._weights, self._net, lambda: self.unbound)
        self.__dict__.pop("signature", None)
        self.__dict__.pop("steps", None)

    @property
    def unbound(self) -> Callable[..., Any]:
        """The untouched method as a function whose first argument is the module."""
        bound = self.of_instance
        if bound is None:
            return getattr(self.original_class, self.name)
        return lambda _, *args, **kwargs: bound(*args, **kwargs)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """That of the original, without self."""
        if self.of_instance is not None:
            return inspect.signature(self.of_instance)
        signature = inspect.signature(self.unbound)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    @functools.cached_property
    def steps(self) -> str | None:
        """What a call makes in place of running the method, such as a generator; None: it runs it."""
        return steps_of(self.unbound if self.of_instance is None else self.of_instance)
