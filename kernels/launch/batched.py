"""Gradients in a batch, as ``torch.autograd.grad(is_grads_batched=True)`` hands them to a backward.

Its vmap is of the old kind: tensors without memory of their own, which no kernel can read, and no transform that shows.
``torch.autograd.functional``'s ``jacobian`` and ``hessian`` come to it with ``vectorize=True``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.torch_internals import add_batch_dim, is_batched, remove_batch_dim

#: Of that vmap, which is never within another of its kind.
_LEVEL: Final = 1


def one_by_one(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward of a torch.autograd.Function that runs once a gradient where they come in a batch."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        for grad in grads:
            if isinstance(grad, Tensor) and is_batched(grad):
                return _each(backward, ctx, grads)
        return backward(ctx, *grads)

    return run


def _each(backward: Callable[..., Any], ctx: Any, grads: Sequence[Any]) -> tuple[Tensor | None, ...]:
    batches = {
        place: remove_batch_dim(grad, _LEVEL, 1, 0).unbind()
        for place, grad in enumerate(grads)
        if isinstance(grad, Tensor) and is_batched(grad)
    }
    saved = ctx.saved_tensors  # held, so that no backward takes itself for the last that reads them, and writes there
    results: list[tuple[Any, ...]] = []
    for number in range(len(next(iter(batches.values())))):
        given = [batches[place][number] if place in batches else grad for place, grad in enumerate(grads)]
        found = backward(ctx, *given)
        results.append(found if isinstance(found, tuple) else (found,))
    del saved
    return tuple(
        None if any(gradient is None for gradient in gradients) else add_batch_dim(torch.stack(gradients), 0, _LEVEL)
        for gradients in zip(*results, strict=True)
    )
