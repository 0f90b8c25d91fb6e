"""Calls a rotary position embedding as one op: by a kernel where one serves, and by torch's ops otherwise.

Pairs of columns are rotated, each by the angle of its position. Models differ in which columns make a pair, and in
whether heads stand before or behind the positions; the kernels take heads first::

    half = 4            columns 0 and 4, 1 and 5, 2 and 6, 3 and 7 of 8       (Llama, GPT-NeoX)
    half = NEIGHBOURS   columns 0 and 1, 2 and 3, 4 and 5, 6 and 7            (GPT-J)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.launch.direct import Run
from fxprec.kernels.launch.graph_call import graph_call, triton_serves
from fxprec.kernels.launch.observers import runs_eagerly
from fxprec.kernels.launch.operands import LOW_DTYPES, suits_loops

#: Value of ``half`` for pairs of columns that are next to each other.
NEIGHBOURS: Final = "neighbours"


@graph_call
def rope(x: Tensor, cos: Tensor, sin: Tensor, half: int | str | None, compiled: bool = False) -> Tensor:
    """Return ``x * cos + turned * sin``, in FP32 for low x, in x's dtype.

    Args:
        x: (..., columns).
        cos, sin: of the angle of each column; of shapes that broadcast to x's.
        half: turned is ``cat((-x[..., half:], x[..., :half]), -1)``; None: half of the columns, as ``chunk`` takes it,
            which of an odd number is the larger half; ``NEIGHBOURS``: turned is
            ``stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)``.
        compiled: on a CPU as a C++ loop.
    """
    half = (x.shape[-1] + 1) // 2 if half is None else half
    compiled = compiled and _is_looped(x, cos, sin)
    fitted = _as_the_kernel_takes(x, cos, sin, half) if compiled or triton_serves(x) else None
    if fitted is not None:
        from fxprec.kernels.nn.rope import rope as kernel  # which loads Triton

        heads_first, tables = fitted
        result = kernel(heads_first, *tables, interleaved=half == NEIGHBOURS, compiled=compiled)
        return result if heads_first is x else result.transpose(-3, -2)
    if isinstance(half, str):
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    # With tables in FP32 torch computes in FP32, and a low x has its result rounded once, here.
    result = x * cos + turned * sin
    return result.to(x.dtype) if result.dtype != x.dtype and x.dtype in LOW_DTYPES else result


def run_for(x: Tensor, cos: Tensor, sin: Tensor, half: int | str | None) -> Run | None:
    """Return ``rope`` as a loop, of tensors with the shapes and strides of these.

    None where a gradient is wanted, or the loop does not serve.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return None
    fitted = _as_the_kernel_takes(x, cos, sin, (x.shape[-1] + 1) // 2 if half is None else half)
    if fitted is None or not _is_looped(x, cos, sin):
        return None
    from fxprec.kernels.nn.rope import run_for as kernel  # which loads Triton

    # The function that it returns takes x as it comes here: so it is told both, x and x with heads first.
    heads_first, tables = fitted
    return kernel(x, heads_first, tables, interleaved=half == NEIGHBOURS)


def _is_looped(*tensors: Tensor) -> bool:
    """Return whether a compiled loop serves these."""
    return runs_eagerly() and suits_loops(*tensors)


def _as_the_kernel_takes(x: Tensor, cos: Tensor, sin: Tensor, half: Any) -> tuple[Tensor, Sequence[Tensor]] | None:
    """Return x as [B, H, T, D] and (cos, sin) as [T, D] or [B, T, D] where the kernel serves; None where it does not.

    ``heads`` below is the dimension of the heads, 1 or 2, and the other one is the positions'. The tables tell which:
    they are the same for all heads, and have size 1 there.
    """
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
    for heads, heads_first in ((1, x), (2, x.transpose(1, 2))):
        if four[0].shape[heads] == 1 and four[0].shape[3 - heads] == heads_first.shape[2]:
            return heads_first, [table.squeeze(heads) for table in four]
    return None
