"""Bytes that the hand-written kernels move, forward and backward: what a tensor's first read or write costs.

``tests/kernels/nn`` compares these with the accesses of the compiled kernels. Not counted: values per row or channel
where none are named, second reads that a cache has, partial sums (a few hundred rows of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


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


def group_norm(shape: Sequence[int], x: torch.dtype, parameters: Sequence[torch.dtype] = ()) -> tuple[int, int]:
    """Of x [N, C, *]; a group that no tile holds is read twice, the second time mostly from a cache.

    Args:
        parameters: dtypes of weight and bias, as many as there are.
    """
    small = shape[1] * sum(dtype.itemsize for dtype in parameters)
    return 2 * prod(shape) * x.itemsize + small, 3 * prod(shape) * x.itemsize + 2 * small


def max_pool2d(
    x: Tensor, kernel_size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[int, int]:
    """The image in, a result and a byte for each out; those in, the image's gradient out."""
    out = x.shape[0] * x.shape[1]
    for size, *window in zip(x.shape[2:], kernel_size, stride, padding, strict=True):
        out *= (size + 2 * window[2] - window[0]) // window[1] + 1
    return (x.numel() + out) * x.itemsize + out, (x.numel() + out) * x.itemsize + out


def rope(*tensors: Tensor, cos: Tensor, sin: Tensor) -> int:
    """Of a launch, forward or backward: every tensor in and out, cos and sin once."""
    return sum(2 * x.numel() * x.itemsize for x in tensors) + cos.numel() * cos.itemsize + sin.numel() * sin.itemsize
