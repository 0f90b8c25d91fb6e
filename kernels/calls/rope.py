"""Calls a rotary position embedding as one op: its kernel's where that serves, and torch's ops otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.launch.direct import Run
from fxprec.kernels.launch.graph_call import graph_call, triton_serves
from fxprec.kernels.launch.observers import runs_eagerly
from fxprec.kernels.launch.operands import LOW_DTYPES, suits_loops

#: As a ``half``: pairs are neighbours, and not columns half of all apart.
NEIGHBOURS: Final = "neighbours"


@graph_call
def rope(x: Tensor, cos: Tensor, sin: Tensor, half: int | str | None, compiled: bool = False) -> Tensor:
    """Return ``x * cos + turned(x) * sin``, in FP32 for low x, in x's dtype.

    Args:
        x: (..., columns).
        cos, sin: an angle's for each column; of shapes that broadcast to x's.
        half: turned is ``cat((-x[..., half:], x[..., :half]), -1)``; None: the half that ``chunk`` takes;
            ``NEIGHBOURS``: ``stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)``.
        compiled: on a CPU as a C++ loop.
    """
    columns: int | str = (x.shape[-1] + 1) // 2 if half is None else half
    compiled = compiled and _is_looped(x, cos, sin)
    own = _as_the_kernel_takes(x, cos, sin, columns) if compiled or triton_serves(x) else None
    if own is not None:
        from fxprec.kernels.nn.rope import rope as kernel  # which loads Triton

        turned, tables = own
        result = kernel(turned, *tables, interleaved=columns == NEIGHBOURS, compiled=compiled)
        return result if turned is x else result.transpose(-3, -2)
    if isinstance(columns, str):
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-x[..., columns:], x[..., :columns]), dim=-1)
    result = x * cos + turned * sin
    return result.to(x.dtype) if result.dtype != x.dtype and x.dtype in LOW_DTYPES else result


def run_for(x: Tensor, cos: Tensor, sin: Tensor, half: int | str | None) -> Run | None:
    """Return ``rope`` as a loop, of tensors with the shapes and strides of these.

    None where a gradient is wanted, or the loop does not serve.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return None
    own = _as_the_kernel_takes(x, cos, sin, (x.shape[-1] + 1) // 2 if half is None else half)
    if own is None or not _is_looped(x, cos, sin):
        return None
    from fxprec.kernels.nn.rope import run_for as kernel  # which loads Triton

    return kernel(x, *own, interleaved=half == NEIGHBOURS)


def _is_looped(*tensors: Tensor) -> bool:
    """Return whether a compiled loop serves these."""
    return runs_eagerly() and suits_loops(*tensors)


def _as_the_kernel_takes(x: Tensor, cos: Tensor, sin: Tensor, half: Any) -> tuple[Tensor, Sequence[Tensor]] | None:
    """Return x as [B, H, T, D] and (cos, sin) as [B, T, D] where the kernel serves; None where it does not."""
    columns = x.shape[-1]
    fits = x.dim() == 4 and columns % 2 == 0 and half in (columns // 2, NEIGHBOURS)
    if not fits or cos.shape != sin.shape or not 2 <= cos.dim() <= 4 or cos.shape[-1] != columns:
        return None
    if cos.requires_grad or sin.requires_grad or cos.dtype != sin.dtype or cos.device != x.device:
        return None
    if cos.dim() == 2 and cos.shape[0] == x.shape[2]:
        return x, (cos, sin)
    four = [table[(None,) * (4 - table.dim())] for table in (cos, sin)]
    if four[0].shape[0] not in (1, x.shape[0]):
        return None
    # Tables are the same for all heads, which stand before or behind the positions.
    for heads, turned in ((1, x), (2, x.transpose(1, 2))):
        if four[0].shape[heads] == 1 and four[0].shape[3 - heads] == turned.shape[2]:
            return turned, [table.squeeze(heads) for table in four]
    return None
