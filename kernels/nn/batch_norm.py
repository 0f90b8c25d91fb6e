"""Fuses batch norm, the sum with a residual, and relu; torch's three kernels each read and write everything::

    y = relu?((x - mean) * rstd * weight + bias [+ residual])        rstd = 1 / sqrt(var + eps)

is one kernel after those of the statistics (batch_norm_statistics.py, two), rounded once; with running statistics it
is one kernel in all. The backward (batch_norm_backward.py) is two: sums over the batch, then dx. Convolutions come
before and after, so channels_last, their own format, is what these kernels are for; contiguous tensors work as well.

Bytes moved for each element, with batch statistics and in bfloat16::

                                    forward    backward    eager, forward     eager, backward
    batch norm                      6          10          6                  10
    batch norm, relu                6          10          10                 16
    batch norm, residual, relu      8          14          16                 16

Statistics, their use and all sums are FP32. Nothing depends on the order in which programs run: no atomics.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fxprec.kernels.launch.kernel_op import KernelOp, eager_gradients
from fxprec.kernels.launch.operands import check_operands, packed
from fxprec.kernels.launch.triton_support import Bound, can_launch, constexpr, jit, tl
from fxprec.kernels.nn.batch_norm_backward import BACKWARD, plain
from fxprec.kernels.nn.batch_norm_statistics import STATISTICS, channel_statistics
from fxprec.kernels.nn.batch_norm_tiles import (
    FORWARD_BYTES,
    OPTIONS,
    STAGES,
    aligned,
    channel_terms,
    cut,
    cut_arguments,
    dense,
    divided,
    like,
    normalized,
    program_place,
)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Return ``relu?(torch.nn.functional.batch_norm(x, ...) [+ residual])``, with FP32 statistics.

    Args:
        x: [N, C, *]; contiguous or channels_last, a copy is made of others. Like all tensors here float32, float16
            or bfloat16, whatever the others are.
        running_mean: [C], or None in training. With ``training`` both running statistics are updated in place:
            ``(1 - momentum) * running + momentum * batch``, where the batch's variance is the unbiased one. Under
            torch.utils.checkpoint the second forward updates them again, as torch's own does. A backward through them
            after such an update raises autograd's error about a tensor modified in place.
        running_var: [C], or None in training.
        weight: [C], or None for 1.
        bias: [C], or None for 0.
        training: normalise by the batch's statistics rather than by the running ones.
        momentum: a number, as torch.nn.functional takes it. For the cumulative average, which is what None means to
            torch.nn.BatchNorm2d, pass what that passes: ``1 / num_batches_tracked``.
        residual: of x's shape.

    Returns:
        of x's shape, dtype and memory format.

    Raises:
        TypeError: an operand that is no tensor of those dtypes; float64 is declined. A momentum that is no number.
        ValueError: shapes or devices that do not fit; training with a single value a channel; eps not positive.
    """
    named = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    check_operands("batch_norm", x=x, **named, residual=residual)
    if x.dim() < 2:
        raise ValueError(f"batch_norm takes x as [N, C, *], got the shape {tuple(x.shape)}")
    channels = x.shape[1:2]
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != channels:
            raise ValueError(
                f"batch_norm: {name} must have one value a channel, [{x.shape[1]}] for x of shape {tuple(x.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"batch_norm: residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}. Expand it before."
        )
    if not training and (running_mean is None or running_var is None):
        raise ValueError("batch_norm needs running_mean and running_var when training=False; pass them or train")
    if not isinstance(momentum, int | float):
        raise TypeError(
            f"batch_norm takes momentum as a number, got {momentum!r}. For the cumulative average, which None is to "
            "torch.nn.BatchNorm2d, pass 1 / num_batches_tracked."
        )
    if eps < 0.0 or (training and eps == 0.0):
        raise ValueError(f"batch_norm takes a positive eps, or with running statistics 0, got {eps}")
    if training and x.shape[1] > 0 and x.numel() == x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    if training:
        # Detached: the gradient through the statistics is part of APPLY's backward.
        mean, spread = STATISTICS(x.detach(), running_mean, running_var, float(momentum), float(eps))
    else:
        assert running_mean is not None and running_var is not None  # checked
        mean, spread = running_mean, running_var
    return APPLY(x, mean, spread, weight, bias, residual, float(eps), bool(relu), bool(training))


def reference(
    x: Tensor,
    mean: Tensor,
    spread: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    relu: bool,
    training: bool,
) -> Tensor:
    """Compute ``APPLY`` in plain torch, differentiably; in training with x's own statistics in place of ``mean``."""
    mean, var = channel_statistics(x) if training else (mean.float(), spread.float())
    y = plain(x, mean, (var + eps).rsqrt(), weight, bias)
    if residual is not None:
        y = y + residual.float()
    return (y.relu() if relu else y).to(x.dtype)


@jit(do_not_specialize=["rows", "rows_each"])
def apply_kernel(
    x, residual, mean, spread, weight, bias, y, rows, columns, channels, pitch, rows_each, columns_each, eps,
    RELU: constexpr, TRAINING: constexpr, PLANAR: constexpr, VECTOR: constexpr,
    BLOCK_ROWS: constexpr, BLOCK_COLUMNS: constexpr,
):  # fmt: skip
    """Normalise, scale, shift, add, relu. Grid: (blocks of channels, parts).

    x: fp32, fp16 or bf16 [N, C, *], contiguous (PLANAR) or channels_last, read once; computed in fp32.
    residual: fp32, fp16 or bf16, of x's strides, read once, or None. y: x's dtype and strides, written once.
    mean, spread, weight, bias: [C], see ``channel_terms``. The integers: see ``Tiles``. eps: fp32 scalar.
    """
    columns, pitch = divided(columns, VECTOR), divided(pitch, VECTOR)
    first_row, first_column, base, channel = program_place(columns, rows_each, columns_each, PLANAR, BLOCK_COLUMNS)
    end_row = tl.minimum(first_row + rows_each, rows)
    center, _, scale, shift = channel_terms(mean, spread, weight, bias, channel, channels, eps, TRAINING)
    for start_column in range(first_column, tl.minimum(first_column + columns_each, columns), BLOCK_COLUMNS):
        # Rows innermost: channels_last has one block of columns, whose terms stay in registers.
        column = start_column + tl.arange(0, BLOCK_COLUMNS)
        for start_row in tl.range(first_row, end_row, BLOCK_ROWS, num_stages=STAGES):
            row = start_row + tl.arange(0, BLOCK_ROWS)
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            offsets = base + row[:, None] * pitch + column[None, :]
            value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
            value = normalized(value, center, scale, shift)
            if residual is not None:
                value += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
            if RELU:
                value = tl.where(value < 0.0, 0.0, value)  # NaN stays NaN
            tl.store(y + offsets, value, mask=inside)


def launch(
    x: Tensor,
    mean: Tensor,
    spread: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    relu: bool,
    training: bool,
) -> Tensor:
    """Run ``APPLY``; without Triton, or on a CPU, in plain torch."""
    x = dense(x)
    # Results have the input's strides, so that one set of offsets serves all tensors of the kernel.
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    if not can_launch(x.device):
        return y.copy_(reference(x, mean, spread, weight, bias, residual, eps, relu, training))
    x = aligned(x)
    residual = None if residual is None else like(residual, x)
    apply = _bound(*cut_arguments(x, FORWARD_BYTES, residual), eps, relu, training)
    apply(x, residual, packed(mean), packed(spread), packed(weight), packed(bias), y)
    return y


@lru_cache(maxsize=1024)
def _bound(*settings: Any) -> Bound:
    """Return the bound kernel for the arguments of ``cut``, eps, relu and training."""
    *lie, eps, relu, training = settings
    tiles = cut(*lie)
    return Bound(apply_kernel, tiles.grid, *tiles.numbers, eps, relu, training, *tiles.constants, **OPTIONS)


def fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(dense(x))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mean, spread, weight, bias, residual, ctx.eps, ctx.relu, ctx.training = inputs
    ctx.residual_dtype = None if residual is None else residual.dtype
    # Without a residual the sign of the output is computed again from x, to the same bits.
    ctx.save_for_backward(x, mean, spread, weight, bias, output if ctx.relu and residual is not None else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, mean, spread, weight, bias, y = ctx.saved_tensors
    wants_x, _, _, wants_weight, wants_bias, wants_residual, *_ = ctx.needs_input_grad
    if torch.is_grad_enabled():
        return _differentiable(ctx, grad, wants_residual)
    # The sum hands its gradient on; with relu the kernel writes the masked one instead.
    dresidual = grad.to(ctx.residual_dtype) if wants_residual else None
    masked = wants_residual and ctx.relu
    dx, dweight, dbias, masked_grad = BACKWARD(
        grad, x, y, mean, spread, weight, bias, ctx.eps, ctx.relu, ctx.training,
        wants_x, wants_weight or wants_bias, masked,
    )  # fmt: skip
    affine = dweight if wants_weight else None, dbias if wants_bias else None
    return dx if wants_x else None, None, None, *affine, masked_grad.to(ctx.residual_dtype) if masked else dresidual


def _differentiable(ctx: Any, grad: Tensor, wants_residual: bool) -> tuple[Tensor | None, ...]:
    """Run the backward in eager ops; relu is a mask to it, so it needs no values of the residual."""
    x, mean, spread, weight, bias, y = ctx.saved_tensors
    inputs = (x, mean, spread, weight, bias, None, ctx.eps, False, ctx.training)
    if ctx.relu:
        if y is None:
            with torch.no_grad():
                y = reference(*inputs)
        grad = grad.masked_fill(y.detach() <= 0, 0.0)
    gradients = list(eager_gradients(reference, inputs, (grad,)))
    gradients[5] = grad.to(ctx.residual_dtype) if wants_residual else None
    return tuple(gradients)


#: (x, mean, spread, weight, bias, residual, eps, relu, training) -> y. In training mean and spread = rstd are those of
#: x, and x's gradient is also that through them; otherwise they are constants, and spread is the variance.
APPLY = KernelOp("batch_norm", launch, fake, backward=_backward, setup_context=_setup)
