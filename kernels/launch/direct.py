"""Calls of kernels by the shortest way: what was decided for tensors that lie in one way is kept, and found by that.

Between the kernels of a model Python is slow, since the model's tensors take its place in the caches: what asks who
looks on, whether a gradient is wanted, which kernel serves and how its tensors are walked took 10 us of a fused region
in a loop of its own, and 50 in a frozen BERT whose kernels take 20. All of this depends on shapes, strides, dtypes and
devices where nobody looks on and no gradient is wanted, as in the programs of a frozen model (``packed_weights``).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, TypeAlias

from torch import Tensor

#: Of tensors that lie as those of the call for which it was made.
Run: TypeAlias = Callable[..., Any]

_shape: Final = attrgetter("shape")
_dtype: Final = attrgetter("dtype")
_device: Final = attrgetter("device")
_strides: Final = Tensor.stride
#: Ways that a call remembers. A model that calls it with ever new shapes keeps the latest.
_MOST: Final = 64


def direct(name: str, whole: Run, prepare: Callable[..., Run | None]) -> Run:
    """``whole``, of plain tensors that want no gradients, where nobody looks into the ops; tensors alone are arguments.

    Args:
        name: of the function that is returned.
        whole: runs the first call with tensors that lie in one way, and those that nothing shorter serves.
        prepare: makes of such tensors what runs the others, or None.
    """
    known: dict[Any, Run] = {}
    latest: tuple[Any, Run] = (None, whole)  # one tuple: another thread sees both of it or none

    def run(*tensors: Tensor) -> Any:
        nonlocal latest
        facts = [*map(_shape, tensors)], [*map(_strides, tensors)], [*map(_dtype, tensors)], [*map(_device, tensors)]
        before, found = latest
        if facts != before:
            key = tuple(map(tuple, facts))
            if key not in known:
                result = whole(*tensors)
                while len(known) >= _MOST:
                    known.pop(next(iter(known)), None)
                known[key] = prepare(*tensors) or whole
                return result
            found = known.get(key, whole)
            latest = facts, found
        return found(*tensors)

    run.__name__ = run.__qualname__ = name
    return run
