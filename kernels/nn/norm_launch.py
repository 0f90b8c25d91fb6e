"""Layer norm and RMS norm: which kernel a shape gets, its launch, and the same in plain torch where none can run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor

from fxprec.kernels.launch.operands import packed
from fxprec.kernels.launch.philox import drop_threshold, dropout_scale, keep_factor
from fxprec.kernels.launch.triton_support import can_launch, on_device
from fxprec.kernels.nn.norm_long_rows import columns_kernel, long_backward_kernel, long_forward_kernel
from fxprec.kernels.nn.norm_rows import backward_kernel, finish_kernel, forward_kernel

#: Columns up to which a row is in registers; in the backward two column sums are there, too.
FORWARD_COLUMNS: Final = 16384
BACKWARD_COLUMNS: Final = 8192
_TILE: Final = 2048
#: Of the backward's loop: a tile waits in shared memory, at most 96 KiB, while the one before it is computed.
_STAGES: Final = 2
_LONG_BLOCK: Final = 8192
_LONG_WARPS: Final = 16
#: Of the column sums: (ROWS, BLOCK, warps).
_COLUMNS_TILE: Final = (8, 256, 4)
_FINISH_TILE: Final = (128, 32, 8)


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    columns: int,
    eps: float,
    p: float,
    offset: float,
    dtype: torch.dtype,
    center: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """One pass: y, s (None without residual), and float32 [2, rows] of mean and rstd ([1, rows], rstd, in RMS norm).

    Args:
        columns: of a row: the last dimensions of x, as many as the norm is over.
        seed: int64 [1], read where p > 0.
    """
    if not can_launch(x.device):
        return _eager_forward(x, residual, weight, bias, seed, columns, eps, p, offset, dtype, center)
    rows = x.numel() // max(columns, 1)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    s = None
    if residual is not None:
        s = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    statistics = torch.empty((1 + center, rows), dtype=torch.float32, device=x.device)
    if not x.numel():
        return y, s, statistics
    x, x_stride = _rows(x, columns)
    residual, residual_stride = (None, 0) if residual is None else _rows(residual, columns)
    weight, bias = packed(weight), packed(bias)
    threshold, scale = (drop_threshold(p), dropout_scale(p)) if p else (0, 1.0)
    with on_device(x.device):
        if columns <= FORWARD_COLUMNS:
            height, block, warps = _tile(columns)
            forward_kernel[(-(-rows // height),)](
                x, residual, weight, bias, seed, y, s, statistics, rows, x_stride, residual_stride, eps, scale,
                COLUMNS=columns, CENTER=center, OFFSET=offset, THRESHOLD=threshold, ROWS=height, BLOCK=block,
                num_warps=warps,
            )  # fmt: skip
        else:
            long_forward_kernel[(rows,)](
                x, residual, weight, bias, seed, y, s, statistics, rows, x_stride, residual_stride, eps, scale,
                COLUMNS=columns, CENTER=center, OFFSET=offset, THRESHOLD=threshold, BLOCK=_LONG_BLOCK,
                num_warps=_LONG_WARPS,
            )  # fmt: skip
    return y, s, statistics


def launch_backward(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    seed: Tensor | None,
    columns: int,
    p: float,
    offset: float,
    stream: torch.dtype | None,
    branch: torch.dtype | None,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> list[Tensor]:
    """One pass, and a small second one for the column sums: the gradients whose dtype is given, in this order.

    Args:
        s: what was normalised: the s of the forward, or x.
        stream: dtype of the gradient of s.
        branch: dtype of the same behind dropout.
    """
    if not can_launch(s.device):
        return _eager_backward(
            dy, ds, s, weight, statistics, seed, columns, p, offset, stream, branch, weight_dtype, bias_dtype
        )
    empty = _empty_gradients(s, columns, (stream, branch, weight_dtype, bias_dtype))
    dresidual, dx, dweight, dbias = empty
    found = [gradient for gradient in empty if gradient is not None]
    if not s.numel() or dy is None:
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.zero_()
        dweight = dbias = None
    if not s.numel() or (dy is None and ds is None):
        return found
    rows, center = statistics.shape[1], statistics.shape[0] == 2
    s, s_stride = _rows(s, columns)
    dy, dy_stride = (None, 0) if dy is None else _rows(dy, columns)
    ds, ds_stride = (None, 0) if ds is None else _rows(ds, columns)
    weight = packed(weight)
    threshold, scale = (drop_threshold(p), dropout_scale(p)) if p else (0, 1.0)
    long = columns > BACKWARD_COLUMNS
    height, block, warps = _COLUMNS_TILE if long else _tile(columns)
    tiles, units = -(-rows // height), processors(s.device)
    programs = min(tiles, max(1, 16 // warps) * units)
    strips = -(-columns // block)
    if long:
        programs = min(tiles, -(-8 * units // strips))
    sums = [gradient for gradient in (dweight, dbias) if gradient is not None]
    parts = torch.empty((len(sums), programs, columns), dtype=torch.float32, device=s.device)
    dweights = None if dweight is None else parts[0]
    dbiases = None if dbias is None else parts[-1]
    with on_device(s.device):
        if not long:
            backward_kernel[(programs,)](
                dy, ds, s, weight, statistics, seed, dresidual, dx, dweights, dbiases,
                rows, dy_stride, ds_stride, s_stride, scale,
                COLUMNS=columns, CENTER=center, OFFSET=offset, THRESHOLD=threshold, ROWS=height, BLOCK=block,
                STAGES=_STAGES, num_warps=warps,
            )  # fmt: skip
        else:
            if dresidual is not None or dx is not None:
                long_backward_kernel[(rows,)](
                    dy, ds, s, weight, statistics, seed, dresidual, dx, rows, dy_stride, ds_stride, s_stride, scale,
                    COLUMNS=columns, CENTER=center, OFFSET=offset, THRESHOLD=threshold, BLOCK=_LONG_BLOCK,
                    num_warps=_LONG_WARPS,
                )  # fmt: skip
            if sums:
                columns_kernel[(strips, programs)](
                    dy, s, statistics, dweights, dbiases, rows, columns, dy_stride, s_stride,
                    CENTER=center, ROWS=height, BLOCK=block, num_warps=warps,
                )  # fmt: skip
        if sums:
            add_parts(parts, sums)
    return found


def add_parts(parts: Tensor, sums: Sequence[Tensor]) -> None:
    """Add up float32 parts [1 or 2, count, columns] into one or two tensors of [columns], in a fixed order."""
    height, block, warps = _FINISH_TILE
    _, count, columns = parts.shape
    finish_kernel[(-(-columns // block), len(sums))](
        parts, sums[0], sums[1] if len(sums) > 1 else None, count, columns,
        ROWS=height, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def normalised(
    s: Tensor, weight: Tensor | None, bias: Tensor | None, columns: int, eps: float, offset: float, center: bool
) -> Tensor:
    """The norm in plain torch, float32, which can be differentiated."""
    value = s.reshape(-1, columns).float()
    if center:
        value = value - value.mean(1, keepdim=True)
    value = value * torch.rsqrt(value.square().mean(1, keepdim=True) + eps)
    if weight is not None:
        value = value * (weight.reshape(-1).float() + offset)
    if bias is not None:
        value = value + bias.reshape(-1).float()
    return value.reshape(s.shape)


def dropped(x: Tensor, seed: Tensor | None, columns: int, p: float) -> Tensor:
    """Dropout in plain torch, float32, which can be differentiated: the mask that the kernels compute."""
    if not p:
        return x.float()
    assert seed is not None
    return x.float() * keep_factor(seed, x, columns, p)


@torch.no_grad()
def _eager_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, seed: Tensor | None,
    columns: int, eps: float, p: float, offset: float, dtype: torch.dtype, center: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    s = None
    if residual is not None:
        s = (residual.float() + dropped(x, seed, columns, p)).to(torch.promote_types(x.dtype, residual.dtype))
        s = s.contiguous()
    source = x if s is None else s
    if not x.numel():
        return torch.empty_like(source, dtype=dtype), s, x.new_empty((1 + center, 0), dtype=torch.float32)
    y = normalised(source, weight, bias, columns, eps, offset, center).to(dtype)
    wide = source.reshape(-1, columns).float()
    mean = [wide.mean(1)] if center else []
    variance = (wide - mean[0][:, None] if center else wide).square().mean(1)
    return y.contiguous(), s, torch.stack([*mean, torch.rsqrt(variance + eps)])


@torch.no_grad()
def _eager_backward(
    dy: Tensor | None, ds: Tensor | None, s: Tensor, weight: Tensor | None, statistics: Tensor, seed: Tensor | None,
    columns: int, p: float, offset: float, stream: torch.dtype | None, branch: torch.dtype | None,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    shape, center = s.shape, statistics.shape[0] == 2
    empty = _empty_gradients(s, columns, (stream, branch, weight_dtype, bias_dtype))
    if not s.numel() or (dy is None and ds is None):
        return [gradient.zero_() for gradient in empty if gradient is not None]
    gradient = torch.zeros(shape, dtype=torch.float32) if ds is None else ds.float()
    dweight = dbias = None
    if dy is not None:
        dbias = dy.reshape(-1, columns).float()
        value = s.reshape(-1, columns).float()
        value = (value - statistics[0][:, None] if center else value) * statistics[-1][:, None]
        dweight = dbias * value
        scaled = dbias if weight is None else dbias * (weight.reshape(-1).float() + offset)
        inner = scaled - value * (scaled * value).mean(1, keepdim=True)
        if center:
            inner = inner - scaled.mean(1, keepdim=True)
        gradient = gradient + (inner * statistics[-1][:, None]).view(shape)
    values = (
        gradient,
        None if branch is None else dropped(gradient, seed, columns, p),
        None if dweight is None else dweight.sum(0),
        None if dbias is None else dbias.sum(0),
    )
    pairs = [(out, value) for out, value in zip(empty, values, strict=True) if out is not None]
    return [out.zero_() if value is None else out.copy_(value) for out, value in pairs]


def _empty_gradients(s: Tensor, columns: int, dtypes: tuple[torch.dtype | None, ...]) -> list[Tensor | None]:
    shapes = (s.shape, s.shape, (columns,), (columns,))
    return [
        None if dtype is None else torch.empty(shape, dtype=dtype, device=s.device)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def _rows(x: Tensor, columns: int) -> tuple[Tensor, int]:
    """x and the elements from one row to the next; a copy of it where there is no such number."""
    if x.is_contiguous():
        return x, columns
    x = x.reshape(-1, columns)
    return (x, x.stride(0)) if columns == 1 or x.stride(1) == 1 else (x.contiguous(), columns)


def _tile(columns: int) -> tuple[int, int, int]:
    """Rows of a tile, its columns (a power of two), and warps for it: 16 elements a thread, 32 of the largest."""
    block = max(4, 1 << (columns - 1).bit_length())
    rows = max(1, _TILE // block)
    return rows, block, min(16, rows * block // 512)


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
