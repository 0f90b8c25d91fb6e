"""What a function that stands around a method does there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

#: Functions around functions that are looked through: frameworks put two or three around a forward.
_DEPTH: Final = 8


def enters_autocast(function: Callable[..., Any]) -> bool:
    """Return whether ``torch.autocast`` decorates a function, or a function that it wraps.

    ``torch.autocast("cpu")(forward)`` keeps the context in its closure, as does what Accelerate sets on a model.
    """
    return any(isinstance(value, torch.autocast) and value._enabled for value in _held(function, _DEPTH))


def _held(function: Any, depth: int) -> Iterator[Any]:
    """Yield what a function has in its closure, and what the functions there have."""
    function = getattr(function, "__func__", function)
    cells = getattr(function, "__closure__", None) or ()
    held = [getattr(function, "__wrapped__", None), getattr(function, "func", None)]  # the latter of a partial
    for cell in cells:
        with contextlib.suppress(ValueError):  # it is empty yet
            held.append(cell.cell_contents)
    for value in held:
        yield value
        if depth and callable(value) and not isinstance(value, type | nn.Module):
            yield from _held(value, depth - 1)
