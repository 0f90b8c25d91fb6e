"""A rotary embedding as one call: its kernel's where that serves, and torch's ops otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Proxy

from fxprec.kernels.launch.direct import Run
from fxprec.kernels.launch.observers import COMPILER, DUAL, SCRIPT, TRANSFORM, watcher
from fxprec.kernels.launch.operands import LOW_DTYPES, suits_loops
from fxprec.passes.graph.retrace import is_served, leaf

#: As a ``half``: pairs are neighbours, and not columns half of all apart.
NEIGHBOURS: Final = "neighbours"


def rope(x: Any, cos: Any, sin: Any, half: int | str | None, compiled: bool = False) -> Any:
    """``x * cos + turned(x) * sin``, in FP32 for low x, in x's dtype.

    Args:
        x: (..., columns).
        cos, sin: an angle's for each column; of shapes that broadcast to x's.
        half: turned is ``cat((-x[..., half:], x[..., :half]), -1)``; None: the half that ``chunk`` takes;
            ``NEIGHBOURS``: ``stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)``.
        compiled: on a CPU as a C++ loop.
    """
    if isinstance(x, Proxy):
        return leaf(rope, x, cos, sin, half, *([compiled] if compiled else []))
    columns: int | str = (x.shape[-1] + 1) // 2 if half is None else half
    compiled = compiled and _is_looped(x, cos, sin)
    own = _tables(x, cos, sin, columns) if compiled or is_served(x) else None
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
    """``rope`` as a loop, of tensors that lie like these, where nobody looks on; None where a gradient is wanted."""
    if torch.is_grad_enabled() and x.requires_grad:
        return None
    own = _tables(x, cos, sin, (x.shape[-1] + 1) // 2 if half is None else half)
    if own is None or not _is_looped(x, cos, sin):
        return None
    from fxprec.kernels.nn.rope import run_for as kernel  # which loads Triton

    return kernel(x, *own, interleaved=half == NEIGHBOURS)


def _is_looped(*tensors: Tensor) -> bool:
    """Return whether a compiled loop serves these: not under a transform or compiler, which look into ops."""
    return watcher(COMPILER, SCRIPT, TRANSFORM, DUAL) is None and all(map(suits_loops, tensors))


def _tables(x: Tensor, cos: Tensor, sin: Tensor, half: int | str) -> tuple[Tensor, Sequence[Tensor]] | None:
    """(x as [B, H, T, D], (cos, sin) as [B, T, D]) where the kernel serves; None where it does not."""
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
    for heads, turned in ((1, x), (2, x.transpose(1, 2))):
        if four[0].shape[heads] == 1 and four[0].shape[3 - heads] == turned.shape[2]:
            return turned, [table.squeeze(heads) for table in four]
    return None
