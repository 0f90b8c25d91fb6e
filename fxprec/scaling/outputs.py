"""Losses, or outputs, times the scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor


def scaled(outputs: Any, times_scale: Callable[[Tensor], Tensor]) -> Any:
    """``outputs`` times the scale; low precision is cast to FP32 first, where 65536 times a loss would be inf.

    Args:
        outputs: a floating-point tensor, or an iterable of them, nested or not. Lists, tuples and namedtuples come back
            as what they were, other iterables as an iterator (as torch's scaler does).
        times_scale: a tensor -> its product with the scale.

    Raises:
        TypeError: anything else.
    """
    if isinstance(outputs, Tensor):
        if not (outputs.is_floating_point() or outputs.is_complex()):
            raise TypeError(f"a loss of {outputs.dtype} has no gradient: scale floating-point tensors")
        return times_scale(outputs.float() if outputs.dtype.itemsize < 4 else outputs)
    if isinstance(outputs, (str, bytes, Mapping)) or not isinstance(outputs, Iterable):
        raise TypeError(f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}")
    parts = (scaled(part, times_scale) for part in outputs)
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(*parts) if hasattr(outputs, "_fields") else type(outputs)(parts)
    return parts
