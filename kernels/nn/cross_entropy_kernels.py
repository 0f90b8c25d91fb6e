"""Launches the kernel of cross-entropy: losses of rows, gradients, or both, by an online log-sum-exp over columns.

Let ``a`` be the target's weight of each class (one-hot, smoothed, or probabilities; times the class weights) and
``lse = log sum exp x``. A row's loss and gradient are ::

    loss = sum_c a_c * (lse - x_c) + z_loss * lse**2
    d loss / d x_c = (sum a + 2 * z_loss * lse) * exp(x_c - lse) - a_c

A row's statistics, FP32: its largest logit and ``log sum exp(x - largest)``, which add up to ``lse`` but are not added:
``x - largest - log_sum`` is as exact far from zero as near it; and ``sum a``.

Rows of any length at any address are read and written 16 bytes at a time: elements before the first multiple of 16
bytes in a row and after the last form a tile of their own (EDGES). Short rows share a program.

On a CPU rows with a label each run as a compiled loop, ``cpu/cross_entropy.cpp``. A row stays in the cache between the
passes over it, so that logits come from memory once forward and once backward, where torch's ops move some 20 bytes
more for each. The first call compiles (``cpu/cpp``): 0.6 seconds, once a machine.
"""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fxprec.kernels.cpu.cpp import compiled, pointer
from fxprec.kernels.launch.triton_support import can_launch, constexpr, int64, jit, on_device, tl
from fxprec.kernels.nn.cross_entropy_reference import LossPass, launch_in_torch

_BLOCK: Final = 4096
# Elements of the rows that share a program.
_SHORT: Final = 2048
_WARPS: Final = 8


@jit()
def row_middle(row, columns, VECTOR: constexpr):
    """Return the part of a row made of whole 16-byte runs: its pointer, first column and number of columns (int32).

    row: pointer to the row's first column, at any address. VECTOR: elements in 16 bytes.
    """
    # A row may be shorter than its way to the first aligned element.
    before = tl.minimum((16 - row.to(tl.int64) % 16) % 16 // (16 // VECTOR), columns).to(tl.int32)
    return tl.multiple_of(row + before, 16), before, (columns - before) // VECTOR * VECTOR


@jit()
def edge_places(before, width, columns, VECTOR: constexpr):
    """Return the other columns, fewer than VECTOR at either end: int32 numbers and their mask, [1, 2 * VECTOR]."""
    edge = tl.arange(0, 2 * VECTOR)[None, :]
    places = tl.where(edge < VECTOR, edge, before + width + edge - VECTOR)
    return places, tl.where(edge < VECTOR, edge < before, places < columns)


@jit()
def spread_tile(targets, weight, columns, inside, keep, spread, SOFT: constexpr, SMOOTHED: constexpr):
    """Return the target's weight of each class in a tile without the one-hot part: fp32 [R, B], or [1, 1] if all equal.

    targets: pointers [R, 1] to rows of probabilities (fp32, fp16, bf16), read where SOFT. weight: fp32, fp16, bf16
    [C] or None. columns: int32 [1, B], the tile's. inside: int1 [R, B]. keep, spread: fp32 scalars.
    """
    given = tl.zeros((1, 1), tl.float32)
    if SOFT:
        given = tl.load(targets + columns, mask=inside, other=0.0).to(tl.float32)
    if SMOOTHED:
        given = given * keep + spread
    if weight is not None:
        if SOFT or SMOOTHED:
            given = given * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    return given


@jit()
def sum_tile(
    x, columns, inside, targets, weight, keep, spread, origin,
    largest, total, linear, mass, lanes, linear_lanes, mass_lanes,
    SOFT: constexpr, SMOOTHED: constexpr, LANES: constexpr,
):  # fmt: skip
    """Add a tile to its rows' sums; return the tensors of the second line of arguments, updated.

    x: fp32 [R, B], -inf outside. columns, inside, targets, weight, keep, spread: ``spread_tile``'s.
    origin: fp32 [R], what x counts from in the linear sum: any number near x keeps it exact.
    largest, total, linear, mass: fp32 [R], the largest x, and the sums of exp(x - largest), of given * (x - origin) and
    of given (left alone where that is spread everywhere). With LANES the tile goes to lanes, linear_lanes and
    mass_lanes, fp32 [R, B], which are parts of the sums.
    """
    higher = tl.maximum(largest, tl.max(x, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
    # Sums so far were relative to the old largest value.
    shrink = tl.exp(largest - shift)
    terms = tl.exp(x - shift[:, None])
    total = total * shrink
    if LANES:
        lanes = lanes * shrink[:, None] + terms
    else:
        total += tl.sum(terms, 1)
    if SOFT or SMOOTHED:
        given = tl.where(inside, spread_tile(targets, weight, columns, inside, keep, spread, SOFT, SMOOTHED), 0.0)
        products = given * tl.where(inside, x - origin[:, None], 0.0)
        if LANES:
            linear_lanes += products
        else:
            linear += tl.sum(products, 1)
        if SOFT or weight is not None:
            if LANES:
                mass_lanes += given
            else:
                mass += tl.sum(given, 1)
    return higher, total, linear, mass, lanes, linear_lanes, mass_lanes


@jit()
def write_tile(
    x, columns, inside, targets, weight, keep, spread, output, target_output,
    live, label, hit, largest, log_sum, slope, factor, SOFT: constexpr, SMOOTHED: constexpr,
):  # fmt: skip
    """Write the gradient of a tile: factor * (slope * exp(x - lse) - a), zero in rows that are not live.

    x: fp32 [R, B]. columns, targets, weight, keep, spread: ``spread_tile``'s. inside: int1 [R, B], where to write.
    output: pointers [R, B]. target_output: pointers [R, B] for factor * keep * weight * (lse - x), the gradient of
    probabilities; or None. live: int1, label: int64, the others fp32, [R].
    """
    # Two subtractions: largest + log_sum would round away digits far from zero.
    place = (x - largest[:, None]) - log_sum[:, None]
    value = slope[:, None] * tl.exp(place)
    if SOFT or SMOOTHED:
        value -= spread_tile(targets, weight, columns, inside & live[:, None], keep, spread, SOFT, SMOOTHED)
    if not SOFT:
        value -= tl.where(columns == label[:, None], hit[:, None], 0.0)
    value = tl.where(live[:, None], value * factor[:, None], 0.0)
    tl.store(output, value.to(output.dtype.element_ty), mask=inside)
    if target_output is not None:
        value = -keep * factor[:, None] * place
        if weight is not None:
            value *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(target_output, value.to(target_output.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["count"])
def cross_entropy_kernel(
    logits, logits_stride, target, target_stride, weight, count, columns, ignore_index: int64, keep, spread, z_loss,
    losses, shares, stats, grad_output, grad_output_stride, denominator, scale, gradient, gradient_stride,
    target_gradient, target_gradient_stride,
    SOFT: constexpr, SMOOTHED: constexpr, FORWARD: constexpr, BACKWARD: constexpr, EDGES: constexpr,
    ALIGNED: constexpr, WHOLE: constexpr, VECTOR: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Write losses and statistics (FORWARD), gradients (BACKWARD), or both of ROWS rows. Grid: ceil(count / ROWS).

    logits: fp32, fp16, bf16 [count, columns], rows logits_stride apart; computed in fp32. target: int64 or uint8
    [count], target_stride apart; or with SOFT fp32, fp16, bf16 [count, columns], rows target_stride apart.
    weight: fp32, fp16, bf16 [columns] or None. keep, spread: fp32, 1 - label_smoothing and label_smoothing / columns.
    losses: fp32 [count], written. shares: fp32 [count] or None, written: the row's part of a mean's denominator.
    stats: fp32 [3, count]: largest, log_sum, sum of a; written where FORWARD, else read.
    A gradient is times scale (fp32) * grad_output (fp32, grad_output_stride apart, 0: one for all; or None) /
    denominator (fp32 [1] or None). gradient: fp32, fp16, bf16 [count, columns], rows gradient_stride apart, written;
    may be logits. target_gradient: the same for probabilities, or None.
    EDGES: rows start anywhere; ROWS is 1; VECTOR elements are 16 bytes; ALIGNED: the gradient's do as the logits' do.
    WHOLE: BLOCK holds a row, which is read once. A row of ignore_index is not read. A label outside [0, columns) reads
    nothing and gives NaN; with TRITON_DEBUG=1 it fails an assertion.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    exists = rows < count
    live = exists  # less the rows of ignore_index
    known = exists  # less those whose label is no class
    label = tl.zeros((ROWS,), tl.int64)
    hit = tl.zeros((ROWS,), tl.float32)
    share = tl.zeros((ROWS,), tl.float32) + 1.0
    if not SOFT:
        label = tl.load(target + rows * target_stride, mask=exists, other=0).to(tl.int64)
        live = exists & (label != ignore_index)
        known = live & (label >= 0) & (label < columns)
        tl.device_assert(known | (live == 0), "cross_entropy: a target is out of bounds")
        if weight is not None:
            share = tl.load(weight + label, mask=known, other=0.0).to(tl.float32)
        hit = keep * share

    starts = logits + rows[:, None] * logits_stride
    targets = target + rows[:, None] * target_stride
    offsets = tl.arange(0, BLOCK)[None, :]
    middle, before, width, edges, some, chosen, whole_tile = starts, 0, columns, None, None, None, None
    # From here on ``middle`` is aligned: its tiles are read 16 bytes at a time, the edges by a masked tile.
    if EDGES:
        middle, before, width = row_middle(
            logits + tl.program_id(0).to(tl.int64) * logits_stride, columns, VECTOR
        )  # fmt: skip
        edges, some = edge_places(before, width, columns, VECTOR)

    if FORWARD:
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        linear = tl.zeros((ROWS,), tl.float32)
        mass = tl.zeros((ROWS,), tl.float32)
        lanes = tl.zeros((ROWS, BLOCK), tl.float32)
        linear_lanes, mass_lanes = linear, mass
        origin = tl.zeros((ROWS,), tl.float32)
        if SOFT or SMOOTHED:
            linear_lanes = lanes
            if SOFT or weight is not None:
                mass_lanes = lanes
            else:
                mass += spread * columns
            # The linear sum counts from the row's first logit: near it differences are exact, however large logits are.
            origin = tl.load(logits + rows * logits_stride, mask=live, other=0.0).to(tl.float32)
            origin = tl.where(tl.abs(origin) < float("inf"), origin, 0.0)
        if not SOFT:
            chosen = tl.load(logits + rows * logits_stride + label, mask=known, other=0.0).to(tl.float32)
        if EDGES:
            inside = live[:, None] & some
            x = tl.load(starts + edges, mask=inside, other=float("-inf")).to(tl.float32)
            largest, total, linear, mass, lanes, linear_lanes, mass_lanes = sum_tile(
                x, edges, inside, targets, weight, keep, spread, origin,
                largest, total, linear, mass, lanes, linear_lanes, mass_lanes, SOFT, SMOOTHED, False,
            )  # fmt: skip
        # The row's only tile stays in registers for its gradient.
        if WHOLE:
            whole_inside = live[:, None] & (offsets < width)
            whole_tile = tl.load(middle + offsets, mask=whole_inside, other=float("-inf")).to(tl.float32)
            largest, total, linear, mass, lanes, linear_lanes, mass_lanes = sum_tile(
                whole_tile, offsets, whole_inside, targets, weight, keep, spread, origin,
                largest, total, linear, mass, lanes, linear_lanes, mass_lanes, SOFT, SMOOTHED, False,
            )  # fmt: skip
        else:
            for first in range(0, width, BLOCK):
                at = first + offsets
                tile_inside = live[:, None] & (at < width)
                tile = tl.load(middle + at, mask=tile_inside, other=float("-inf")).to(tl.float32)
                largest, total, linear, mass, lanes, linear_lanes, mass_lanes = sum_tile(
                    tile, before + at, tile_inside, targets, weight, keep, spread, origin,
                    largest, total, linear, mass, lanes, linear_lanes, mass_lanes, SOFT, SMOOTHED, True,
                )  # fmt: skip
            # Lanes are added up once a row, not once a tile.
            total += tl.sum(lanes, 1)
            if SOFT or SMOOTHED:
                linear += tl.sum(linear_lanes, 1)
                if SOFT or weight is not None:
                    mass += tl.sum(mass_lanes, 1)
        log_sum = tl.log(total)
        loss = mass * ((largest - origin) + log_sum) - linear if SOFT or SMOOTHED else linear
        if not SOFT:
            loss += hit * (log_sum + (largest - chosen))
        loss += z_loss * (largest + log_sum) * (largest + log_sum)  # in this order: zero where z_loss is
        mass += hit
        tl.store(losses + rows, tl.where(live, tl.where(known, loss, float("nan")), 0.0), mask=exists)
        tl.store(stats + rows, largest, mask=exists)
        tl.store(stats + count + rows, log_sum, mask=exists)
        tl.store(stats + count.to(tl.int64) * 2 + rows, mass, mask=exists)
        if shares is not None:
            tl.store(shares + rows, tl.where(live, share, 0.0), mask=exists)
    else:
        largest = tl.load(stats + rows, mask=live, other=0.0)
        log_sum = tl.load(stats + count + rows, mask=live, other=0.0)
        mass = tl.load(stats + count.to(tl.int64) * 2 + rows, mask=live, other=0.0)

    if BACKWARD:
        if FORWARD:
            # The gradient may lie where the logits do: all threads have read what they need of them.
            tl.debug_barrier()
        factor = tl.zeros((ROWS,), tl.float32) + scale
        if grad_output is not None:
            factor = factor * tl.load(grad_output + rows * grad_output_stride, mask=live, other=0.0)
        if denominator is not None:
            factor = tl.div_rn(factor, tl.zeros((ROWS,), tl.float32) + tl.load(denominator))
        # A label that is no class must show, as a NaN row.
        factor = tl.where(known, factor, float("nan"))
        slope = mass + 2.0 * z_loss * (largest + log_sum)
        outputs = gradient + rows[:, None] * gradient_stride
        output = outputs
        target_output = None
        if EDGES:
            output = gradient + tl.program_id(0).to(tl.int64) * gradient_stride + before
            if ALIGNED:
                output = tl.multiple_of(output, 16)
            x = tl.load(starts + edges, mask=live[:, None] & some, other=0.0).to(tl.float32)
            if target_gradient is not None:
                target_output = target_gradient + rows[:, None] * target_gradient_stride + edges
            write_tile(
                x, edges, exists[:, None] & some, targets, weight, keep, spread, outputs + edges, target_output,
                live, label, hit, largest, log_sum, slope, factor, SOFT, SMOOTHED,
            )  # fmt: skip
        for first in range(0, BLOCK if WHOLE else width, BLOCK):
            at = first + offsets
            if FORWARD and WHOLE:
                tile = whole_tile
            else:
                tile = tl.load(middle + at, mask=live[:, None] & (at < width), other=0.0).to(tl.float32)
            tile_output = None
            if target_gradient is not None:
                tile_output = target_gradient + rows[:, None] * target_gradient_stride + before + at
            write_tile(
                tile, before + at, exists[:, None] & (at < width), targets, weight, keep, spread, output + at,
                tile_output, live, label, hit, largest, log_sum, slope, factor, SOFT, SMOOTHED,
            )  # fmt: skip


class RowTiling(NamedTuple):
    """Tile sizes and warps for logits [N, C]; ``edges`` and ``whole``: see the kernel."""

    edges: bool
    whole: bool
    rows: int
    block: int
    warps: int


def row_tiling(logits: Tensor, heavy: bool = False, both: bool = False) -> RowTiling:
    """Choose the tiles by the number of columns, and by whether all rows start and end at multiples of 16 elements.

    Args:
        heavy: every class contributes to the loss (smoothing, probabilities), by sums that take registers.
        both: forward and backward in one launch, which takes more registers than one of them.
    """
    columns = logits.shape[1]
    uneven = bool(columns % 16 or logits.stride(0) % 16 or logits.data_ptr() % 16)
    heavy = heavy or logits.dtype == torch.float32 or (both and (uneven or columns > _BLOCK))
    longest = _BLOCK // 2 if heavy else _BLOCK
    block = min(longest, 1 << max(columns - 1, 15).bit_length())
    rows = max(1, _SHORT // block)
    edges = rows == 1 and uneven
    return RowTiling(edges, columns <= block and not edges, rows, block, _WARPS if heavy or rows == 1 else _WARPS // 2)


def starts_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether each row of ``a`` is as far from a multiple of 16 bytes as the same row of ``b``."""
    apart = (a.stride(0) - b.stride(0)) * a.element_size()
    return a.dtype == b.dtype and (a.data_ptr() - b.data_ptr()) % 16 == apart % 16 == 0


def launch(rows: LossPass, compiled: bool = False) -> None:
    """Run a pass on the current stream: by the kernel, without Triton in plain torch, or ``compiled``, a C++ loop.

    Shapes and dtypes are the kernel's; the caller has checked them.
    """
    if compiled:
        _launch_compiled(rows)
    elif not can_launch(rows.logits.device):
        launch_in_torch(rows)
    elif len(rows.logits):
        soft, smoothed = rows.target.is_floating_point(), rows.label_smoothing > 0
        both = rows.losses is not None and rows.gradient is not None
        if both and (soft or (smoothed and rows.weight is not None)):
            # Both at once take more registers than there are.
            _launch_kernel(rows._replace(gradient=None, grad_output=None, denominator=None), soft, smoothed)
            rows = rows._replace(losses=None)
        _launch_kernel(rows, soft, smoothed)


def _launch_kernel(rows: LossPass, soft: bool, smoothed: bool) -> None:
    (
        logits, target, weight, ignore_index, smoothing, z_loss, stats, losses, shares, grad_output, denominator, scale,
        gradient, target_gradient,
    ) = rows  # fmt: skip
    count, columns = logits.shape
    forward, backward = losses is not None, gradient is not None
    edges, whole, height, block, warps = row_tiling(logits, soft or smoothed, forward and backward)
    with on_device(logits.device):
        cross_entropy_kernel[(-(-count // height),)](
            logits, logits.stride(0), target, target.stride(0), weight, count, columns, ignore_index,
            1.0 - smoothing, smoothing / columns, z_loss, losses, shares, stats, grad_output,
            grad_output.stride(0) if grad_output is not None and grad_output.dim() else 0, denominator, scale,
            gradient, 0 if gradient is None else gradient.stride(0),
            target_gradient, 0 if target_gradient is None else target_gradient.stride(0),
            SOFT=soft, SMOOTHED=smoothed, FORWARD=forward, BACKWARD=backward, EDGES=edges,
            ALIGNED=gradient is not None and starts_alike(logits, gradient), WHOLE=whole,
            VECTOR=16 // logits.element_size(), ROWS=height, BLOCK=block, num_warps=warps,
        )  # fmt: skip


class _Logits(ctypes.Structure):
    """Struct ``Logits`` of the C++ source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "labels")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "stride", "ignored")),
        *((name, ctypes.c_float) for name in ("smoothing", "z_loss")),
    )


def _launch_compiled(rows: LossPass) -> None:
    """Run a pass for labels without class weights, with torch's number of threads.

    Raises:
        IndexError: a label outside of [0, C), as torch on a CPU.
        CompilerError: nothing can be compiled here.
    """
    logits, gradient = rows.logits, rows.gradient
    # The loop reads at labels without a check.
    rows.check_bounds()
    labels = rows.target.contiguous()
    of = _Logits(
        logits.data_ptr(), labels.data_ptr(), *logits.shape, logits.stride(0), rows.ignore_index, rows.label_smoothing,
        rows.z_loss,
    )  # fmt: skip
    library, threads, low = compiled("cpu/cross_entropy.cpp"), torch.get_num_threads(), logits.dtype is torch.bfloat16
    if rows.losses is not None:
        library.fxprec_cross_entropy_forward(
            ctypes.byref(of), low, pointer(rows.stats), pointer(rows.losses), pointer(rows.shares), threads
        )
    if gradient is not None:
        factor = rows.factors()
        library.fxprec_cross_entropy_backward(
            ctypes.byref(of), low, pointer(rows.stats), pointer(factor), pointer(gradient),
            ctypes.c_int64(gradient.stride(0)), threads,
        )  # fmt: skip
