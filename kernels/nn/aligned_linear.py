"""A linear whose rows begin on 16 bytes: the logits of a vocabulary of 50257, say.

Matrix products of low precision move 16 bytes at once on tensor cores. Rows of 50257 values lie next to each other in
memory, so that seven of eight begin elsewhere, and cuBLAS takes a kernel that reads and writes value by value: on an
H200 (torch 2.11) the three products of GPT-2's logits took 30 of the 70 ms of a step. Here a row is given a pitch of
whole 16 bytes, and what is between two rows is never read::

    y = x @ weight.T + bias        y: [M, N], its rows ceil(N / 8) * 8 apart
    dx = dy @ weight               dy: copied to such rows, where it does not come in them
    dweight = dy.T @ x

Same products, same accumulation in FP32, and as much memory but for the pitch. torch.compile pads the operands instead.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

_LINE: Final = 16


def aligned_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``, with rows that begin on 16 bytes.

    Args:
        input: [..., K] in float16 or bfloat16, as ``weight`` [N, K] and ``bias`` [N] or None are.

    Returns:
        [..., N]: a view of rows that lie further apart than N values where these are no whole 16 bytes.
    """
    rows = input.reshape(-1, input.shape[-1])
    operands = (rows, weight) if bias is None else (rows, weight, bias)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    y = _Aligned.apply(*operands) if wanted else _product(*operands)
    return y.view(*input.shape[:-1], len(weight))


def pitch_of(columns: int, itemsize: int) -> int:
    """Elements from one row to the next, where rows begin on 16 bytes."""
    return -(-columns * itemsize // _LINE) * _LINE // itemsize


def aligned_rows(x: Tensor) -> Tensor:
    """[M, N] in rows that begin on 16 bytes: ``x`` itself, or a copy."""
    if x.stride(1) == 1 and x.stride(0) * x.element_size() % _LINE == x.data_ptr() % _LINE == 0:
        return x
    return _empty(x.shape[0], x.shape[1], x).copy_(x)


def _empty(rows: int, columns: int, like: Tensor) -> Tensor:
    return like.new_empty_strided((rows, columns), (pitch_of(columns, like.element_size()), 1))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _empty(len(x), len(weight), x)
    return torch.mm(x, weight.t(), out=y) if bias is None else torch.addmm(bias, x, weight.t(), out=y)


class _Aligned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (x, weight), (dy,) = ctx.saved_tensors, gradients
        if not torch.is_grad_enabled():  # else it is differentiated itself
            dy = aligned_rows(dy)
        wanted = ctx.needs_input_grad
        return (
            dy @ weight if wanted[0] else None,
            dy.t() @ x if wanted[1] else None,
            *(dy.sum(0) if each else None for each in wanted[2:]),
        )
