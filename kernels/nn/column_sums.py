"""Finishes column sums that many programs began: adds up their parts in a fixed order, so with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from fxprec.kernels.launch.triton_support import constexpr, jit, tl

#: (ROWS, BLOCK, warps).
TILE: Final = (128, 32, 8)


@jit(do_not_specialize=["count"])
def finish_kernel(parts, first, second, count, columns, ROWS: constexpr, BLOCK: constexpr):
    """Add up the parts of one or two column sums. Grid: (cdiv(columns, BLOCK), 1 or 2).

    parts: fp32 [1 or 2, count, columns], read once, added in fp32, row by row, then by a tree.
    first, second: fp32, fp16 or bf16 [columns], written; second may be None.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(1)
    inside = column < columns
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        place = (which * count + row).to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(parts + place, mask=(row < count)[:, None] & inside[None, :], other=0.0)
    result = tl.sum(total, 0)
    if which == 0:
        tl.store(first + column, result.to(first.dtype.element_ty), mask=inside)
    elif second is not None:
        tl.store(second + column, result.to(second.dtype.element_ty), mask=inside)


def add_parts(parts: Tensor, sums: Sequence[Tensor]) -> None:
    """Add up float32 parts [1 or 2, count, columns] into one or two tensors of [columns]."""
    height, block, warps = TILE
    _, count, columns = parts.shape
    finish_kernel[(-(-columns // block), len(sums))](
        parts, sums[0], sums[1] if len(sums) > 1 else None, count, columns,
        ROWS=height, BLOCK=block, num_warps=warps,
    )  # fmt: skip
