"""Finds active tracers, modes and transforms, which must see ops one by one or would keep tensors for too long.

``watcher(COMPILER, TRANSFORM)`` returns the first of them that is active in this thread. Which ones matter depends on
the caller: a kernel that is a torch op hides from no dispatch mode, and a fake mode may see it; a persistent copy of a
weight must not be made under one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fxprec.kernels.torch_internals import (
    DispatchModeKey,
    current_dispatch_mode,
    disable_current_modes,
    dispatch_modes,
    forward_ad_level,
    function_transform_level,
    is_fx_tracing,
    jit_tracing_state,
    set_jit_tracing_state,
)

#: Modes of torch's own whose tensors hold no values.
_TRACING: Final = (DispatchModeKey.FAKE, DispatchModeKey.PROXY, DispatchModeKey.FUNCTIONAL)


@dataclass(frozen=True, eq=False, slots=True)
class Interceptor:
    """Tracer, mode or transform: its ``name`` in messages, and how to ask whether it is active in this thread.

    ``state`` is torch's own function where possible, since every call of a kernel asks. It returns ``off`` while
    nothing is active: a level of forward-mode differentiation counts from 0.
    """

    name: str
    state: Callable[[], object]
    off: object = None


def tracing_mode() -> object | None:
    """Return torch's active tracing or fake mode, or None. A persistent tensor would enter its graph as a constant."""
    # As a rule no mode is on, which one number tells.
    if dispatch_modes():
        for key in _TRACING:
            if (mode := current_dispatch_mode(key)) is not None:
                return mode
    return None


COMPILER: Final = Interceptor("a compiler", torch.compiler.is_compiling, off=False)
TRANSFORM: Final = Interceptor("a torch.func transform", function_transform_level)  # from 1; None: there is none
DUAL: Final = Interceptor("forward-mode differentiation", forward_ad_level, off=-1)
SCRIPT: Final = Interceptor("torch.jit.trace", jit_tracing_state)
FX: Final = Interceptor("torch.fx.symbolic_trace", is_fx_tracing, off=False)
TRACING: Final = Interceptor("a tracing mode", tracing_mode)
PROXY: Final = Interceptor("a tracer", lambda: dispatch_modes() > 0 and get_proxy_mode() is not None, off=False)
ANY_MODE: Final = Interceptor("a dispatch mode", dispatch_modes, off=0)


def watcher(*asked: Interceptor) -> Interceptor | None:
    """Return the first of these that is active in this thread, or None."""
    for each in asked:
        if each.state() != each.off:
            return each
    return None


def runs_eagerly() -> bool:
    """Return whether this op runs at once, on values, with nobody to look into it.

    A compiler or tracer would unroll what a kernel of ours does; vmap and forward mode have no rule for it.
    """
    return watcher(COMPILER, SCRIPT, TRANSFORM, DUAL) is None


def runs_unseen() -> bool:
    """Return whether an op ``runs_eagerly``, and no dispatch mode counts, traces or saves ops either."""
    return watcher(COMPILER, SCRIPT, TRANSFORM, DUAL, ANY_MODE) is None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Suspend this thread's dispatch modes and ``torch.jit.trace``: a capture inside is no part of what they record."""
    # torch.jit.trace is no dispatch mode: it has a state of its own.
    state = jit_tracing_state()
    with disable_current_modes():
        set_jit_tracing_state(None)
        try:
            yield
        finally:
            set_jit_tracing_state(state)
