"""Computes group norm of channels_last tensors with large groups: programs take adjacent channels, of any groups.

A group's channels of one pixel are few bytes (10 channels: 20), and begin anywhere: a program that took a group read
them four bytes at a time. Here a program takes a *slab*, CT channels and a share of the pixels of one sample, in tiles
of PT pixels, each of whose rows is read 16 bytes at a time and some tiles ahead. It sums over each channel; a small
kernel adds up those of a group, and with its results each slab is read once more, mostly from a cache::

    forward     channel_statistics  ->  group_statistics  ->  normalize
    backward    channel_sums        ->  group_sums        ->  input_gradient

N samples, C channels, G groups of C / G, P pixels, S shares. Nothing depends on the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.launch.triton_support import constant, constexpr, jit, on_device, tl
from fxprec.kernels.nn.batch_norm_tiles import channel_mean, channel_values, divided, over_tile
from fxprec.kernels.nn.column_sums import add_parts
from fxprec.kernels.nn.group_norm_kernels import gradient_tile

#: Tiles on their way while one is computed.
STAGES: Final = constant(3)
_WARPS: Final = 8
#: Numbers of a group's channels that its program adds up at once.
_MERGED: Final = 4096


@dataclass(frozen=True, slots=True)
class Slabs:
    """Slabs of a channels_last tensor [N, C, *], and their tiles; ``groups``: of a sample.

    Attributes:
        vector: a divisor of C that Triton, which checks 16 alone, would not know; else 1.
        ct: channels of a slab, a power of two.
        pt: pixels of a tile, a power of two.
        shares: slabs of the same channels.
    """

    samples: int
    channels: int
    pixels: int
    groups: int
    vector: int
    ct: int
    pt: int
    shares: int

    def grid(self) -> tuple[int, int]:
        """Return the grid of the kernels over slabs."""
        return self.samples * -(-self.channels // self.ct), self.shares

    @property
    def rows(self) -> int:
        """Number of rows of the sums of channels: one for each sample and share."""
        return self.samples * self.shares

    @property
    def each(self) -> int:
        """Number of channels of a group."""
        return self.channels // self.groups

    def tile(self) -> dict[str, Any]:
        """Return the constants of the kernels over slabs."""
        return {"VECTOR": self.vector, "CT": self.ct, "PT": self.pt, "num_warps": _WARPS}

    def merging(self) -> dict[str, int]:
        """Return the constants of the kernels that add up the sums of a group."""
        parts = 1 << (self.shares - 1).bit_length()
        return {"CPG": self.each, "PARTS": parts, "BLOCK": min(1 << (self.each - 1).bit_length(), _MERGED // parts)}


@jit()
def slab_place(channels, pixels, CT: constexpr, PT: constexpr):
    """Return a program's sample, channels [CT], share [low, high) of the pixels, and row of the sums of channels.

    channels, pixels: int scalars. Grid: (N * cdiv(C, CT), S). The sample and the row are int64.
    """
    blocks = tl.cdiv(channels, CT)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * CT + tl.arange(0, CT)
    # Shares are whole tiles, so that only the last one of a sample is masked.
    share = tl.cdiv(tl.cdiv(pixels, PT), tl.num_programs(1)) * PT
    low = tl.program_id(1) * share
    row = sample * tl.num_programs(1) + tl.program_id(1)
    return sample, channel, low, tl.minimum(low + share, pixels), row


@jit()
def tile_at(start, high, channel, channels, PT: constexpr):
    """Return a tile's offsets from the sample's first element, and their mask: int64 and int1 [PT, CT]."""
    pixel = start + tl.arange(0, PT)
    inside = (pixel < high)[:, None] & (channel < channels)[None, :]
    return pixel.to(tl.int64)[:, None] * channels + channel[None, :], inside


@jit()
def of_groups(numbers, total, sample, channel, channels, CPG: constexpr):
    """Load the two numbers of each channel's group. numbers: fp32 [2, N * G]; total: N * G. Returns two fp32 [CT]."""
    group = numbers + sample * (channels // CPG) + channel // CPG
    there = channel < channels
    return tl.load(group, mask=there, other=0.0), tl.load(group + total, mask=there, other=0.0)


@jit(do_not_specialize=["rows"])
def channel_statistics_kernel(
    x, partials, channels, pixels, rows, VECTOR: constexpr, CT: constexpr, PT: constexpr
):  # fmt: skip
    """Compute mean and sum of squared deviations of each channel's share, lane by lane after Welford (1962).

    x: fp32, fp16 or bf16 [N, P, C], read. partials: fp32 [2, N * S, C], written. rows: N * S. Grid: (N * blocks, S).
    """
    channels = divided(channels, VECTOR)
    sample, channel, low, high, place = slab_place(channels, pixels, CT, PT)
    x += sample * pixels * channels
    mean = tl.zeros((PT, CT), tl.float32)
    m2 = tl.zeros((PT, CT), tl.float32)
    steps = tl.full((), 0.0, tl.float32)
    for start in tl.range(low, high, PT, num_stages=STAGES):
        offsets, inside = tile_at(start, high, channel, channels, PT)
        value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        steps += 1.0
        delta = tl.where(inside, value - mean, 0.0)
        # ``/`` of 1 and 1 need not be 1, but a value next to it.
        share = tl.where(steps > 1.0, 1.0 / steps, 1.0)
        mean = tl.fma(delta, share, mean)
        m2 = tl.fma(delta, value - mean, m2)
    # Lanes of one program differ in their number of pixels by at most one.
    count = ((tl.maximum(high - low, 0) - tl.arange(0, PT) + PT - 1) // PT).to(tl.float32)
    count = tl.where((channel < channels)[None, :], count[:, None], 0.0)
    center = channel_mean(count, mean, tl.maximum(over_tile(count, False), 1.0), False)
    off = mean - center[None, :]
    spread = over_tile(tl.fma(count * off, off, m2), False)
    partials += place * channels + channel
    tl.store(partials, center, mask=channel < channels)
    tl.store(partials + rows.to(tl.int64) * channels, spread, mask=channel < channels)


@jit()
def group_place(groups, channels, start, parts, CPG: constexpr, PARTS: constexpr, BLOCK: constexpr):
    """Return offsets of a block of the sums of this program's group, their mask, [PARTS, BLOCK], and the channels."""
    group = tl.program_id(0)
    lane = tl.arange(0, PARTS)
    inner = start + tl.arange(0, BLOCK)
    channel = group % groups * CPG + inner
    row = (group // groups).to(tl.int64) * parts + lane
    return row[:, None] * channels + channel[None, :], (lane < parts)[:, None] & (inner < CPG)[None, :], channel


@jit(do_not_specialize=["rows"])
def group_statistics_kernel(
    partials, statistics, groups, channels, pixels, rows, parts, share, eps,
    CPG: constexpr, PARTS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Merge the shares of a group's channels into mean and ``1 / sqrt(variance + eps)``. Grid: (N * G,).

    partials: fp32 [2, N * S, C], read. statistics: fp32 [2, N * G], written. rows: N * S; parts: S, PARTS or fewer;
    share: pixels of each, of the last ones what is left. Merged after Chan, Golub and LeVeque (1983).
    """
    lane = tl.arange(0, PARTS)
    # Counts follow from the shape, so that shares hand over two numbers instead of three.
    size = tl.maximum(tl.minimum(pixels - lane * share, share), 0).to(tl.float32)
    count = tl.zeros((1,), tl.float32)
    mean = tl.zeros((1,), tl.float32)
    m2 = tl.zeros((1,), tl.float32)
    for start in range(0, CPG, BLOCK):
        place, inside, _ = group_place(groups, channels, start, parts, CPG, PARTS, BLOCK)
        means = tl.load(partials + place, mask=inside, other=0.0)
        m2s = tl.load(partials + rows.to(tl.int64) * channels + place, mask=inside, other=0.0)
        counts = tl.where(inside, size[:, None], 0.0)
        here = over_tile(counts, True)
        here_mean = channel_mean(counts, means, tl.maximum(here, 1.0), True)
        off = means - here_mean[None, :]
        here_m2 = over_tile(tl.fma(counts * off, off, m2s), True)
        part = tl.div_rn(here, tl.maximum(count + here, 1.0))  # rounded: of the first block it is 1
        delta = here_mean - mean
        mean += delta * part
        m2 += here_m2 + delta * (delta * (count * part))
        count += here
    target = statistics + tl.program_id(0) + tl.arange(0, 1)
    tl.store(target, mean)
    tl.store(target + tl.num_programs(0), tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(m2, count) + eps)))


@jit()
def normalize_kernel(
    x, weight, bias, y, statistics, channels, pixels, total,
    CPG: constexpr, SILU: constexpr, VECTOR: constexpr, CT: constexpr, PT: constexpr,
):  # fmt: skip
    """Normalize, scale, shift, SiLU. Grid: (N * blocks, S).

    x: fp32, fp16 or bf16 [N, P, C], read; y: the same, written. weight, bias: fp32, fp16 or bf16 [C] or None.
    statistics: fp32 [2, N * G], read; total: N * G. All arithmetic in fp32.
    """
    channels = divided(channels, VECTOR)
    sample, channel, low, high, _ = slab_place(channels, pixels, CT, PT)
    mean, rstd = of_groups(statistics, total, sample, channel, channels, CPG)
    # A program's channels may belong to several groups: terms are vectors over channels.
    scale = (rstd * channel_values(weight, channel, channels, 1.0))[None, :]
    shift = channel_values(bias, channel, channels, 0.0)[None, :]
    first = sample * pixels * channels
    for start in tl.range(low, high, PT, num_stages=STAGES):
        offsets, inside = tile_at(start, high, channel, channels, PT)
        value = tl.load(x + first + offsets, mask=inside, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * scale + shift
        if SILU:
            value = value / (1.0 + tl.exp(-value))
        tl.store(y + first + offsets, value.to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows"])
def channel_sums_kernel(
    dy, x, weight, bias, statistics, sums, channels, pixels, total, rows,
    CPG: constexpr, SILU: constexpr, VECTOR: constexpr, CT: constexpr, PT: constexpr,
):  # fmt: skip
    """Sum dz * n and dz (see ``group_norm``) over each channel's share. Grid: (N * blocks, S).

    dy, x: fp32, fp16 or bf16 [N, P, C], read. weight, bias: fp32, fp16 or bf16 [C] or None.
    statistics: fp32 [2, N * G], read; total: N * G. sums: fp32 [2, N * S, C], written; rows: N * S.
    """
    channels = divided(channels, VECTOR)
    sample, channel, low, high, place = slab_place(channels, pixels, CT, PT)
    mean, rstd = of_groups(statistics, total, sample, channel, channels, CPG)
    scale = channel_values(weight, channel, channels, 1.0)[None, :]
    shift = channel_values(bias, channel, channels, 0.0)[None, :]
    first = sample * pixels * channels
    products = tl.zeros((PT, CT), tl.float32)
    plain = tl.zeros((PT, CT), tl.float32)
    for start in tl.range(low, high, PT, num_stages=STAGES):
        offsets, inside = tile_at(start, high, channel, channels, PT)
        value, gradient = gradient_tile(
            dy, x, first + offsets, inside, mean[None, :], rstd[None, :], scale, shift, SILU
        )  # fmt: skip
        products = tl.fma(gradient, value, products)
        plain += gradient
    sums += place * channels + channel
    tl.store(sums, over_tile(products, False), mask=channel < channels)
    tl.store(sums + rows.to(tl.int64) * channels, over_tile(plain, False), mask=channel < channels)


@jit(do_not_specialize=["rows"])
def group_sums_kernel(
    sums, weight, levels, groups, channels, rows, parts, number, CPG: constexpr, PARTS: constexpr, BLOCK: constexpr
):  # fmt: skip
    """Compute the means of g and of g * n of a group. Grid: (N * G,).

    sums: fp32 [2, N * S, C], read; rows: N * S; parts: S, PARTS or fewer. weight: fp32, fp16 or bf16 [C] or None.
    levels: fp32 [2, N * G], written. number: fp32 scalar, the elements of a group.
    """
    level = tl.zeros((PARTS, BLOCK), tl.float32)
    slope = tl.zeros((PARTS, BLOCK), tl.float32)
    for start in range(0, CPG, BLOCK):
        place, inside, channel = group_place(groups, channels, start, parts, CPG, PARTS, BLOCK)
        scale = channel_values(weight, channel, channels, 1.0)[None, :]
        slope += tl.load(sums + place, mask=inside, other=0.0) * scale
        level += tl.load(sums + rows.to(tl.int64) * channels + place, mask=inside, other=0.0) * scale
    target = levels + tl.program_id(0)
    tl.store(target, tl.div_rn(tl.sum(level), number))
    tl.store(target + tl.num_programs(0), tl.div_rn(tl.sum(slope), number))


@jit()
def input_gradient_kernel(
    dy, x, weight, bias, statistics, levels, dx, channels, pixels, total,
    CPG: constexpr, SILU: constexpr, VECTOR: constexpr, CT: constexpr, PT: constexpr,
):  # fmt: skip
    """Write dx. Grid: (N * blocks, S).

    dy, x: fp32, fp16 or bf16 [N, P, C], read; dx: as x, written. weight, bias: fp32, fp16 or bf16 [C] or None.
    statistics, levels: fp32 [2, N * G], read; total: N * G.
    """
    channels = divided(channels, VECTOR)
    sample, channel, low, high, _ = slab_place(channels, pixels, CT, PT)
    mean, rstd = of_groups(statistics, total, sample, channel, channels, CPG)
    level, slope = of_groups(levels, total, sample, channel, channels, CPG)
    scale = channel_values(weight, channel, channels, 1.0)[None, :]
    shift = channel_values(bias, channel, channels, 0.0)[None, :]
    first = sample * pixels * channels
    for start in tl.range(low, high, PT, num_stages=STAGES):
        offsets, inside = tile_at(start, high, channel, channels, PT)
        value, gradient = gradient_tile(
            dy, x, first + offsets, inside, mean[None, :], rstd[None, :], scale, shift, SILU
        )  # fmt: skip
        gradient = (gradient * scale - level[None, :] - value * slope[None, :]) * rstd[None, :]
        tl.store(dx + first + offsets, gradient.to(dx.dtype.element_ty), mask=inside)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, statistics: Tensor, cut: Slabs, eps: float,
    silu: bool,
) -> None:  # fmt: skip
    """Launch the forward. x, y: [N, C, *], channels_last. statistics: float32 [2, N * G]. Parameters: packed."""
    partials = torch.empty((2, cut.rows, cut.channels), dtype=torch.float32, device=x.device)
    total = cut.samples * cut.groups
    tiles = -(-cut.pixels // cut.pt)
    share = -(-tiles // cut.shares) * cut.pt
    with on_device(x.device):
        channel_statistics_kernel[cut.grid()](x, partials, cut.channels, cut.pixels, cut.rows, **cut.tile())
        group_statistics_kernel[(total,)](
            partials, statistics, cut.groups, cut.channels, cut.pixels, cut.rows, cut.shares, share, eps,
            **cut.merging(),
        )  # fmt: skip
        normalize_kernel[cut.grid()](
            x, weight, bias, y, statistics, cut.channels, cut.pixels, total, CPG=cut.each, SILU=silu, **cut.tile()
        )  # fmt: skip


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, dx: Tensor | None,
    dweight: Tensor | None, dbias: Tensor | None, cut: Slabs, silu: bool,
) -> None:  # fmt: skip
    """Launch the kernels of the gradients that are not None. dy, dx: as x; the others: see ``forward``."""
    sums = torch.empty((2, cut.rows, cut.channels), dtype=torch.float32, device=x.device)
    total = cut.samples * cut.groups
    given = (dy, x, weight, bias, statistics)
    constants = {"CPG": cut.each, "SILU": silu, **cut.tile()}
    with on_device(x.device):
        channel_sums_kernel[cut.grid()](*given, sums, cut.channels, cut.pixels, total, cut.rows, **constants)
        if dx is not None:
            # dx needs the means of its whole group, hence two more launches; the other gradients do not.
            levels = torch.empty_like(statistics)
            group_sums_kernel[(total,)](
                sums, weight, levels, cut.groups, cut.channels, cut.rows, cut.shares, float(cut.each * cut.pixels),
                **cut.merging(),
            )  # fmt: skip
            input_gradient_kernel[cut.grid()](*given, levels, dx, cut.channels, cut.pixels, total, **constants)
        wanted = [(part, out) for part, out in zip(sums, (dweight, dbias), strict=True) if out is not None]
        # One launch adds up both sums, which lie next to each other.
        if len(wanted) == 2:
            add_parts(sums, [out for _, out in wanted])
        elif wanted:
            add_parts(wanted[0][0][None], [wanted[0][1]])
