"""Weights whose gradient stays in the low dtype: marked by their optimizer, cast to their shadow without a cast back.

Marks are beside the weights, not in them: a pickled weight would take an attribute along, to where no optimizer of ours
reads its gradient.
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
    """That the gradient of a weight be low; ``how``: "step", or "accumulate" too. Counts for as long as it is kept."""

    how: str


class Wishes:
    """The wishes of one optimizer, which keeps them.

    With them it keeps the weights, as it does anyway: a weak reference, which ``torch.utils.swap_tensors`` refuses, is
    needed only once the optimizer is gone.
    """

    def __init__(self, weights: Iterable[Tensor], how: str) -> None:
        self._of = [(weight, Wish(how)) for weight in weights]
        _wishes().update((id(weight), wish) for weight, wish in self._of)  # the last wish counts

    def __del__(self) -> None:
        if not sys.is_finalizing():
            _orphans().update((weight, wish) for weight, wish in self._of if _wishes().get(id(weight)) is wish)


def wish_for(weight: Tensor) -> Wish | None:
    """The wish for a weight that has a gradient, if there is one."""
    return _wishes().get(id(weight)) if weight.requires_grad else None


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
        if id(weight) in _wishes():
            _set_grad_dtype(weight, weight.dtype)


def widened(weights: Iterable[Tensor], how: tuple[str, ...] = ("step",)) -> list[Tensor]:
    """Give those that were marked so FP32 gradients again, for good, and return them: their shadows are to go."""
    wishes = _wishes()
    narrow = [weight for weight in weights if (wish := wishes.get(id(weight))) is not None and wish.how in how]
    for weight in narrow:
        _set_grad_dtype(weight, weight.dtype)
        del wishes[id(weight)]
    return narrow


def refuse_ddp() -> None:
    """A ConversionError within DDP's forward: its reducer would fail in the backward, and say less."""
    if running_ddp() is not None:
        raise ConversionError(
            "low_gradients=True under DistributedDataParallel, whose reducer takes gradients of the parameters' dtype "
            "only: leave low_gradients out"
        )


@functools.cache
def _orphans() -> WeakTensorKeyDictionary:
    """Keeps wishes whose optimizers are gone for as long as their weights."""
    return WeakTensorKeyDictionary()


@functools.cache
def _wishes() -> weakref.WeakValueDictionary[int, Wish]:
    """id of a weight -> what it was marked with."""
    return weakref.WeakValueDictionary()


def _set_grad_dtype(weight: Any, dtype: torch.dtype) -> None:
    gradient = weight.grad
    if gradient is None or gradient.dtype is dtype:
        weight.grad_dtype = dtype
    else:  # which torch refuses to change while there is another
        weight.grad = None
        weight.grad_dtype = dtype
        weight.grad = gradient.to(dtype)
