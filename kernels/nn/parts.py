"""Parts of a tensor whose gradients are put together in one pass, where the tensor has its own.

Queries, keys and values are parts of one product::

    q, k, v = qkv.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)

torch's backward of ``unbind`` stacks their gradients as [3, B, H, T, D], value by value since they are no neighbours in
memory, and the product's backward copies that to [B, T, 3 * H * D]. Here the gradient is allocated as ``qkv`` lies in
memory, and each part is copied to its place in it, 16 bytes at once where they lie so. On an H200 (GPT-2, 16 x 1024,
bfloat16, torch 2.11, 2026-11-26) stacking and copying took 3.1 of a step's 37 ms; the bytes take 0.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

__all__ = ["copy_wide", "parts"]

#: Dtypes that stand for so many bytes of a copy, the widest first.
_WORDS: Final = ((16, torch.complex128), (8, torch.int64), (4, torch.int32))

Take: TypeAlias = Callable[[Tensor], Sequence[Tensor]]


def parts(x: Tensor, take: Take) -> tuple[Tensor, ...]:
    """``take(x)``.

    Args:
        x: whose memory the gradient is laid out as, where no two elements share it and none lie between them.
        take: x -> views of it that share no element, as ``torch.unbind`` and ``torch.split`` make them. It is called
            with the gradient, too.

    Returns:
        the views. As those of ``torch.unbind`` they are not written in place where they have gradients.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _Parts.apply(x, take)
    return tuple(take(x))


def copy_wide(target: Tensor, source: Tensor) -> None:
    """``target.copy_(source)`` of equal shape and dtype, in words of up to 16 bytes where rows and strides hold."""
    word = next((dtype for size, dtype in _WORDS if _holds(target, size) and _holds(source, size)), None)
    if word is not None:
        target, source = target.view(word), source.view(word)
    target.copy_(source)


def _holds(x: Tensor, size: int) -> bool:
    """Whether its last dim is whole words of so many bytes, each of which begins at a multiple of them."""
    item = x.element_size()
    apart = (x.shape[-1:], x.stride()[:-1], [x.storage_offset()]) if x.dim() and x.stride(-1) == 1 else None
    return apart is not None and size > item and not any(n * item % size for each in apart for n in each)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Take) -> tuple[Tensor, ...]:
        ctx.take, ctx.like, ctx.device = take, torch.empty_like(x, device="meta"), x.device
        ctx.set_materialize_grads(False)
        return tuple(take(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(each is None for each in gradients):
            return None, None
        return _Whole.apply(ctx.like, ctx.device, ctx.take, *gradients), None


class _Whole(torch.autograd.Function):
    """The transpose: a tensor like ``like`` whose parts are given; zeros where they are None."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, device: torch.device, take: Take, *given: Tensor | None) -> Tensor:
        ctx.take, ctx.given = take, [each is not None for each in given]
        whole = torch.empty_like(like, device=device)
        for place, values in zip(take(whole), given, strict=True):
            if values is None:
                place.zero_()
            else:
                copy_wide(place, values)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = zip(ctx.given, parts(gradients[0], ctx.take), strict=True)
        return None, None, None, *(part if given else None for given, part in found)
