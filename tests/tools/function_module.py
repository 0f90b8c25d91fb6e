"""A plain function as a module, as ``convert`` makes one of it: static capture takes modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["as_module"]


def as_module(function: Callable[..., Any]) -> nn.Module:
    """A module whose forward is the function."""
    module = nn.Module()
    module.__dict__["forward"] = function
    return module
