"""Computes max pooling of channels_last; saves only one byte a result: the place of the maximum in its window.

::

    y = max over i, j of x[n, c, SH * h - PH + i, SW * w - PW + j]     where = i * KW + j     the first of equal ones
    dx = the sum of dy of those windows that chose an element

torch saves x, eight bytes a result (an int64), and adds gradients up in a tensor that it fills with zeros before; of a
U-Net's 28 ms on an H200 (32 x 256 x 256, bfloat16, torch 2.11, 2026-11-26) its poolings took 2.1; the bytes here take
0.35. The backward asks each element which of its windows chose it: no atomics, so the same gradients each time.

On a CPU torch's op runs, or a compiled loop, ``cpu/max_pool.cpp``, for the same reason: torch's kernel writes eight
bytes a result, and its backward fills a gradient with zeros and adds to it. The first call compiles (``cpu/cpp``), once
a machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.cpu.cpp import compiled, pointer
from fxprec.kernels.launch.kernel_op import KernelOp
from fxprec.kernels.launch.observers import ANY_MODE, COMPILER, TRANSFORM, watcher
from fxprec.kernels.launch.operands import check_looped, check_operands
from fxprec.kernels.launch.triton_support import can_launch, constexpr, jit, on_device, tl

#: Elements of a tile, 8 a thread: 16 bytes of low ones.
_TILE: Final = 1024
_WARPS: Final = 4
#: Most elements of a window: their numbers are int8.
LARGEST: Final = 127
#: Most pixels of all samples: their numbers are int32, whose divisions are fast.
_PIXELS: Final = (1 << 31) - _TILE
_ANY: Final = ["pixels", "height", "width", "out_height", "out_width"]


@jit(do_not_specialize=_ANY)
def pool_kernel(
    x, y, where, pixels, height, width, out_height, out_width, channels,
    KH: constexpr, KW: constexpr, SH: constexpr, SW: constexpr, PH: constexpr, PW: constexpr,
    PIXELS: constexpr, CHANNELS: constexpr,
):  # fmt: skip
    """Write PIXELS results of CHANNELS channels. Grid: (ceil(pixels / PIXELS), ceil(channels / CHANNELS)).

    x: fp32, fp16 or bf16 [samples, height, width, channels]. y: of its dtype, with out_height and out_width.
    where: int8 of y's shape, or None. pixels: samples * out_height * out_width. Compared in fp32; a NaN is a maximum.
    """
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (pixel < pixels)[:, None] & (channel < channels)
    row = pixel // out_width
    top = (row % out_height) * SH - PH
    left = (pixel % out_width) * SW - PW
    sample = row // out_height
    best = tl.full((PIXELS, CHANNELS), float("-inf"), tl.float32)
    chosen = tl.full((PIXELS, CHANNELS), -1, tl.int32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            h, w = top + i, left + j
            there = (h >= 0) & (h < height) & (w >= 0) & (w < width)
            place = ((sample * height + h) * width + w).to(tl.int64)[:, None] * channels + channel
            value = tl.load(x + place, mask=inside & there[:, None], other=float("-inf")).to(tl.float32)
            # The first of equal values wins; a NaN always does, and "chosen < 0" takes a first -inf.
            takes = there[:, None] & ((value > best) | (value != value) | (chosen < 0))
            best = tl.where(takes, value, best)
            chosen = tl.where(takes, i * KW + j, chosen)
    result = pixel.to(tl.int64)[:, None] * channels + channel
    tl.store(y + result, best.to(y.dtype.element_ty), mask=inside)
    if where is not None:
        tl.store(where + result, chosen.to(tl.int8), mask=inside)


@jit(do_not_specialize=_ANY)
def pool_backward_kernel(
    dy, where, dx, pixels, height, width, out_height, out_width, channels,
    KH: constexpr, KW: constexpr, SH: constexpr, SW: constexpr, PH: constexpr, PW: constexpr,
    PIXELS: constexpr, CHANNELS: constexpr,
):  # fmt: skip
    """Write gradients of PIXELS elements by CHANNELS channels. Grid: (cdiv(pixels, PIXELS), cdiv(channels, CHANNELS)).

    dy: fp32, fp16 or bf16 and where: int8, both [samples, out_height, out_width, channels].
    dx: fp32, fp16 or bf16 [samples, height, width, channels]. pixels: samples * height * width. Added up in fp32.
    """
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (pixel < pixels)[:, None] & (channel < channels)
    row = pixel // width
    h = row % height + PH
    w = pixel % width + PW
    sample = row // height
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    # An element asks every window that may hold it whether it was chosen: no atomics.
    for a in tl.static_range((KH + SH - 1) // SH):
        for b in tl.static_range((KW + SW - 1) // SW):
            # Windows that may hold it, the last first.
            out_h, out_w = h // SH - a, w // SW - b
            i, j = h - out_h * SH, w - out_w * SW
            there = (out_h >= 0) & (out_h < out_height) & (out_w >= 0) & (out_w < out_width) & (i < KH) & (j < KW)
            result = ((sample * out_height + out_h) * out_width + out_w).to(tl.int64)[:, None] * channels + channel
            read = inside & there[:, None]
            number = tl.load(where + result, mask=read, other=-1).to(tl.int32)
            gradient = tl.load(dy + result, mask=read, other=0.0).to(tl.float32)
            total += tl.where(number == (i * KW + j)[:, None], gradient, 0.0)
    place = pixel.to(tl.int64)[:, None] * channels + channel
    tl.store(dx + place, total.to(dx.dtype.element_ty), mask=inside)


def max_pool2d(
    x: Tensor, kernel_size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int] = (0, 0), *,
    compiled: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``torch.nn.functional.max_pool2d``, without dilation and of whole windows.

    Args:
        x: float32, float16 or bfloat16 [N, C, H, W], which is copied where it is not channels_last.
        kernel_size: of at most 127 elements. A window that lies in the padding does not count.
        padding: at most half of the kernel's size.
        compiled: on a CPU with AVX-512 run as a C++ loop, which the first call compiles: bfloat16 or float32.

    Returns:
        of x's dtype, channels_last.

    Raises:
        TypeError: another dtype.
        ValueError: another number of dims; sizes that torch does not take either; a larger window; ``compiled`` of
            what that does not serve.
        CompilerError: nothing can be compiled here.
    """
    check_operands("max_pool2d", x=x)
    if why := why_not(x, kernel_size, stride, padding):
        raise ValueError(why)
    if compiled:
        check_looped("max_pool2d", x)
    # Under a tracer the places are always made: the traced graph may run with gradients.
    saved = watcher(COMPILER, ANY_MODE, TRANSFORM) is not None or (torch.is_grad_enabled() and x.requires_grad)
    return _POOL(x, [*kernel_size, *stride, *padding], saved, compiled)[0]


def why_not(x: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> str:
    """Return why ``max_pool2d`` refuses these sizes, or ""."""
    if x.dim() != 4:
        return f"max_pool2d takes [N, C, H, W], got {tuple(x.shape)}."
    halves = all(0 <= 2 * p <= k for k, p in zip(kernel_size, padding, strict=True))
    fits = min(*kernel_size, *stride) > 0 and halves and kernel_size[0] * kernel_size[1] <= LARGEST
    if fits and min(_out_sizes(x, (*kernel_size, *stride, *padding))) >= 1:
        return ""
    return (
        f"max_pool2d of {tuple(x.shape)} with {kernel_size=}, {stride=}, {padding=}: sizes are at least 1, of the "
        f"result, too, the padding is at most half of the kernel, and a window has at most {LARGEST} elements."
    )


def backward_reference(
    dy: Tensor, where: Tensor, height: int, width: int, window: list[int], compiled: bool = False
) -> Tensor:  # fmt: skip
    """Return the gradient of x in plain torch, differentiable; in FP32 for a low dy, and contiguous.

    ``compiled`` is an argument of the op and changes nothing here.
    """
    rows, columns = _origins(where, window)
    number = where.long()
    places = (rows + number // window[1]) * width + columns + number % window[1]
    wide = dy.new_zeros((*dy.shape[:2], height * width), dtype=torch.promote_types(dy.dtype, torch.float32))
    return wide.scatter_add(2, places.flatten(2), dy.to(wide.dtype).flatten(2)).view(*dy.shape[:2], height, width)


def _origins(y: Tensor, window: list[int]) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of x at which the windows begin: [H, 1] and [W]."""
    _, _, sh, sw, ph, pw = window
    down, across = (torch.arange(size, device=y.device) for size in y.shape[2:])
    return down[:, None] * sh - ph, across * sw - pw


def _out_sizes(x: Tensor, window: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of the result."""
    kh, kw, sh, sw, ph, pw = window
    return (x.shape[2] + 2 * ph - kh) // sh + 1, (x.shape[3] + 2 * pw - kw) // sw + 1


def _results(x: Tensor, window: list[int], saved: bool = True, compiled: bool = False) -> tuple[Tensor, Tensor]:
    """Allocate y, and the places of the maxima, empty unless they are saved."""
    shape = (*x.shape[:2], *_out_sizes(x, window))
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return y, torch.empty_like(y, dtype=torch.int8) if saved else x.new_empty(0, dtype=torch.int8)


def _launch(
    kernel: Any, first: Tensor, second: Tensor, third: Tensor | None, sizes: Any, out: Any, window: list[int]
) -> None:
    channels = first.shape[1]
    block = min(1 << (channels - 1).bit_length(), _TILE)
    count = _TILE // block
    of = sizes if kernel is pool_backward_kernel else out
    pixels = first.shape[0] * of[0] * of[1]
    names = ("KH", "KW", "SH", "SW", "PH", "PW")
    with on_device(first.device):
        kernel[(-(-pixels // count), -(-channels // block))](
            first, second, third, pixels, *sizes, *out, channels,
            PIXELS=count, CHANNELS=block, num_warps=_WARPS, **dict(zip(names, window, strict=True)),
        )  # fmt: skip


def _served(x: Tensor) -> bool:
    return can_launch(x.device) and x.dtype != torch.float64 and x.numel() // x.shape[1] < _PIXELS


def _forward(x: Tensor, window: list[int], saved: bool = True, compiled: bool = False) -> tuple[Tensor, Tensor]:
    y, where = _results(x, window, saved, compiled)
    if not y.numel():
        return y, where
    x = x.resolve_neg()
    if compiled and x.numel():
        x = x.contiguous(memory_format=torch.channels_last)
        _loop("forward", x, y, window, x, y, where if saved else None)
        return y, where
    if _served(x):
        x = x.contiguous(memory_format=torch.channels_last)
        _launch(pool_kernel, x, y, where if saved else None, x.shape[2:], y.shape[2:], window)
        return y, where
    # Without places torch's kernel writes no int64 for each result.
    if not saved:
        return y.copy_(F.max_pool2d(x, window[:2], window[2:4], window[4:])), where
    values, index = F.max_pool2d(x, window[:2], window[2:4], window[4:], return_indices=True)
    rows, columns = _origins(y, window)
    y.copy_(values)
    where.copy_((index // x.shape[3] - rows) * window[1] + index % x.shape[3] - columns)
    return y, where


def _backward_launch(
    dy: Tensor, where: Tensor, height: int, width: int, window: list[int], compiled: bool = False
) -> Tensor:
    dx = _fake_backward(dy, where, height, width, window, compiled)
    if not dx.numel():
        return dx
    where = where.contiguous(memory_format=torch.channels_last)  # as hooks of saved tensors may not have left it
    dy = dy.resolve_neg()
    if compiled:
        dy = dy.contiguous(memory_format=torch.channels_last)
        _loop("backward", dx, dy, window, dy, where, dx)
        return dx
    if _served(dx):
        dy = dy.contiguous(memory_format=torch.channels_last)
        _launch(pool_backward_kernel, dy, where, dx, dx.shape[2:], dy.shape[2:], window)
        return dx
    return dx.copy_(backward_reference(dy, where, height, width, window))


def _fake_backward(
    dy: Tensor, where: Tensor, height: int, width: int, window: list[int], compiled: bool = False
) -> Tensor:
    shape = (*dy.shape[:2], height, width)
    return torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.window, ctx.saved, ctx.compiled = inputs
    ctx.sizes = x.shape[2], x.shape[3]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, dy: Tensor, _: Any) -> Tensor:
    if not ctx.saved:
        raise RuntimeError("max_pool2d(saved=False) keeps nothing for a backward: leave saved out where one follows.")
    (where,), (height, width) = ctx.saved_tensors, ctx.sizes
    if torch.is_grad_enabled():  # which element is chosen has no derivative: x itself is not needed
        return backward_reference(dy, where, height, width, ctx.window).to(dy.dtype)
    return _POOL_BACKWARD(dy, where, height, width, ctx.window, ctx.compiled)


_POOL_BACKWARD = KernelOp("max_pool2d_backward", _backward_launch, _fake_backward)
_POOL = KernelOp("max_pool2d", _forward, _results, backward=_backward, setup_context=_save)


def _loop(direction: str, x: Tensor, y: Tensor, window: Sequence[int], *tensors: Tensor | None) -> None:
    """Run the compiled loop of a direction, with torch's number of threads.

    Args:
        direction: "forward", of x, y and maybe the places; or "backward", of dy, the places and dx.
        x: or its gradient: bfloat16 or float32 [N, C, H, W] on a CPU; all tensors are channels_last.
        y: or its gradient.
        window: KH, KW, SH, SW, PH, PW.
        tensors: those that the loop reads and writes, in its order.

    Raises:
        CompilerError: nothing can be compiled here.
    """
    # The struct of the C++ source, whose members are all int64.
    sizes = (ctypes.c_int64 * 12)(*x.shape, *y.shape[2:], *window)
    run = getattr(compiled("cpu/max_pool.cpp"), f"fxprec_max_pool_{direction}")
    run(sizes, x.dtype is torch.bfloat16, *map(pointer, tensors), torch.get_num_threads())
