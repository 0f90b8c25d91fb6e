"""Calls of kernels by the shortest way: what was decided for tensors that lie in one way is kept, and found by that.

Between the kernels of a model Python is slow, since the model's tensors take its place in the caches: what asks who
looks on, whether a gradient is wanted, which kernel serves and how its tensors are walked took 10 us of a fused region
in a loop of its own, and 50 in a frozen BERT whose kernels take 20. All of this depends on how the tensors lie and on
whether a gradient is wanted, where nobody looks on, as in the programs of a frozen model (``packed_weights``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

#: Of tensors that lie as those of the call for which it was made.
Run: TypeAlias = Callable[..., Any]

_shape: Final = attrgetter("shape")
_dtype: Final = attrgetter("dtype")
_device: Final = attrgetter("device")
_wanted: Final = attrgetter("requires_grad")
_strides: Final = Tensor.stride
_negated: Final = Tensor.is_neg
#: Ways that a call remembers. A model that calls it with ever new shapes keeps the latest.
_MOST: Final = 64
_LOCK: Final = threading.Lock()


def direct(
    name: str, whole: Run, prepare: Callable[..., Run | None], switched: Callable[..., None] = lambda *_: None
) -> Run:  # fmt: skip
    """``whole``, of plain tensors, where nobody looks into the ops; tensors alone are arguments.

    Args:
        name: of the function that is returned.
        whole: runs the first call with tensors that lie in one way, and those that nothing shorter serves.
        prepare: makes of such tensors what runs the others, in the same grad mode; or None.
        switched: is told of tensors that lie otherwise than those of the call before.
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
