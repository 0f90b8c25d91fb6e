"""Temporary replacements in torch while a forward is traced: what a graph cannot hold raises instead of vanishing.

``torch.fx`` runs ``with torch.no_grad():`` while it traces and records nothing of it; the same goes for autocast
regions and for the forward of an autograd.Function, whose backward would be lost. Each passes through one function.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from types import ClassMethodDescriptorType, FunctionType, ModuleType
from typing import Any, Final

import torch

from fxprec.torch_internals import function_apply, fx_tracer_file, grad_modes

_GRAD_MODE: Final = "sets or asks for the grad mode (no_grad, enable_grad, set_grad_enabled, inference_mode)"

_FUNCTION: Final = "calls a torch.autograd.Function"

#: (owner, attribute, what the forward does that calls it).
TRIPWIRES: Final[tuple[tuple[Any, str, str], ...]] = (
    *((owner, name, _GRAD_MODE) for owner, name in grad_modes),
    (torch, "is_grad_enabled", _GRAD_MODE),
    (torch, "is_inference_mode_enabled", _GRAD_MODE),
    (torch, "set_autocast_enabled", "enters a torch.autocast region"),
    (torch, "set_autocast_dtype", "sets the dtype of torch.autocast"),
    (torch.autograd.Function, "apply", _FUNCTION),
    (*function_apply, _FUNCTION),
)


def trips(target: Any) -> str | None:
    """Return what a function does that no graph can hold ("enters a torch.autocast region"), or None."""
    return next((what for owner, name, what in TRIPWIRES if vars(owner).get(name) is target), None)


@contextlib.contextmanager
def replaced(replacements: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of modules and classes, and take every one back on the way out, whatever is raised."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.callback(_restore, owner, name, vars(owner).get(name, _restore))
            setattr(owner, name, value)
        yield


def _restore(owner: ModuleType | type, name: str, value: Any) -> None:
    if value is not _restore:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def tripwires(decline: Callable[[str], Any]) -> list[tuple[Any, str, Any]]:
    """Replacements that call ``decline`` in this thread; other threads go on as ever."""
    tracing = threading.get_ident()

    def wire(original: Any, what: str) -> Any:
        of_class = isinstance(original, classmethod | ClassMethodDescriptorType)  # the latter is written in C

        def tripped(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == tracing:
                decline(what)
            if not of_class:
                return original(*args, **kwargs)
            cls, *rest = args
            return original.__get__(None, cls)(*rest, **kwargs)

        tripped.__wrapped__ = getattr(original, "__func__", original)  # type: ignore[attr-defined]
        return classmethod(tripped) if of_class else tripped

    return [(owner, name, wire(inspect.getattr_static(owner, name), what)) for owner, name, what in TRIPWIRES]


def unpatched(value: Any) -> Any:
    """Return the function that a patched one takes the place of while a trace runs, or the value itself."""
    if isinstance(value, FunctionType) and value.__code__.co_filename in (__file__, fx_tracer_file):
        return getattr(value, "__wrapped__", value)
    return value
