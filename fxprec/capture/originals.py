"""The user's classes and functions behind those that a conversion puts in their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import nn

__all__ = ["ORIGINAL", "original_class", "original_function"]

#: In the namespace of a class of ours: the user's class. On a function of ours: what gives the user's function.
ORIGINAL: Final = "_fxprec_original"


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, converted or not, as its user wrote it."""
    cls = type(module)
    return vars(cls).get(ORIGINAL, cls)


def original_function(function: Any) -> Any:
    """The user's function in whose place this one stands, or the function itself."""
    gives: Callable[[], Any] | None = getattr(function, "__dict__", {}).get(ORIGINAL)
    return function if gives is None else gives()
