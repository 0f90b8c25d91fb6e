"""Weights whose gradient stays in the low dtype: marked by an attribute, cast to their shadow without a cast back."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fxprec.errors import ConversionError

__all__ = ["cast_with_low_gradient", "mark", "refuse_ddp", "wants_low_gradient", "widened"]

#: Of a parameter whose optimizer reads low gradients: "step", or "accumulate" too.
_MARK = "_fxprec_low_gradient"


def mark(weight: Tensor, how: str) -> None:
    """From its next shadow on the gradient is low; ``how``: "step", or "accumulate" too."""
    setattr(weight, _MARK, how)


def wants_low_gradient(weight: Tensor) -> bool:
    """Whether it was marked, and has a gradient."""
    return getattr(weight, _MARK, None) is not None and weight.requires_grad


def cast_with_low_gradient(weight: Any, dtype: torch.dtype) -> Tensor:
    """``weight.to(dtype)`` whose backward hands the low gradient on.

    Raises:
        ConversionError: DistributedDataParallel is running.
    """
    refuse_ddp()
    shadow: Any = _LowGradient.apply(weight, dtype)
    weight.grad_dtype = dtype
    return shadow


def widened(weights: Iterable[Tensor]) -> list[Tensor]:
    """Give those that are not to be accumulated low FP32 gradients again, for good, and return them."""
    narrow: list[Any] = [weight for weight in weights if getattr(weight, _MARK, None) == "step"]
    for weight in narrow:
        gradient, weight.grad = weight.grad, None
        weight.grad_dtype = weight.dtype
        weight.grad = gradient if gradient is None else gradient.to(weight.dtype)
        delattr(weight, _MARK)
    return narrow


def refuse_ddp() -> None:
    """A ConversionError within DDP's forward: its reducer would fail in the backward, and say less."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is not None and parallel.DistributedDataParallel._active_ddp_module is not None:
        raise ConversionError(
            "low_gradients=True under DistributedDataParallel, whose reducer takes gradients of the parameters' dtype "
            "only: leave low_gradients out"
        )


class _LowGradient(torch.autograd.Function):
    """The identity in the backward: the weight's ``grad_dtype`` is low."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return weight.detach().to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
