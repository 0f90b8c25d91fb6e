"""Kernels of group norm with SiLU behind it, for contiguous and for channels_last tensors.

A group is CPG channels times P pixels of one sample. Its tiles are [CT channels, PT pixels] of a contiguous tensor and
[PT, CT] of a channels_last one, so that the last axis of a tile is that of memory. A group of one tile (WHOLE) is read
once. Others are read twice: for the sums, then for the result, by one program, or where there are few groups by S
programs each with a share of the pixels, in two launches (PHASE 1, then 2), which hand over the sums of each share.
"""

from __future__ import annotations

from fxprec.kernels.launch.triton_support import constexpr, jit, tl


@jit()
def group_place(groups, pixels, CPG: constexpr, PT: constexpr, LAST: constexpr):
    """Return this program's group: number, sample, first channel and element, and share [low, high) of the pixels."""
    program = tl.program_id(0)
    sample = (program // groups).to(tl.int64)
    channel = (program % groups) * CPG
    # Shares are whole tiles, so that only the last one of a sample is masked.
    share = tl.cdiv(tl.cdiv(pixels, PT), tl.num_programs(1)) * PT
    low = tl.program_id(1) * share
    base = sample * groups * CPG * pixels + (channel if LAST else channel.to(tl.int64) * pixels)
    return program.to(tl.int64), sample, channel, base, low, tl.minimum(low + share, pixels)


@jit()
def tile_places(channel, pixel, high, groups, pixels, CPG: constexpr, LAST: constexpr):
    """Return a tile's offsets from the group's first element (int64), and the mask of the share (int1).

    channel: int32 [CT], within the group. pixel: int32 [PT].
    """
    if LAST:
        place = pixel.to(tl.int64)[:, None] * (groups * CPG) + channel[None, :]
        inside = (pixel < high)[:, None] & (channel < CPG)[None, :]
    else:
        place = channel.to(tl.int64)[:, None] * pixels + pixel[None, :]
        inside = (channel < CPG)[:, None] & (pixel < high)[None, :]
    return place, inside


@jit()
def channel_values(parameter, first, channel, NONE: constexpr, CPG: constexpr, LAST: constexpr):
    """Load a parameter (fp32, fp16 or bf16 [C], or None: NONE) of these channels as fp32, broadcastable to a tile."""
    if parameter is not None:
        value = tl.load(parameter + first + channel, mask=channel < CPG, other=0.0).to(tl.float32)
    else:
        value = tl.full(channel.shape, NONE, tl.float32)
    return value[None, :] if LAST else value[:, None]


@jit()
def share_statistics(x, low, high, groups, pixels, CPG: constexpr, LAST: constexpr, CT: constexpr, PT: constexpr):
    """Return mean, sum of squared deviations and count of a share: fp32 scalars, lane by lane after Welford (1962).

    x: the group's first element.
    """
    channels = tl.arange(0, CT)
    points = tl.arange(0, PT)
    center = tl.zeros((PT, CT) if LAST else (CT, PT), tl.float32)
    squares = tl.zeros_like(center)
    count = tl.zeros_like(center)
    for c in range(0, CPG, CT):
        for p in range(low, high, PT):
            place, inside = tile_places(c + channels, p + points, high, groups, pixels, CPG, LAST)
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            count += inside.to(tl.float32)
            distance = value - center
            # A lane's first value is its mean: ``/``, which is an approximation, might give one next to it.
            moved = tl.where(count > 1.0, center + distance / tl.maximum(count, 1.0), value)
            center = tl.where(inside, moved, center)
            squares = tl.where(inside, squares + distance * (value - center), squares)
    size = tl.sum(count)
    mean = tl.div_rn(tl.sum(center * count), tl.maximum(size, 1.0))
    # What rounding the products took.
    mean += tl.div_rn(tl.sum((center - mean) * count), tl.maximum(size, 1.0))
    distance = tl.where(count > 0, center - mean, 0.0)
    return mean, tl.sum(squares + count * (distance * distance)), size


@jit(do_not_specialize=["groups"])
def group_forward_kernel(
    x, weight, bias, y, statistics, parts, groups, pixels, eps,
    CPG: constexpr, LAST: constexpr, SILU: constexpr, WHOLE: constexpr, PHASE: constexpr, PARTS: constexpr,
    CT: constexpr, PT: constexpr,
):  # fmt: skip
    """Normalize one group, or a share of it. Grid: (N * groups, S).

    x: fp32, fp16 or bf16 [N, C, P], or [N, P, C] with LAST, read. weight, bias: fp32, fp16 or bf16 [C] or None, read.
    y: as x, written in phases 0 and 2. statistics: fp32 [2, N * groups], mean and rstd, written in phases 0 and 2.
    parts: fp32 [N * groups, S, 3], mean, sum of squared distances from it and count of each share: written in phase 1,
    read in phase 2; PARTS is S or the power of two above it. All arithmetic and sums in fp32.
    """
    group, _, first, base, low, high = group_place(groups, pixels, CPG, PT, LAST)
    # One pixel is a constant to Triton, which has no .to().
    number = tl.full((), pixels, tl.float32) * CPG
    total = tl.num_programs(0)
    channels = tl.arange(0, CT)
    points = tl.arange(0, PT)
    if WHOLE:
        place, inside = tile_places(channels, points, high, groups, pixels, CPG, LAST)
        value = tl.load(x + base + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.div_rn(tl.sum(value), number)
        # Two passes over registers: no cancellation between E[x^2] and mean^2.
        value = tl.where(inside, value - mean, 0.0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(value * value), number) + eps))
        value *= rstd * channel_values(weight, first, channels, 1.0, CPG, LAST)
        value += channel_values(bias, first, channels, 0.0, CPG, LAST)
        if SILU:
            value = value / (1.0 + tl.exp(-value))
        tl.store(y + base + place, value.to(y.dtype.element_ty), mask=inside)
        tl.store(statistics + group, mean)
        tl.store(statistics + total + group, rstd)
    else:
        # Every program merges all shares itself, which spares a third launch.
        if PHASE == 2:
            lanes = tl.arange(0, PARTS)
            here = lanes < tl.num_programs(1)
            part = parts + (group * tl.num_programs(1) + lanes) * 3
            means = tl.load(part, mask=here, other=0.0)
            sizes = tl.load(part + 2, mask=here, other=0.0)
            # Shares are merged after Chan, Golub and LeVeque (1983).
            mean = tl.div_rn(tl.sum(means * sizes), number)
            mean += tl.div_rn(tl.sum((means - mean) * sizes), number)
            distance = means - mean
            spread = tl.sum(tl.load(part + 1, mask=here, other=0.0) + sizes * (distance * distance))
        else:
            mean, spread, size = share_statistics(x + base, low, high, groups, pixels, CPG, LAST, CT, PT)
            if PHASE == 1:
                part = parts + (group * tl.num_programs(1) + tl.program_id(1)) * 3
                tl.store(part, mean)
                tl.store(part + 1, spread)
                tl.store(part + 2, size)
        if PHASE != 1:
            rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(spread, number) + eps))
            # All programs of a group have the same statistics; one writes them.
            if tl.program_id(1) == 0:
                tl.store(statistics + group, mean)
                tl.store(statistics + total + group, rstd)
            for c in range(0, CPG, CT):
                scale = channel_values(weight, first, c + channels, 1.0, CPG, LAST)
                shift = channel_values(bias, first, c + channels, 0.0, CPG, LAST)
                for p in range(low, high, PT):
                    place, inside = tile_places(c + channels, p + points, high, groups, pixels, CPG, LAST)
                    value = tl.load(x + base + place, mask=inside, other=0.0).to(tl.float32)
                    value = (value - mean) * rstd * scale + shift
                    if SILU:
                        value = value / (1.0 + tl.exp(-value))
                    tl.store(y + base + place, value.to(y.dtype.element_ty), mask=inside)


@jit()
def gradient_tile(dy, x, place, inside, mean, rstd, scale, shift, SILU: constexpr):
    """Return tiles of n = (x - mean) * rstd and of the gradient of n * scale + shift, fp32; both 0 outside."""
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    # Elements outside must add nothing to the sums.
    value = tl.where(inside, (value - mean) * rstd, 0.0)
    if SILU:
        z = value * scale + shift
        sigmoid = 1.0 / (1.0 + tl.exp(-z))
        gradient *= sigmoid * (1.0 + z * (1.0 - sigmoid))
    return value, gradient


@jit()
def store_channels(dweights, dbiases, place, weight_sum, bias_sum, channel, CPG: constexpr, LAST: constexpr):
    """Write a tile's sums over pixels to fp32 [N * S, C], each unless None."""
    if dweights is not None:
        tl.store(dweights + place + channel, tl.sum(weight_sum, 0 if LAST else 1), mask=channel < CPG)
    if dbiases is not None:
        tl.store(dbiases + place + channel, tl.sum(bias_sum, 0 if LAST else 1), mask=channel < CPG)


@jit(do_not_specialize=["groups"])
def group_backward_kernel(
    dy, x, weight, bias, statistics, dx, dweights, dbiases, parts, groups, pixels,
    CPG: constexpr, LAST: constexpr, SILU: constexpr, WHOLE: constexpr, PHASE: constexpr, PARTS: constexpr,
    CT: constexpr, PT: constexpr,
):  # fmt: skip
    """Compute the gradients of one group, or of a share of it. Grid: (N * groups, S).

    dy, x: fp32, fp16 or bf16 [N, C, P], or [N, P, C] with LAST, read. weight, bias: fp32, fp16 or bf16 [C] or None,
    read (bias for SILU). statistics: fp32 [2, N * groups], read.
    dx: as x, or None, written in phases 0 and 2.
    dweights, dbiases: fp32 [N * S, C] or None, written in phases 0 and 1: sums over the pixels of a share.
    parts: fp32 [N * groups, S, 2], sums of g and of g * n (see ``group_norm``): written in phase 1, read in phase 2.
    """
    group, sample, first, base, low, high = group_place(groups, pixels, CPG, PT, LAST)
    # One pixel is a constant to Triton, which has no .to().
    number = tl.full((), pixels, tl.float32) * CPG
    mean = tl.load(statistics + group)
    rstd = tl.load(statistics + tl.num_programs(0) + group)
    channels = tl.arange(0, CT)
    points = tl.arange(0, PT)
    row = (sample * tl.num_programs(1) + tl.program_id(1)) * (groups * CPG) + first
    if WHOLE:
        place, inside = tile_places(channels, points, high, groups, pixels, CPG, LAST)
        scale = channel_values(weight, first, channels, 1.0, CPG, LAST)
        shift = channel_values(bias, first, channels, 0.0, CPG, LAST)
        value, gradient = gradient_tile(dy, x, base + place, inside, mean, rstd, scale, shift, SILU)
        store_channels(dweights, dbiases, row, gradient * value, gradient, channels, CPG, LAST)
        if dx is not None:
            gradient *= scale
            level = tl.div_rn(tl.sum(gradient), number)
            slope = tl.div_rn(tl.sum(gradient * value), number)
            gradient = (gradient - level - value * slope) * rstd
            tl.store(dx + base + place, gradient.to(dx.dtype.element_ty), mask=inside)
    else:
        level = 0.0
        slope = 0.0
        if PHASE == 2:
            lanes = tl.arange(0, PARTS)
            part = parts + (group * tl.num_programs(1) + lanes) * 2
            level += tl.sum(tl.load(part, mask=lanes < tl.num_programs(1), other=0.0))
            slope += tl.sum(tl.load(part + 1, mask=lanes < tl.num_programs(1), other=0.0))
        else:
            for c in range(0, CPG, CT):
                scale = channel_values(weight, first, c + channels, 1.0, CPG, LAST)
                shift = channel_values(bias, first, c + channels, 0.0, CPG, LAST)
                weight_sum = tl.zeros((PT, CT) if LAST else (CT, PT), tl.float32)
                bias_sum = tl.zeros_like(weight_sum)
                for p in range(low, high, PT):
                    place, inside = tile_places(c + channels, p + points, high, groups, pixels, CPG, LAST)
                    value, gradient = gradient_tile(dy, x, base + place, inside, mean, rstd, scale, shift, SILU)
                    weight_sum += gradient * value
                    bias_sum += gradient
                store_channels(dweights, dbiases, row, weight_sum, bias_sum, c + channels, CPG, LAST)
                # The weight is constant for a channel: sums over pixels are multiplied by it once.
                level += tl.sum(bias_sum * scale)
                slope += tl.sum(weight_sum * scale)
            if PHASE == 1:
                part = parts + (group * tl.num_programs(1) + tl.program_id(1)) * 2
                tl.store(part, level)
                tl.store(part + 1, slope)
        if dx is not None and PHASE != 1:
            level = tl.div_rn(level, number)
            slope = tl.div_rn(slope, number)
            for c in range(0, CPG, CT):
                scale = channel_values(weight, first, c + channels, 1.0, CPG, LAST)
                shift = channel_values(bias, first, c + channels, 0.0, CPG, LAST)
                for p in range(low, high, PT):
                    place, inside = tile_places(c + channels, p + points, high, groups, pixels, CPG, LAST)
                    value, gradient = gradient_tile(dy, x, base + place, inside, mean, rstd, scale, shift, SILU)
                    gradient = (gradient * scale - level - value * slope) * rstd
                    tl.store(dx + base + place, gradient.to(dx.dtype.element_ty), mask=inside)
