"""Keeps gradients of weights in the low dtype: optimizers mark weights, and their shadows' edges do not cast back.

Marks are kept beside the weights, not in them: a pickled weight would take an attribute along, to a process in which no
optimizer of ours reads its gradient.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fxprec.errors import ConversionError
from fxprec.torch_internals import running_ddp


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Wish:
    """Mark of a weight whose gradient is to be low, for as long as it is referenced.

    ``how``: "step", or "accumulate" for accumulated gradients too.
    """

    how: str


class Wishes:
    """Marks of one optimizer's weights; the optimizer holds them.

    While the optimizer lives, its marks hold the weights, as it does itself. When it goes they move to ``_orphans``,
    which refers to weights weakly: ``torch.utils.swap_tensors`` refuses such weights, so that comes last.
    """

    def __init__(self, weights: Iterable[Tensor], how: str) -> None:
        self._of = [(weight, Wish(how)) for weight in weights]
        _wishes().update((id(weight), wish) for weight, wish in self._of)  # the last wish counts

    def __del__(self) -> None:
        if not sys.is_finalizing():
            _orphans().update((weight, wish) for weight, wish in self._of if _wishes().get(id(weight)) is wish)


def wish_for(weight: Tensor) -> Wish | None:
    """Return the mark of a weight that requires a gradient, or None."""
    return _wishes().get(id(weight)) if weight.requires_grad else None


def cast_with_low_gradient(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``weight.to(dtype)`` whose backward passes the low gradient on. An existing gradient is rounded.

    Run at every step, the edge must be torch's own (for small weights a Python autograd.Function takes longer than the
    cast that it saves) and lead to the weight's one AccumulateGrad, which ``torch.autograd.grad`` and hooks rely on.
    The forward of ``slice_scatter`` casts, and its backward, a view, does not.

    Raises:
        ConversionError: DistributedDataParallel is running.
    """
    # DDP's buckets have the dtype of the parameters.
    refuse_ddp()
    _set_grad_dtype(weight, dtype)
    # Nothing to slice: one number is cast both ways.
    if not weight.dim():
        return weight.to(dtype)
    return torch.slice_scatter(torch.empty_like(weight, dtype=dtype), weight)


def widen(weights: Iterable[Tensor]) -> None:
    """Let marked weights whose shadow was dropped have gradients of their own dtype, until there is another shadow."""
    for weight in weights:
        if id(weight) in _wishes():
            _set_grad_dtype(weight, weight.dtype)


def widened(weights: Iterable[Tensor], how: tuple[str, ...] = ("step",)) -> list[Tensor]:
    """Unmark weights marked ``how``, and make their gradients FP32 again. The caller is to drop their shadows.

    Returns them.
    """
    wishes = _wishes()
    narrow = [weight for weight in weights if (wish := wishes.get(id(weight))) is not None and wish.how in how]
    for weight in narrow:
        _set_grad_dtype(weight, weight.dtype)
        del wishes[id(weight)]
    return narrow


def refuse_ddp() -> None:
    """Raise ConversionError within DDP's forward: its reducer would fail in the backward with a worse message."""
    if running_ddp() is not None:
        raise ConversionError(
            "low_gradients=True under DistributedDataParallel, whose reducer takes gradients of the parameters' dtype "
            "only: leave low_gradients out"
        )


@functools.cache
def _orphans() -> WeakTensorKeyDictionary:
    """Return the wishes whose optimizers are gone, each kept for as long as its weight."""
    return WeakTensorKeyDictionary()


@functools.cache
def _wishes() -> weakref.WeakValueDictionary[int, Wish]:
    """Return the wishes by the ids of their weights."""
    return weakref.WeakValueDictionary()


def _set_grad_dtype(weight: Any, dtype: torch.dtype) -> None:
    gradient = weight.grad
    if gradient is None or gradient.dtype is dtype:
        weight.grad_dtype = dtype
    else:  # torch refuses to change grad_dtype while a gradient of another dtype is there
        weight.grad = None
        weight.grad_dtype = dtype
        weight.grad = gradient.to(dtype)
