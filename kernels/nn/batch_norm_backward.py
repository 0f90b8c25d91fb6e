"""Computes the gradients of ``y = relu?((x - mean) * rstd * weight + bias [+ residual])`` in two kernels.

With ``dy' = dy where y > 0 else 0`` (without relu ``dy' = dy``), ``xhat = (x - mean) * rstd``, n elements a channel::

    dbias = sum(dy')    dweight = sum(dy' * xhat)    dresidual = dy'
    dx = weight * rstd * (dy' - dbias / n - xhat * dweight / n)        batch statistics
    dx = weight * rstd * dy'                                           running statistics

Kernel one sums, a partial for each program; kernel two adds up the partials of its channels itself (few, in a fixed
order), writes dweight and dbias in one of the programs, and dx: there is no third. Where nothing needs the sums
(running statistics, no gradient of weight or bias) kernel two runs alone.

Where y > 0 is computed again from x, to the bits of the forward, unless there is a residual: then y is read, which
costs what reading the residual would, and is alive anyway as the input of what comes next. In that case kernel one
writes dresidual, and kernel two reads that instead of dy and y. Bytes moved: see batch_norm.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fxprec.kernels.launch.kernel_op import KernelOp
from fxprec.kernels.launch.operands import packed
from fxprec.kernels.launch.triton_support import Bound, can_launch, constexpr, jit, tl
from fxprec.kernels.nn.batch_norm_tiles import (
    BACKWARD_BYTES,
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
    over_tile,
    program_place,
)

_BLOCK_PARTS = 32


@jit()
def masked_gradient(gradient, value, y, offsets, inside, center, scale, shift, RELU: constexpr):
    """Return dy' of a tile, fp32 [rows, columns]. gradient: dy's, in its dtype. value: x's, fp32. y: as dy, or None."""
    result = gradient.to(tl.float32)
    if RELU:
        if y is None:
            output = normalized(value, center, scale, shift).to(gradient.dtype).to(tl.float32)
        else:
            output = tl.load(y + offsets, mask=inside, other=0.0).to(tl.float32)
        # NaN lets the gradient through, as torch's relu does.
        result = tl.where(output <= 0.0, 0.0, result)
    return result


@jit(do_not_specialize=["rows", "rows_each"])
def sums_kernel(
    dy, x, y, mean, spread, weight, bias, dresidual, partials,
    rows, columns, channels, pitch, rows_each, columns_each, eps,
    RELU: constexpr, TRAINING: constexpr, PLANAR: constexpr, VECTOR: constexpr,
    BLOCK_ROWS: constexpr, BLOCK_COLUMNS: constexpr,
):  # fmt: skip
    """Sum dy' and dy' * (x - mean) over a part of each channel. Grid: (blocks of channels, parts).

    dy, x: fp32, fp16 or bf16 [N, C, *], both contiguous (PLANAR) or both channels_last, read once; summed in fp32.
    y: the same, or None: where it was positive is computed from x. dresidual: the same, written with dy', or None.
    mean, spread, weight, bias: [C], see ``channel_terms``. partials: fp32 [2, parts, C], written.
    The integers: see ``Tiles``. eps: fp32 scalar.
    """
    columns, pitch = divided(columns, VECTOR), divided(pitch, VECTOR)
    first_row, first_column, base, channel = program_place(columns, rows_each, columns_each, PLANAR, BLOCK_COLUMNS)
    end_row = tl.minimum(first_row + rows_each, rows)
    center, _, scale, shift = channel_terms(mean, spread, weight, bias, channel, channels, eps, TRAINING)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    product = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start_column in range(first_column, tl.minimum(first_column + columns_each, columns), BLOCK_COLUMNS):
        column = start_column + tl.arange(0, BLOCK_COLUMNS)
        for start_row in tl.range(first_row, end_row, BLOCK_ROWS, num_stages=STAGES):
            row = start_row + tl.arange(0, BLOCK_ROWS)
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            offsets = base + row[:, None] * pitch + column[None, :]
            value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.load(dy + offsets, mask=inside, other=0.0)
            gradient = masked_gradient(gradient, value, y, offsets, inside, center, scale, shift, RELU)
            if dresidual is not None:
                tl.store(dresidual + offsets, gradient, mask=inside)
            # rstd is constant for a channel: the second kernel multiplies by it once.
            product = tl.fma(gradient, value - center[None, :], product)
            total += gradient
    place = partials + tl.program_id(1) * channels + channel
    tl.store(place, over_tile(total, PLANAR), mask=channel < channels)
    tl.store(place + tl.num_programs(1) * channels, over_tile(product, PLANAR), mask=channel < channels)


@jit()
def added_up(partials, parts, channel, channels, BLOCK_PARTS: constexpr):
    """Add up the parts of a program's channels, in a fixed order. partials: fp32 [parts, C]. Returns fp32 [block]."""
    lanes = tl.arange(0, BLOCK_PARTS)
    totals = tl.zeros((BLOCK_PARTS, channel.shape[0]), tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + lanes
        inside = (part < parts)[:, None] & (channel < channels)[None, :]
        totals += tl.load(partials + part[:, None] * channels + channel[None, :], mask=inside, other=0.0)
    return tl.sum(totals, axis=0)


@jit(do_not_specialize=["rows", "rows_each", "parts"])
def inputs_kernel(
    dy, x, y, mean, spread, weight, bias, partials, dx, dweight, dbias, dresidual, parts,
    rows, columns, channels, pitch, rows_each, columns_each, eps, share,
    RELU: constexpr, TRAINING: constexpr, PLANAR: constexpr, VECTOR: constexpr,
    BLOCK_ROWS: constexpr, BLOCK_COLUMNS: constexpr, BLOCK_PARTS: constexpr,
):  # fmt: skip
    """Write dx, and from the partials dweight and dbias. Grid: (blocks of channels, parts; 1 without dx, dresidual).

    dy, x, y, dresidual: as of ``sums_kernel``; dx: as x, written, or None.
    mean, spread, weight, bias: [C], see ``channel_terms``. partials: fp32 [2, parts, C], or None where TRAINING is not.
    dweight, dbias: fp32, fp16 or bf16 [C], written by the first part, or None.
    The integers: see ``Tiles``. eps, share (one by the elements of a channel): fp32 scalars. Computed in fp32.
    """
    columns, pitch = divided(columns, VECTOR), divided(pitch, VECTOR)
    first_row, first_column, base, channel = program_place(columns, rows_each, columns_each, PLANAR, BLOCK_COLUMNS)
    end_row = tl.minimum(first_row + rows_each, rows)
    center, rstd, scale, shift = channel_terms(mean, spread, weight, bias, channel, channels, eps, TRAINING)
    level = tl.zeros(channel.shape, tl.float32)
    slope = tl.zeros(channel.shape, tl.float32)
    if partials is not None:
        total = added_up(partials, parts, channel, channels, BLOCK_PARTS)
        product = added_up(partials + parts * channels, parts, channel, channels, BLOCK_PARTS) * rstd
        # Every part adds the same sums up; the first part alone writes them.
        first = channel < tl.where(tl.program_id(1) == 0, channels, 0)
        if dbias is not None:
            tl.store(dbias + channel, total, mask=first)
        if dweight is not None:
            tl.store(dweight + channel, product, mask=first)
        # The means of dy' and of dy' * xhat, which dx subtracts.
        level = total * share
        slope = product * share * rstd
    if dx is not None or dresidual is not None:
        for start_column in range(first_column, tl.minimum(first_column + columns_each, columns), BLOCK_COLUMNS):
            column = start_column + tl.arange(0, BLOCK_COLUMNS)
            for start_row in tl.range(first_row, end_row, BLOCK_ROWS, num_stages=STAGES):
                row = start_row + tl.arange(0, BLOCK_ROWS)
                inside = (row < rows)[:, None] & (column < columns)[None, :]
                offsets = base + row[:, None] * pitch + column[None, :]
                value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
                gradient = tl.load(dy + offsets, mask=inside, other=0.0)
                gradient = masked_gradient(gradient, value, y, offsets, inside, center, scale, shift, RELU)
                if dresidual is not None:
                    tl.store(dresidual + offsets, gradient, mask=inside)
                if TRAINING:
                    gradient = tl.fma(center[None, :] - value, slope[None, :], gradient - level[None, :])
                if dx is not None:
                    tl.store(dx + offsets, gradient * scale[None, :], mask=inside)


def launch(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    mean: Tensor,
    spread: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    relu: bool,
    training: bool,
    input: bool,
    affine: bool,
    residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run ``BACKWARD``; without Triton, or on a CPU, in plain torch."""
    x = dense(x)
    dx, dweight, dbias, dresidual = fake(dy, x, y, mean, spread, weight, bias, input, affine, residual)
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_(), dresidual
    if not can_launch(x.device):
        gradient, mean, spread = dy.float(), mean.float(), spread.float()
        if relu:
            if y is None:
                y = plain(x, mean, spread if training else (spread + eps).rsqrt(), weight, bias).to(x.dtype)
            gradient = gradient.masked_fill(y <= 0, 0.0)
        # Torch's kernel computes the sums and dx by the same formulas, from whichever statistics it is given.
        running, of_batch = ((None, None), (mean, spread)) if training else ((mean, spread), (None, None))
        scale = None if weight is None else weight.float()
        found = torch.ops.aten.native_batch_norm_backward(
            gradient, x.float(), scale, *running, *of_batch, training, eps, [True] * 3
        )
        for target, value in zip((dx, dweight, dbias, dresidual), (*found, gradient), strict=True):
            if target.numel():
                target.copy_(value)
        return dx, dweight, dbias, dresidual
    x, dy, y = aligned(x), like(dy, x), None if y is None else like(y, x)
    terms = packed(mean), packed(spread), packed(weight), packed(bias)
    # With running statistics x's gradient needs no sums.
    summed = affine or (training and input)
    parts, sums, inputs = _launches(*cut_arguments(x, BACKWARD_BYTES), eps, relu, training, input, summed, residual)
    target, partials = dresidual if residual else None, None
    if summed:
        partials = torch.empty(parts, dtype=torch.float32, device=x.device)
        sums(dy, x, y, *terms, target, partials)
        if target is not None:
            dy, y, target = target, None, None  # dy' is in memory now
    inputs(
        dy, x, y, *terms, partials, dx if input else None, dweight if affine else None, dbias if affine else None,
        target,
    )  # fmt: skip
    return dx, dweight, dbias, dresidual


@lru_cache(maxsize=1024)
def _launches(*settings: Any) -> tuple[tuple[int, int, int], Bound, Bound]:
    """Return the shape of the partials, and both bound kernels.

    Args:
        settings: the arguments of ``cut``, eps, relu, training; whether x's gradient is wanted, the first kernel runs,
            and whether the residual's gradient is wanted.
    """
    *lie, eps, relu, training, input, summed, residual = settings
    tiles = cut(*lie)
    parts, numbers = tiles.parts, tiles.numbers
    # The first kernel's own dresidual is masked.
    masked = relu and not (summed and residual)
    grid = tiles.grid if input or (residual and not summed) else (tiles.grid[0], 1)
    sums = Bound(sums_kernel, tiles.grid, *numbers, eps, relu, training, *tiles.constants, **OPTIONS)
    inputs = Bound(
        inputs_kernel, grid, parts, *numbers, eps, 1.0 / tiles.values, masked, training, *tiles.constants,
        _BLOCK_PARTS, **OPTIONS,
    )  # fmt: skip
    return (2, parts, tiles.channels), sums, inputs


def plain(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return ``(x - mean) * rstd * weight + bias`` in plain torch, in FP32 and differentiable."""
    shape = (1, -1, *(1,) * (x.dim() - 2))
    scale = rstd if weight is None else rstd * weight.float()
    y = (x.float() - mean.view(shape)) * scale.view(shape)
    return y if bias is None else y + bias.float().view(shape)


def fake(
    dy: Tensor, x: Tensor, y: Any, mean: Any, spread: Any, weight: Tensor | None, bias: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    input, affine, residual = settings[-3:]
    own = dense(x)
    channels = x.shape[1] if affine else 0
    return (
        torch.empty_like(own) if input else x.new_empty(0),
        x.new_empty(channels, dtype=torch.float32 if weight is None else weight.dtype),
        x.new_empty(channels, dtype=torch.float32 if bias is None else bias.dtype),
        torch.empty_like(own, dtype=dy.dtype) if residual else dy.new_empty(0),
    )


#: (dy, x, y, mean, spread, weight, bias, eps, relu, training, input, affine, residual)
#: -> (dx, dweight, dbias, dresidual), of which ``input``, ``affine`` and ``residual`` say what is wanted; the others
#: are empty. y is given where there was a residual and relu. ``spread``: see ``channel_terms``.
BACKWARD = KernelOp("batch_norm_backward", launch, fake)
