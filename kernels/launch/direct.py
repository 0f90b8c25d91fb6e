"""Shortens calls of kernels: decisions made for tensors of given shapes and strides are cached by these.

Between the kernels of a model Python is slow, since the model's tensors evict its data from the caches. Checking for
tracers and gradients, and choosing a kernel and its arguments, took 10 us of a fused region in a loop of its own, and
50 in a frozen BERT whose kernels take 20. If no tracer is active, as in the programs of a frozen model
(``packed_weights``), all of this depends only on the tensors' metadata and on whether a gradient is wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

#: A function of tensors with the shapes, strides and dtypes of those that it was prepared for.
Run: TypeAlias = Callable[..., Any]

_shape: Final = attrgetter("shape")
_dtype: Final = attrgetter("dtype")
_device: Final = attrgetter("device")
_wanted: Final = attrgetter("requires_grad")
_strides: Final = Tensor.stride
_negated: Final = Tensor.is_neg
#: Patterns of tensors that a call remembers. A model that calls it with ever new shapes keeps the latest.
_MOST: Final = 64
_LOCK: Final = threading.Lock()


def direct(
    name: str, whole: Run, prepare: Callable[..., Run | None], switched: Callable[..., None] = lambda *_: None
) -> Run:  # fmt: skip
    """Return ``whole`` with a cache of prepared functions, for plain tensors outside of any tracer.

    Args:
        name: of the function that is returned.
        whole: runs the first call of each pattern of tensors, and every call that ``prepare`` returned None for.
        prepare: returns for tensors the function that runs later calls of their pattern and grad mode, or None.
        switched: is called with the tensors when their pattern differs from that of the call before.
    """
    known: dict[Any, Run] = {}
    latest: tuple[Any, Run] = (None, whole)  # one tuple: another thread sees both of it or none

    def run(*tensors: Tensor) -> Any:
        nonlocal latest
        facts = (
            torch.is_grad_enabled(), [*map(_shape, tensors)], [*map(_strides, tensors)], [*map(_dtype, tensors)],
            [*map(_device, tensors)], [*map(_wanted, tensors)], [*map(_negated, tensors)],
        )  # fmt: skip
        before, found = latest
        if facts != before:
            key = (facts[0], *map(tuple, facts[1:]))
            known_run = known.get(key)
            if known_run is None:
                latest = None, whole
                result = whole(*tensors)
                # Prepared after the first call, which has compiled and checked what the shorter way relies on.
                made = prepare(*tensors) or whole
                with _LOCK:
                    while len(known) >= _MOST:
                        del known[next(iter(known))]
                    known[key] = made
                return result
            switched(*tensors)
            found = known_run
            latest = facts, found
        return found(*tensors)

    run.__name__ = run.__qualname__ = name
    return run
