"""Computes mean and ``1 / sqrt(variance + eps)`` of every channel, and updates running statistics, in two kernels.

Kernel one reads x once. Each lane of a tile follows its own elements by Welford's updates, in FP32::

    delta = x - mean;  mean += delta / count;  M2 += delta * (x - mean)

and a program merges its lanes into (count, mean, M2) a channel by M2 += count * (lane's mean - mean)**2 (Chan, Golub
and LeVeque, 1983). Kernel two merges the programs' in the same way, in a fixed order, and updates the running
statistics. Nothing is ever ``E[x**2] - E[x]**2``: a mean far greater than the deviations from it costs no digits.

Bytes moved: x once; 12 bytes a channel and part (a few hundred parts at most) written and read again.
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
    FORWARD_BYTES,
    OPTIONS,
    STAGES,
    aligned,
    channel_mean,
    cut,
    cut_arguments,
    dense,
    divided,
    over_tile,
    program_place,
)

_FINISH_CHANNELS = 16
_FINISH_WARPS = 8


@jit(do_not_specialize=["rows", "rows_each"])
def statistics_kernel(
    x, partials, rows, columns, channels, pitch, rows_each, columns_each,
    PLANAR: constexpr, VECTOR: constexpr, BLOCK_ROWS: constexpr, BLOCK_COLUMNS: constexpr,
):  # fmt: skip
    """Compute count, mean and M2 of a part of each channel. Grid: (blocks of channels, parts).

    x: fp32, fp16 or bf16 [N, C, *], contiguous (PLANAR) or channels_last, read once; accumulated in fp32.
    partials: fp32 [3, parts, C], written. The integers: see ``Tiles``.
    """
    columns, pitch = divided(columns, VECTOR), divided(pitch, VECTOR)
    first_row, first_column, base, channel = program_place(columns, rows_each, columns_each, PLANAR, BLOCK_COLUMNS)
    end_row = tl.minimum(first_row + rows_each, rows)
    lanes = tl.arange(0, BLOCK_ROWS)
    count = tl.zeros(channel.shape, tl.float32)
    mean = tl.zeros(channel.shape, tl.float32)
    m2 = tl.zeros(channel.shape, tl.float32)
    lane_steps = ((end_row - first_row - lanes + BLOCK_ROWS - 1) // BLOCK_ROWS).to(tl.float32)
    for start_column in range(first_column, tl.minimum(first_column + columns_each, columns), BLOCK_COLUMNS):
        column = start_column + tl.arange(0, BLOCK_COLUMNS)
        lane_mean = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        lane_m2 = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        steps = tl.full((), 0.0, tl.float32)
        for start_row in tl.range(first_row, end_row, BLOCK_ROWS, num_stages=STAGES):
            row = start_row + lanes
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            value = tl.load(x + base + row[:, None] * pitch + column[None, :], mask=inside, other=0.0).to(tl.float32)
            # All lanes count alike: rows outside add nothing, and a lane's own count follows from its number.
            steps += 1.0
            delta = tl.where(inside, value - lane_mean, 0.0)
            # ``/`` of 1 and 1 need not be 1, but a value next to it.
            share = tl.where(steps > 1.0, 1.0 / steps, 1.0)
            lane_mean = tl.fma(delta, share, lane_mean)
            lane_m2 = tl.fma(delta, value - lane_mean, lane_m2)
        lane_count = tl.where((column < columns)[None, :], lane_steps[:, None], 0.0)
        here = over_tile(lane_count, PLANAR)
        here_mean = channel_mean(lane_count, lane_mean, tl.maximum(here, 1.0), PLANAR)
        off = lane_mean - here_mean[None, :]
        here_m2 = over_tile(tl.fma(lane_count * off, off, lane_m2), PLANAR)
        # Rounded, as ``/`` need not be: a first tile's share is 1 to the bit, and its mean loses nothing.
        share = tl.div_rn(here, tl.maximum(count + here, 1.0))
        delta = here_mean - mean
        mean += delta * share
        m2 += here_m2 + delta * (delta * (count * share))
        count += here
    parts = tl.num_programs(1)
    place = partials + tl.program_id(1) * channels + channel
    tl.store(place, count, mask=channel < channels)
    tl.store(place + parts * channels, mean, mask=channel < channels)
    tl.store(place + 2 * parts * channels, m2, mask=channel < channels)


@jit(do_not_specialize=["parts"])
def finish_kernel(
    partials, running_mean, running_var, mean, rstd, momentum, parts, channels, eps,
    BLOCK_PARTS: constexpr, BLOCK_CHANNELS: constexpr,
):  # fmt: skip
    """Merge the parts, update the running statistics. Grid: a program for each BLOCK_CHANNELS of the C channels.

    partials: fp32 [3, parts, C], read; parts <= BLOCK_PARTS. mean, rstd: fp32 [C], written.
    running_mean, running_var: fp32, fp16 or bf16 [C] or None, updated: by the mean, by the unbiased variance.
    momentum, eps: fp32 scalars.
    """
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    part = tl.arange(0, BLOCK_PARTS)
    inside = (part < parts)[:, None] & (channel < channels)[None, :]
    place = partials + part[:, None] * channels + channel[None, :]
    counts = tl.load(place, mask=inside, other=0.0)
    means = tl.load(place + parts * channels, mask=inside, other=0.0)
    m2s = tl.load(place + 2 * parts * channels, mask=inside, other=0.0)
    count = tl.maximum(tl.sum(counts, axis=0), 1.0)
    center = channel_mean(counts, means, count, False)
    off = means - center[None, :]
    m2 = tl.sum(tl.fma(counts * off, off, m2s), axis=0)
    there = channel < channels
    tl.store(mean + channel, center, mask=there)
    tl.store(rstd + channel, tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(m2, count) + eps)), mask=there)
    if running_mean is not None:
        old = tl.load(running_mean + channel, mask=there, other=0.0).to(tl.float32)
        tl.store(running_mean + channel, momentum * center + (1.0 - momentum) * old, mask=there)
    if running_var is not None:
        old = tl.load(running_var + channel, mask=there, other=0.0).to(tl.float32)
        unbiased = tl.div_rn(m2, tl.maximum(count - 1.0, 1.0))
        tl.store(running_var + channel, momentum * unbiased + (1.0 - momentum) * old, mask=there)


def launch(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Run ``STATISTICS``; without Triton, or on a CPU, in plain torch."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[1], dtype=torch.float32), x.new_zeros(x.shape[1], dtype=torch.float32)
    # They are overwritten: the backward of an earlier evaluation, which saved them, must raise.
    torch.autograd.graph.increment_version([each for each in (running_mean, running_var) if each is not None])
    if not can_launch(x.device):
        mean, var = channel_statistics(x)
        count = x.numel() // x.shape[1]
        if running_mean is not None:
            running_mean.copy_(momentum * mean + (1.0 - momentum) * running_mean.float())
        if running_var is not None:
            running_var.copy_(momentum * (var * (count / (count - 1))) + (1.0 - momentum) * running_var.float())
        return mean, (var + eps).rsqrt()
    # Sums run in an order that shape and device fix, so they have the same bits each time.
    x = aligned(dense(x))
    parts, statistics, finish = _launches(*cut_arguments(x, FORWARD_BYTES), eps)
    partials = torch.empty(parts, dtype=torch.float32, device=x.device)
    mean = torch.empty(parts[-1:], dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    targets = packed(running_mean), packed(running_var)
    statistics(x, partials)
    finish(partials, *targets, mean, rstd, momentum)
    for running, target in zip((running_mean, running_var), targets, strict=True):
        if target is not running and running is not None and target is not None:  # a view with gaps
            running.copy_(target)
    return mean, rstd


@lru_cache(maxsize=1024)
def _launches(*settings: Any) -> tuple[tuple[int, int, int], Bound, Bound]:
    """Return the shape of the partials, and both bound kernels, for the arguments of ``cut`` and eps."""
    *lie, eps = settings
    tiles = cut(*lie)
    parts, channels = tiles.parts, tiles.channels
    finish = Bound(
        finish_kernel, (-(-channels // _FINISH_CHANNELS),), parts, channels, eps,
        1 << (parts - 1).bit_length(), _FINISH_CHANNELS, num_warps=_FINISH_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return (
        (3, parts, channels),
        Bound(statistics_kernel, tiles.grid, *tiles.numbers, *tiles.constants, **OPTIONS),
        finish,
    )


def channel_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of every channel in plain torch, differentiable: float32 [C] each."""
    var, mean = torch.var_mean(x.float(), dim=[0, *range(2, x.dim())], correction=0)
    return mean, var


def fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1], dtype=torch.float32), x.new_empty(x.shape[1], dtype=torch.float32)


#: (x, running_mean, running_var, momentum, eps) -> (mean, rstd), float32 [C], of the batch; updates the running
#: statistics, which may be None. No autograd: the op that uses them knows that they are x's.
STATISTICS = KernelOp("batch_norm_statistics", launch, fake, mutates_args=("running_mean", "running_var"))
