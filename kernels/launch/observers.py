"""Who is watching: somebody who must see the ops themselves, or would keep what is made now beyond its time.

``watcher(COMPILER, TRANSFORM)`` names the first of them that is on in this thread. What counts depends on who asks: a
kernel that is a torch op hides from no dispatch mode, and a fake mode may well see it; a weight's copy that is to last
must not be made under one.
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

#: Modes of torch's own whose tensors are no tensors to run on.
_TRACING: Final = (DispatchModeKey.FAKE, DispatchModeKey.PROXY, DispatchModeKey.FUNCTIONAL)


@dataclass(frozen=True, eq=False, slots=True)
class Watcher:
    """One who may watch: ``name``, as a message has it, and what is truthy while it is on in this thread.

    ``is_on`` is torch's own function where it can be: it is asked at every call of a kernel.
    """

    name: str
    is_on: Callable[[], object]


def tracing_mode() -> object | None:
    """The mode of torch's own that traces or fakes what runs now: a persistent tensor would enter it as a constant."""
    if dispatch_modes():
        for key in _TRACING:
            if (mode := current_dispatch_mode(key)) is not None:
                return mode
    return None


COMPILER: Final = Watcher("a compiler", torch.compiler.is_compiling)
TRANSFORM: Final = Watcher("a torch.func transform", function_transform_level)  # from 1; None: there is none
DUAL: Final = Watcher("forward-mode differentiation", lambda: forward_ad_level() >= 0)
SCRIPT: Final = Watcher("torch.jit.trace", jit_tracing_state)
FX: Final = Watcher("torch.fx.symbolic_trace", is_fx_tracing)
TRACING: Final = Watcher("a tracing mode", tracing_mode)
PROXY: Final = Watcher("a tracer", lambda: dispatch_modes() > 0 and get_proxy_mode() is not None)
ANY_MODE: Final = Watcher("a dispatch mode", dispatch_modes)


def watcher(*asked: Watcher) -> Watcher | None:
    """The first of these that watches now, or None."""
    for each in asked:
        if each.is_on():
            return each
    return None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """What runs within is no part of what a dispatch mode or ``torch.jit.trace`` in this thread records: a capture."""
    state = jit_tracing_state()
    with disable_current_modes():
        set_jit_tracing_state(None)
        try:
            yield
        finally:
            set_jit_tracing_state(state)
