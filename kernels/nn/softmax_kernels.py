"""The two kernels of ``softmax``, forward and backward, over rows x columns; ``softmax`` says what they compute.

A row of up to 16384 columns stays in registers: what is read is read once. A longer one goes by column blocks, a
running maximum and sum first (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018); it is read
twice, the second time mostly from the L2 cache.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.launch.philox import drop_threshold, dropout_factor, dropout_scale
from fxprec.kernels.launch.triton_support import constexpr, jit, on_device, tl

#: Columns that a program holds at once.
_WHOLE: Final = 16384
#: Columns of a block of a longer row.
_PART: Final = 4096
#: Elements of a program where rows are short.
_TILE: Final = 2048
#: Forms of a mask.
_NONE, _ADDITIVE, _BOOL = 0, 1, 2
#: Arguments whose values are not worth a variant of the kernel each.
_ANY: Final = ["rows", "queries", "heads"]


@jit()
def read_tile(row, column, rows, columns, queries, CAUSAL: constexpr):
    """Which elements of a tile are read: those of the matrix, and with CAUSAL no more than 15 too many of each row.

    So 16 neighbours are read or left, in whole 16-byte accesses. row: int32 [R]; column: int32 [1, BLOCK], from a
    multiple of 16 on. Returns int1 [R, BLOCK].
    """
    inside = (row < rows)[:, None] & (column < columns)
    if CAUSAL:
        inside = inside & (column // 16 * 16 <= (row % queries)[:, None])
    return inside


@jit()
def logits_tile(
    x, mask, row, start, rows, columns, queries, heads, x_row, mask_b, mask_h, mask_q, mask_k, scale,
    MASK: constexpr, CAUSAL: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """``x * scale + mask`` of rows ``row`` (int32 [R]) and the BLOCK columns from ``start`` on: fp32 [R, BLOCK].

    Pointers as of ``softmax_kernel``. -inf outside of the matrix and wherever a boolean or the causal mask says so.
    """
    column = start + tl.arange(0, BLOCK)[None, :]
    query = row % queries
    inside = read_tile(row, column, rows, columns, queries, CAUSAL)
    value = tl.load(x + row.to(tl.int64)[:, None] * x_row + column, mask=inside, other=0.0).to(tl.float32) * scale
    if MASK != 0:
        head = row // queries
        place = (head // heads).to(tl.int64) * mask_b + (head % heads).to(tl.int64) * mask_h
        place = (place + query.to(tl.int64) * mask_q)[:, None] + column.to(tl.int64) * mask_k
        entry = tl.load(mask + place, mask=inside, other=0)
        if MASK == 1:
            value += entry.to(tl.float32)
        else:
            inside = inside & (entry != 0)
    if CAUSAL:
        inside = inside & (column <= query[:, None])
    return tl.where(inside, value, float("-inf"))


@jit(do_not_specialize=_ANY)
def softmax_kernel(
    x, mask, seed, y, statistics, rows, columns, queries, heads, x_row, mask_b, mask_h, mask_q, mask_k,
    scale, keep_scale,
    MASK: constexpr, CAUSAL: constexpr, THRESHOLD: constexpr, ROWS: constexpr, BLOCK: constexpr, LOOP: constexpr,
):  # fmt: skip
    """ROWS rows of softmax, and of dropout where there is a seed. Grid: ceil(rows / ROWS).

    x: fp32, fp16 or bf16 [rows, columns] with stride x_row. mask: None (MASK 0), fp32, fp16 or bf16 (1) or uint8, where
    0 masks (2), [b, h, queries, columns] with four strides, some of them 0. Row (b * heads + h) * queries + q is of
    query q. seed: int64 [1] or None. y: fp32, fp16 or bf16 [rows, columns], contiguous, written.
    statistics: fp32 [2, rows] or None, written: the row's maximum and the reciprocal of its sum.
    Maxima, exponentials and sums are fp32. LOOP: BLOCK columns at a time.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    to = y + row.to(tl.int64)[:, None] * columns
    lanes = tl.arange(0, BLOCK)[None, :]
    if LOOP:
        end = columns
        if CAUSAL:
            end = tl.minimum(columns, tl.max(row % queries) + 1)  # zeros from there on
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, end, BLOCK):
            value = logits_tile(
                x, mask, row, start, rows, columns, queries, heads, x_row, mask_b, mask_h, mask_q, mask_k, scale,
                MASK, CAUSAL, BLOCK,
            )  # fmt: skip
            higher = tl.maximum(top, tl.max(value, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing but -inf so far: no NaN yet
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(value - shift[:, None]), 1)
            top = higher
        inverse = tl.div_rn(1.0, total)
        for start in range(0, columns, BLOCK):
            value = logits_tile(
                x, mask, row, start, rows, columns, queries, heads, x_row, mask_b, mask_h, mask_q, mask_k, scale,
                MASK, CAUSAL, BLOCK,
            )  # fmt: skip
            result = tl.exp(value - top[:, None]) * inverse[:, None]
            if seed is not None:
                result *= dropout_factor(tl.load(seed), row, columns, start, keep_scale, THRESHOLD, BLOCK)
            tl.store(to + start + lanes, result, mask=(row < rows)[:, None] & (start + lanes < columns))
    else:
        value = logits_tile(
            x, mask, row, 0, rows, columns, queries, heads, x_row, mask_b, mask_h, mask_q, mask_k, scale,
            MASK, CAUSAL, BLOCK,
        )  # fmt: skip
        top = tl.max(value, 1)
        power = tl.exp(value - top[:, None])
        inverse = tl.div_rn(1.0, tl.sum(power, 1))
        result = power * inverse[:, None]
        if seed is not None:
            result *= dropout_factor(tl.load(seed), row, columns, 0, keep_scale, THRESHOLD, BLOCK)
        tl.store(to + lanes, result, mask=(row < rows)[:, None] & (lanes < columns))
    if statistics is not None:
        tl.store(statistics + row, top, mask=row < rows)
        tl.store(statistics + rows + row, inverse, mask=row < rows)


@jit()
def pair_tile(
    y, dy, x, mask, seed, top, inverse, row, start, rows, columns, queries, heads, x_row, dy_row,
    mask_b, mask_h, mask_q, mask_k, scale, keep_scale,
    MASK: constexpr, CAUSAL: constexpr, THRESHOLD: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Softmax before dropout, and the gradient of it: two fp32 [R, BLOCK]. Pointers as of ``backward_kernel``."""
    column = start + tl.arange(0, BLOCK)[None, :]
    inside = read_tile(row, column, rows, columns, queries, CAUSAL)
    gradient = tl.load(dy + row.to(tl.int64)[:, None] * dy_row + column, mask=inside, other=0.0).to(tl.float32)
    if seed is None:
        softmax = tl.load(y + row.to(tl.int64)[:, None] * columns + column, mask=inside, other=0.0).to(tl.float32)
    else:
        value = logits_tile(
            x, mask, row, start, rows, columns, queries, heads, x_row, mask_b, mask_h, mask_q, mask_k, scale,
            MASK, CAUSAL, BLOCK,
        )  # fmt: skip
        softmax = tl.exp(value - top[:, None]) * inverse[:, None]
        gradient *= dropout_factor(tl.load(seed), row, columns, start, keep_scale, THRESHOLD, BLOCK)
    return softmax, gradient


@jit(do_not_specialize=_ANY)
def backward_kernel(
    y, dy, x, mask, seed, statistics, dx, rows, columns, queries, heads, x_row, dy_row,
    mask_b, mask_h, mask_q, mask_k, scale, keep_scale, out_scale,
    MASK: constexpr, CAUSAL: constexpr, THRESHOLD: constexpr, ROWS: constexpr, BLOCK: constexpr, LOOP: constexpr,
):  # fmt: skip
    """``dx = y * (dy - sum(y * dy)) * out_scale`` of ROWS rows. Grid: ceil(rows / ROWS).

    y: fp32, fp16 or bf16 [rows, columns], contiguous, or None with a seed: then y is computed from x, mask, seed and
    statistics (fp32 [2, rows]), all as of ``softmax_kernel``, None without a seed, and dy goes back through dropout.
    dy: fp32, fp16 or bf16 [rows, columns] with stride dy_row. dx: fp32, fp16 or bf16 [rows, columns], contiguous,
    written. The sum is fp32. Where CAUSAL masks, y and dy are not read. LOOP: BLOCK columns at a time.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    to = dx + row.to(tl.int64)[:, None] * columns
    lanes = tl.arange(0, BLOCK)[None, :]
    top = tl.zeros((ROWS,), tl.float32)
    inverse = tl.zeros((ROWS,), tl.float32)
    if seed is not None:
        top = tl.load(statistics + row, mask=row < rows, other=0.0)
        inverse = tl.load(statistics + rows + row, mask=row < rows, other=0.0)
    if LOOP:
        end = columns
        if CAUSAL:
            end = tl.minimum(columns, tl.max(row % queries) + 1)
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, end, BLOCK):
            softmax, gradient = pair_tile(
                y, dy, x, mask, seed, top, inverse, row, start, rows, columns, queries, heads, x_row, dy_row,
                mask_b, mask_h, mask_q, mask_k, scale, keep_scale, MASK, CAUSAL, THRESHOLD, BLOCK,
            )  # fmt: skip
            total += tl.sum(softmax * gradient, 1)
        for start in range(0, columns, BLOCK):
            softmax, gradient = pair_tile(
                y, dy, x, mask, seed, top, inverse, row, start, rows, columns, queries, heads, x_row, dy_row,
                mask_b, mask_h, mask_q, mask_k, scale, keep_scale, MASK, CAUSAL, THRESHOLD, BLOCK,
            )  # fmt: skip
            result = softmax * (gradient - total[:, None]) * out_scale
            tl.store(to + start + lanes, result, mask=(row < rows)[:, None] & (start + lanes < columns))
    else:
        softmax, gradient = pair_tile(
            y, dy, x, mask, seed, top, inverse, row, 0, rows, columns, queries, heads, x_row, dy_row,
            mask_b, mask_h, mask_q, mask_k, scale, keep_scale, MASK, CAUSAL, THRESHOLD, BLOCK,
        )  # fmt: skip
        result = softmax * (gradient - tl.sum(softmax * gradient, 1)[:, None]) * out_scale
        tl.store(to + lanes, result, mask=(row < rows)[:, None] & (lanes < columns))


def launch_forward(
    x: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, causal: bool, p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """y, contiguous, and with a seed the statistics. x has an element at least; the mask broadcasts to its shape."""
    flat = _matrix(x)
    rows, columns = flat.shape
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    statistics = None if seed is None else torch.empty((2, rows), dtype=torch.float32, device=x.device)
    grid, shape = _shape(rows, columns)
    given, kind, heads, strides = _mask(mask, x.shape)
    with on_device(x.device):
        softmax_kernel[grid](
            flat, given, seed, y, statistics, rows, columns, _queries(x), heads, flat.stride(0), *strides,
            scale, dropout_scale(p), MASK=kind, CAUSAL=causal, THRESHOLD=drop_threshold(p), **shape,
        )  # fmt: skip
    return y, statistics


def launch_backward(
    y: Tensor | None, dy: Tensor, x: Tensor | None, mask: Tensor | None, seed: Tensor | None, statistics: Tensor | None,
    scale: float, causal: bool, p: float, out_scale: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """dx, contiguous: from y, or, with a seed, from x, mask and statistics."""
    flat, source = _matrix(dy), None if x is None else _matrix(x)
    rows, columns = flat.shape
    dx = torch.empty(dy.shape, dtype=dtype, device=dy.device)
    grid, shape = _shape(rows, columns)
    given, kind, heads, strides = _mask(mask, dy.shape)
    with on_device(dy.device):
        backward_kernel[grid](
            None if y is None else y.contiguous(), flat, source, given, seed, statistics, dx,
            rows, columns, _queries(dy), heads, 0 if source is None else source.stride(0), flat.stride(0), *strides,
            scale, dropout_scale(p), out_scale, MASK=kind, CAUSAL=causal, THRESHOLD=drop_threshold(p), **shape,
        )  # fmt: skip
    return dx


def _matrix(x: Tensor) -> Tensor:
    """[rows, columns] with columns next to each other: a view where the strides allow it, else a copy."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _queries(x: Tensor) -> int:
    return x.shape[-2] if x.dim() > 1 else 1


def _shape(rows: int, columns: int) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and block shape: 16 to 32 elements a thread."""
    loop = columns > _WHOLE
    block = _PART if loop else max(4, 1 << (columns - 1).bit_length())
    count = max(1, _TILE // block)
    warps = 8 if loop else max(4, min(16, block // 1024))
    return ((rows + count - 1) // count,), {"ROWS": count, "BLOCK": block, "LOOP": loop, "num_warps": warps,
                                            "enable_fp_fusion": False}  # fmt: skip


def _mask(mask: Tensor | None, shape: torch.Size) -> tuple[Tensor | None, int, int, tuple[int, int, int, int]]:
    """The mask as kernels take it, its kind, heads, and its strides over [b, h, queries, columns]."""
    if mask is None:
        return None, _NONE, 1, (0, 0, 0, 0)
    four = (*(1,) * (4 - len(shape)), *shape)
    b, h, q, k = mask.expand(four).stride()
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), _BOOL, four[1], (b, h, q, k)
    return mask, _ADDITIVE, four[1], (b, h, q, k)
