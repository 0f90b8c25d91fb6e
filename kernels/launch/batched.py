"""Runs a backward once for each gradient of a batch, as ``torch.autograd.grad(is_grads_batched=True)`` passes them.

Its vmap is the legacy one: batched tensors have no memory that a kernel could read, and no torch.func transform is
active that would tell.
``torch.autograd.functional``'s ``jacobian`` and ``hessian`` come to it with ``vectorize=True``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.torch_internals import add_batch_dim, is_batched, remove_batch_dim

#: Level of the legacy vmap, which is never nested.
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
    saved = ctx.saved_tensors  # held: no backward may think itself the last reader and overwrite them
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
