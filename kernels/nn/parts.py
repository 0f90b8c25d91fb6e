"""Splits and joins tensors with copies, also of gradients, in words of up to 16 bytes.

Queries, keys and values are parts of one product::

    q, k, v = qkv.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)

torch's backward of ``unbind`` stacks their gradients as [3, B, H, T, D], value by value since they are no neighbours in
memory, and the product's backward copies that to [B, T, 3 * H * D]. ``parts`` allocates the gradient as ``qkv`` lies in
memory, and copies each part to its place in it. On an H200 (GPT-2, 16 x 1024 in bfloat16, torch 2.11, 2026-11-26)
stacking and copying took 3.1 of a step's 37 ms; the bytes take 0.4.

The skips of a U-Net are joined along channels that are next to each other in memory::

    x = torch.cat((x, skip), dim=1)                  # of channels_last

for which torch's kernel took three times as long as the bytes do (1.5 of 28 ms); and the gradients that it gives back
lie apart, so that all who read them are slow. ``join`` copies parts to their places, and gradients from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

__all__ = ["copy_wide", "join", "joins", "parts"]

#: (bytes, dtype) of the words of a copy, the widest first.
_WORDS: Final = ((16, torch.complex128), (8, torch.int64), (4, torch.int32))

Take: TypeAlias = Callable[[Tensor], Sequence[Tensor]]


def parts(x: Tensor, take: Take) -> tuple[Tensor, ...]:
    """Return ``take(x)`` with a backward that copies each part's gradient once, to its place.

    Args:
        x: the gradient gets its memory layout if x is dense.
        take: x -> views of it that share no element, as ``torch.unbind`` and ``torch.split`` make them. It is called
            with the gradient, too.

    Returns:
        the views. As those of ``torch.unbind`` they must not be written in place if they have gradients.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _Parts.apply(x, take)
    return tuple(take(x))


def joins(tensors: Sequence[Tensor], dim: int) -> bool:
    """Return whether ``join`` supports these: the dim is innermost in the memory of all, and rows are whole words."""
    first = tensors[0]
    inner = dim % first.dim() if first.dim() else 0
    if any(x.dtype != first.dtype or x.device != first.device or x.dim() != first.dim() for x in tensors):
        return False
    if any(x.shape[:inner] + x.shape[inner + 1 :] != first.shape[:inner] + first.shape[inner + 1 :] for x in tensors):
        return False  # torch.cat will raise
    layout = torch.channels_last if inner == 1 and first.dim() == 4 else torch.contiguous_format
    if inner != (1 if layout is torch.channels_last else first.dim() - 1):
        return False
    words = all(x.shape[inner] * x.element_size() % _WORDS[0][0] == 0 for x in tensors)
    return words and all(x.is_contiguous(memory_format=layout) for x in tensors)


def join(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return ``torch.cat(tensors, dim)`` if ``joins`` is True; gradients have the tensors' memory layouts."""
    sizes = [x.shape[dim] for x in tensors]
    shape = [*tensors[0].shape]
    shape[dim] = sum(sizes)
    layout = torch.contiguous_format if tensors[0].is_contiguous() else torch.channels_last
    # A meta tensor carries shape and layout of the result.
    like = torch.empty(shape, dtype=tensors[0].dtype, device="meta", memory_format=layout)
    return _Whole.apply(like, tensors[0].device, lambda x: x.split(sizes, dim), *tensors)


def copy_wide(target: Tensor, source: Tensor) -> None:
    """Copy source to target, of equal shape; for equal dtypes in words of up to 16 bytes, if rows hold whole ones."""
    if target.dim() and target.stride(-1) != 1 and 1 in target.stride():
        # Words lie along the dimension that is adjacent in memory: make it the last.
        inner = target.stride().index(1)
        target, source = target.movedim(inner, -1), source.movedim(inner, -1)
    word = None
    if target.dtype == source.dtype and not (source.is_conj() or source.is_neg()):
        word = next((dtype for size, dtype in _WORDS if _holds(target, size) and _holds(source, size)), None)
    if word is not None:
        target, source = target.view(word), source.view(word)
    target.copy_(source)


def _holds(x: Tensor, size: int) -> bool:
    """Return whether the last dim consists of whole, aligned words of ``size`` bytes."""
    item = x.element_size()
    apart = (x.shape[-1:], x.stride()[:-1], [x.storage_offset()]) if x.dim() and x.stride(-1) == 1 else None
    return apart is not None and size > item and not any(n * item % size for each in apart for n in each)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Take) -> tuple[Tensor, ...]:
        # A meta tensor remembers the layout without holding memory.
        ctx.take, ctx.like, ctx.device = take, torch.empty_like(x, device="meta"), x.device
        ctx.set_materialize_grads(False)
        return tuple(take(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(each is None for each in gradients):
            return None, None
        return _Whole.apply(ctx.like, ctx.device, ctx.take, *gradients), None


class _Whole(torch.autograd.Function):
    """Autograd function that joins parts into a tensor like ``like``, with zeros for None: the transpose of _Parts."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, device: torch.device, take: Take, *given: Tensor | None) -> Tensor:
        ctx.take = take
        whole = torch.empty_like(like, device=device)
        for place, values in zip(take(whole), given, strict=True):
            if values is None:
                place.zero_()
            else:
                copy_wide(place, values)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        found = zip(wanted, parts(gradients[0], ctx.take), strict=True)
        return None, None, None, *(_dense(part) if each else None for each, part in found)


def _dense(part: Tensor) -> Tensor:
    """Return a dense copy of a part, unless a double backward is recorded, which the copy would break."""
    if torch.is_grad_enabled():
        return part
    result = torch.empty_like(part)
    copy_wide(result, part)
    return result
