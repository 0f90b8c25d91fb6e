"""Decorators for functions that a user wants in one precision, and regions without casts.

::

    @amp.float_function
    def contrastive_loss(a, b): ...

A decorated function casts its arguments and runs outside of autocast, wherever it is called. In a converted model
dynamo captures that as a region, and the passes leave what is in it in the dtypes of its arguments. A promoting
function only casts its arguments to the widest of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from fxprec.amp.casting import cast_arguments, widest
from fxprec.amp.state import Kind, state
from fxprec.model.conversion import conversion_of, is_converted

P = ParamSpec("P")
R = TypeVar("R")


def half_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``fn`` so that its arguments are cast to the low dtype, and it computes in it, at O1 and O2."""
    return decorated(fn, "half")


def float_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``fn`` so that its arguments are cast to FP32, and it computes in it, at O1 and O2."""
    return decorated(fn, "float")


def promote_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``fn`` so that arguments of several float dtypes are cast to the widest, at O1 and O2."""
    return decorated(fn, "promote")


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Cast nothing within the block: models from ``initialize`` run their original forward, in FP32.

    Written inside a model's forward, it is a region in FP32.

    Raises:
        RuntimeError: at O3, where the parameters themselves are low.
    """
    properties = state.opt_properties
    if properties is not None and properties.enabled and properties.level == "O3":
        raise RuntimeError(
            "amp.disable_casts: the parameters themselves are low (O3, or master_weights=False), so nothing runs in "
            "FP32 by leaving casts out. Use O1 or O2"
        )
    inside = torch.compiler.is_compiling()  # the forward that is captured is the model's own already
    bypassed = [] if inside else [conversion_of(model) for model in state.models if is_converted(model)]
    for conversion in bypassed:
        conversion.bypassed += 1
    state.disabled += 1
    try:
        with torch.autocast(state.device, enabled=False):
            yield
    finally:
        state.disabled -= 1
        for conversion in bypassed:
            conversion.bypassed -= 1


def decorated(fn: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    """Make a function cast its arguments, where ``initialize`` lowered something and no ``disable_casts`` is open."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        low = state.low
        if low is None or state.disabled:
            return fn(*args, **kwargs)
        # Promotion changes arguments alone; what the function computes in follows from them.
        if kind == "promote":
            wide = widest(args, kwargs)
            if wide is None:
                return fn(*args, **kwargs)
            return fn(*cast_arguments(args, wide, state.device), **cast_arguments(kwargs, wide, state.device))
        dtype = low if kind == "half" else torch.float32
        with torch.autocast(state.device, enabled=False):
            return fn(*cast_arguments(args, dtype, state.device), **cast_arguments(kwargs, dtype, state.device))

    # Registered functions are decorated once, however often ``initialize`` is called.
    wrapper._fxprec_amp = kind  # type: ignore[attr-defined]
    return wrapper


def is_decorated(value: Any) -> bool:
    """Return whether a function came from ``decorated``."""
    return hasattr(value, "_fxprec_amp")
