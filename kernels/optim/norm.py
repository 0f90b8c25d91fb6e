"""Computes the sum of squares of all gradients and an inf/NaN flag in one pass over the gradients.

Launch one writes a sum and a flag for each chunk, launch two adds them up in a fixed order: no atomics, so the same
gradients give the same bits. Flags come from the values, not from the sum: finite gradients whose squares overflow give
a sum of inf and ``found_inf`` 0.

A gradient counts as it is after unscaling, ``g * (1 / grad_scale)`` in FP32; so one that only overflows there counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fxprec.kernels.launch.triton_support import constexpr, jit, on_device, tl, triton_dtype
from fxprec.kernels.optim.tables import Gradients, check_scalar, chunk_place, elements_at

_BLOCK: Final = 2048
_FINISH_BLOCK: Final = 4096
_WARPS: Final = 4


@dataclass(frozen=True, slots=True)
class NormResult:
    """Result of a pass over the gradients: 0-dim float32 tensors on their device, not synced with the host."""

    sum_of_squares: Tensor
    found_inf: Tensor  # 0 or 1


@jit()
def square_block(total, bad, value):
    """Add one block's squares to ``total`` (fp32) and its flags to ``bad`` (int32, 1: a value is not finite)."""
    return tl.fma(value, value, total), bad | (~(tl.abs(value) < float("inf"))).to(tl.int32)


@jit()
def chunk_squares(address, start, length, factor, GRADIENT: constexpr, ALIGNED: constexpr, BLOCK: constexpr):
    """Return the sum of squares and the flag of a chunk; ALIGNED: the address divides by 16."""
    gradient = elements_at(address, start, GRADIENT, ALIGNED)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    # Whole blocks go without a mask, so that their loads are wide.
    whole = length // BLOCK * BLOCK
    for offset in range(0, whole, BLOCK):
        value = tl.load(gradient + (offset + lanes)).to(tl.float32) * factor
        total, bad = square_block(total, bad, value)
    if whole < length:
        value = tl.load(gradient + (whole + lanes), mask=whole + lanes < length, other=0.0).to(tl.float32) * factor
        total, bad = square_block(total, bad, value)
    return tl.sum(total), tl.max(bad)


@jit(do_not_specialize_on_alignment=["grad_scale"])
def norm_kernel(
    chunks, entries, gradients, grad_scale, sums, flags,
    GRADIENT: constexpr, ALIGNED: constexpr, CHUNK: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Write one chunk's sum of squares and flag. Grid: a program for each of C chunks of T tensors.

    chunks: int32 [C, 2]; entries: int64 [T, 9]; gradients: int64 [T], addresses. See ``tables``.
    At those addresses: GRADIENT (fp32, fp16, bf16), read once; scaled, squared and summed in fp32.
    grad_scale: fp32 [1] or None. sums: fp32 [C], written. flags: int32 [C], written.
    """
    tensor, _, start, length = chunk_place(chunks, entries, CHUNK)
    address = tl.load(gradients + tensor)
    length = tl.where(address == 0, 0, length)  # no gradient: nothing to read
    factor = 1.0
    if grad_scale is not None:
        factor = tl.div_rn(1.0, tl.load(grad_scale))
    # If some gradient of the launch is unaligned, each program decides by its own address.
    if ALIGNED or address % 16 == 0:
        total, bad = chunk_squares(address, start, length, factor, GRADIENT, True, BLOCK)
    else:
        total, bad = chunk_squares(address, start, length, factor, GRADIENT, False, BLOCK)
    # Each program has its own place, and launch two adds up in order.
    program = tl.program_id(0)
    tl.store(sums + program, total)
    tl.store(flags + program, bad)


@jit(do_not_specialize=["count"])
def finish_kernel(sums, flags, count, results, BLOCK: constexpr):
    """Add up the sums and flags of the chunks. Grid: one program.

    sums: fp32 [count], flags: int32 [count], read; summed in fp32, lane by lane, then by a tree.
    results: fp32 [2], written: sum of squares, found_inf.
    """
    lanes = tl.arange(0, BLOCK)
    totals = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for offset in range(0, count, BLOCK):
        inside = offset + lanes < count
        totals += tl.load(sums + offset + lanes, mask=inside, other=0.0)
        bad |= tl.load(flags + offset + lanes, mask=inside, other=0)
    tl.store(results, tl.sum(totals))
    tl.store(results + 1, tl.max(bad).to(tl.float32))


def launch(gradients: Gradients, *, grad_scale: Tensor | None = None) -> NormResult:
    """Run the pass in two launches, on the current stream, without host sync.

    Args:
        gradients: ``plan.bind(...)``'s.
        grad_scale: one float32 on the plan's device, the loss scale, which the gradients are divided by.

    Raises:
        ValueError: a scalar that is not one float32 on the plan's device.
    """
    plan, tables = gradients.plan, gradients.tables
    check_scalar("grad_scale", grad_scale, plan.device)
    # Fresh memory each time: results of an earlier step may still be read.
    count = len(tables.chunks)
    sums = torch.empty(count, dtype=torch.float32, device=plan.device)
    flags = torch.empty(count, dtype=torch.int32, device=plan.device)
    results = torch.empty(2, dtype=torch.float32, device=plan.device)
    with on_device(plan.device):
        norm_kernel[(count,)](
            tables.chunks, tables.entries, gradients.row, grad_scale, sums, flags,
            GRADIENT=triton_dtype(gradients.dtype or torch.float32), ALIGNED=gradients.aligned, CHUNK=plan.chunk,
            BLOCK=_BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        finish_kernel[(1,)](sums, flags, count, results, BLOCK=_FINISH_BLOCK, num_warps=_WARPS, enable_fp_fusion=False)
    return NormResult(*results.unbind())
