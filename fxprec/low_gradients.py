"""Weights whose gradient stays in the low dtype: marked by their optimizer, cast to their shadow without a cast back.

Marks are beside the weights, not in them: a pickled weight would take an attribute along, to where no optimizer of ours
reads its gradient.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fxprec.errors import ConversionError

__all__ = ["cast_with_low_gradient", "mark", "refuse_ddp", "wants_low_gradient", "widen", "widened"]


def mark(weight: Tensor, how: str) -> None:
    """From its next shadow on the gradient is low; ``how``: "step", or "accumulate" too."""
    _marks()[weight] = how


def wants_low_gradient(weight: Tensor) -> bool:
    """Whether it was marked, and has a gradient."""
    return weight.requires_grad and weight in _marks()


def cast_with_low_gradient(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight.to(dtype)`` whose backward hands the low gradient on. A gradient that is there already is rounded.

    Walked at every step, the edge must be torch's own (a Python autograd.Function takes longer than the cast that it
    saves, where weights are small) and lead to the weight's one AccumulateGrad, which ``torch.autograd.grad`` and hooks
    go by. Of torch's operators that cast, ``slice_scatter`` is one whose backward does not: it is a view.

    Raises:
        ConversionError: DistributedDataParallel is running.
    """
    refuse_ddp()
    _set_grad_dtype(weight, dtype)
    if not weight.dim():  # nothing to slice: one number is cast there and back
        return weight.to(dtype)
    return torch.slice_scatter(torch.empty_like(weight, dtype=dtype), weight)


def widen(weights: Iterable[Tensor]) -> None:
    """Marked ones without a shadow have gradients of their own dtype, until the next one is made."""
    for weight in weights:
        if weight in _marks():
            _set_grad_dtype(weight, weight.dtype)


def widened(weights: Iterable[Tensor], how: tuple[str, ...] = ("step",)) -> list[Tensor]:
    """Give those that were marked so FP32 gradients again, for good, and return them: their shadows are to go."""
    marks = _marks()
    narrow = [weight for weight in weights if marks.get(weight) in how]
    for weight in narrow:
        _set_grad_dtype(weight, weight.dtype)
        del marks[weight]
    return narrow


def refuse_ddp() -> None:
    """A ConversionError within DDP's forward: its reducer would fail in the backward, and say less."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is not None and parallel.DistributedDataParallel._active_ddp_module is not None:
        raise ConversionError(
            "low_gradients=True under DistributedDataParallel, whose reducer takes gradients of the parameters' dtype "
            "only: leave low_gradients out"
        )


@functools.cache
def _marks() -> WeakTensorKeyDictionary:
    """Weight -> "step", or "accumulate" too."""
    return WeakTensorKeyDictionary()


def _set_grad_dtype(weight: Any, dtype: torch.dtype) -> None:
    gradient = weight.grad
    if gradient is None or gradient.dtype is dtype:
        weight.grad_dtype = dtype
    else:  # which torch refuses to change while there is another
        weight.grad = None
        weight.grad_dtype = dtype
        weight.grad = gradient.to(dtype)
