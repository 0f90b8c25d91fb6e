"""Bytes that the hand-written kernels move, forward and backward: what a tensor's first read or write costs.

``tests/kernels/nn`` compares these with the accesses of the compiled kernels. Not counted: values per row or channel
where none are named, second reads that a cache has, partial sums (a few hundred rows of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from fxprec.kernels.nn.norm_launch import BACKWARD_COLUMNS


def batch_norm(dtype: torch.dtype, *, training: bool, residual: bool = False, relu: bool = False) -> tuple[int, int]:
    """For each element, of tensors all of one dtype; in the backward every input wants a gradient."""
    forward = 2 + int(training) + int(residual)
    backward = 5 + 2 * int(residual and relu)  # y is read, and dresidual written; without relu it is dy itself
    return forward * dtype.itemsize, backward * dtype.itemsize


def cross_entropy(
    rows: int, columns: int, dtype: torch.dtype, *, target: torch.dtype = torch.int64, gradient_in_forward: bool = False
) -> tuple[int, int]:
    """Of logits [rows, columns] without class weights, a mean included.

    Args:
        target: int64 or uint8 labels, or the dtype of probabilities.
        gradient_in_forward: counted for a gradient of the loss of 1. A row of more than 4096 columns is read a
            second time there, at once after the first: from the L2 cache as a rule, which this does not count (it does
            with probabilities, of which forward and backward are launches of their own).
    """
    logits = rows * columns * dtype.itemsize
    targets = rows * target.itemsize * (columns if target.is_floating_point else 1)
    row = 4 + 12  # the loss, which the reduction reads again, and the statistics
    shares = 0 if target.is_floating_point else 4 * rows
    if gradient_in_forward and target.is_floating_point:
        return 3 * logits + 2 * targets + rows * (row + 4 + 12), 0
    if gradient_in_forward:
        return 2 * logits + 2 * targets + rows * (row + 4), 0
    return logits + targets + rows * (row + 4) + 2 * shares, 2 * logits + targets + 12 * rows


def norm(
    rows: int,
    columns: int,
    x: torch.dtype,
    *,
    center: bool,
    residual: torch.dtype | None = None,
    y: torch.dtype | None = None,
    parameters: Sequence[torch.dtype] = (),
    dropout: bool = False,
) -> tuple[int, int]:
    """Of layer norm (``center``) or RMS norm, with every gradient wanted.

    Args:
        x: dtype of x; likewise residual and y (x's without it).
        parameters: dtypes of weight and bias, as many as there are.
    """
    y = y or x
    s = x if residual is None else torch.promote_types(x, residual)
    small = 4 * rows * (1 + center) + columns * sum(dtype.itemsize for dtype in parameters)
    forward = x.itemsize + y.itemsize + (0 if residual is None else residual.itemsize + s.itemsize)
    backward = y.itemsize + s.itemsize
    if residual is None:
        backward += x.itemsize
    else:
        one = residual == x and not dropout
        backward += s.itemsize + residual.itemsize + (0 if one else x.itemsize)
    if columns > BACKWARD_COLUMNS and parameters:
        backward += y.itemsize + s.itemsize
    gradients = columns * sum(dtype.itemsize for dtype in parameters)
    return rows * columns * forward + small, rows * columns * backward + small + gradients


def group_norm(shape: Sequence[int], x: torch.dtype, parameters: Sequence[torch.dtype] = ()) -> tuple[int, int]:
    """Of x [N, C, *]; a group that no tile holds is read twice, the second time mostly from a cache.

    Args:
        parameters: dtypes of weight and bias, as many as there are.
    """
    small = shape[1] * sum(dtype.itemsize for dtype in parameters)
    return 2 * prod(shape) * x.itemsize + small, 3 * prod(shape) * x.itemsize + 2 * small


def softmax(
    x: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    output_dtype: torch.dtype | None = None,
) -> tuple[int, int]:
    """Every element once, a broadcast mask once for all who read it. A causal mask halves what is read."""
    n, columns = x.numel(), x.shape[-1]
    queries = x.shape[-2] if x.dim() > 1 else 1
    seen = sum(min(i + 1, columns) for i in range(queries)) * (n // max(1, queries * columns)) if causal else n
    entries = 0 if mask is None else mask.numel() * mask.itemsize
    out = (output_dtype or x.dtype).itemsize
    again = seen * x.itemsize + entries if dropout_p > 0 else seen * out
    return seen * x.itemsize + entries + n * out, again + seen * out + n * x.itemsize


def glu(gate: Tensor, up: Tensor) -> tuple[int, int]:
    """Gate and up in, the result out; those and dy in, two gradients out."""
    both = gate.numel() * gate.itemsize + up.numel() * up.itemsize
    out = gate.numel() * torch.promote_types(gate.dtype, up.dtype).itemsize
    return both + out, 2 * both + out


def rope(*tensors: Tensor, cos: Tensor, sin: Tensor) -> int:
    """Of a launch, forward or backward: every tensor in and out, cos and sin once."""
    return sum(2 * x.numel() * x.itemsize for x in tensors) + cos.numel() * cos.itemsize + sin.numel() * sin.itemsize
