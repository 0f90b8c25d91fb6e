"""Runs SGD for all parameters in one launch: unscale, clip, update, and the low-precision copy, in one pass.

In FP32 it computes what torch's ``_fused_sgd_`` computes on a CPU with FMA, bit for bit: hyper-parameters rounded to
FP32 once, and

    g   = fma(p, weight_decay, ±g * (1 / grad_scale))
    buf = fma(1 - dampening, g, buf * momentum), at the first step g
    p   = p - lr * (fma(buf, momentum, g) if nesterov else buf), one fma

The first step, which the caller tells, never reads the buffer, so it may be uninitialised. If ``found_inf`` is set or a
gradient is missing nothing is written: parameter, buffer and shadow keep their bits. The
gradient is only read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from fxprec.kernels.launch.triton_support import constexpr, jit, tl
from fxprec.kernels.optim.tables import PARAM, SHADOW, STATE, Gradients, chunk_place, elements_at, written_aligned

_BLOCK: Final = 512


@dataclass(frozen=True, slots=True)
class SgdSettings:
    """Settings of SGD that stay the same from step to step.

    Raises:
        ValueError: a value that is negative or not finite, nesterov without momentum or with dampening.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        for name, value in (("momentum", self.momentum), ("weight_decay", self.weight_decay)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}.")
        if not math.isfinite(self.dampening):
            raise ValueError(f"dampening must be finite, got {self.dampening}.")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov needs momentum and no dampening, got momentum {self.momentum}, dampening {self.dampening}."
            )


@jit()
def sgd_block(
    gradient, param, buffer, shadow, has_shadow, first, length, scale, rate, momentum, one_minus_dampening,
    weight_decay, PARAM_DTYPE: constexpr, STATE_DTYPE: constexpr, SHADOW_DTYPE: constexpr, DECAY: constexpr,
    NESTEROV: constexpr, MAXIMIZE: constexpr, FIRST: constexpr, MASKED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Update the block that begins ``first`` elements into a chunk; MASKED: the chunk ends within it."""
    offset = first + tl.arange(0, BLOCK)
    mask = offset < length if MASKED else None
    g = tl.load(gradient + offset, mask=mask).to(tl.float32) * scale
    p = tl.load(param + offset, mask=mask).to(tl.float32)
    if MAXIMIZE:
        g = -g
    if DECAY:
        g = tl.fma(p, weight_decay, g)
    if STATE_DTYPE is not None:
        # The first step's buffer is the gradient itself, without dampening.
        kept = g
        if not FIRST:
            before = tl.load(buffer + offset, mask=mask).to(tl.float32)
            kept = tl.fma(g, one_minus_dampening, before * momentum)
        tl.store(buffer + offset, kept.to(STATE_DTYPE), mask=mask)
        g = tl.fma(kept, momentum, g) if NESTEROV else kept
    p_stored = tl.fma(g, -rate, p).to(PARAM_DTYPE)
    tl.store(param + offset, p_stored, mask=mask)
    if SHADOW_DTYPE is not None:
        if has_shadow:
            tl.store(shadow + offset, p_stored.to(tl.float32).to(SHADOW_DTYPE), mask=mask)


@jit()
def sgd_chunk(
    address, entry, start, length, scale, rate, momentum, one_minus_dampening, weight_decay,
    GRADIENT_DTYPE: constexpr, PARAM_DTYPE: constexpr, STATE_DTYPE: constexpr, SHADOW_DTYPE: constexpr,
    DECAY: constexpr, NESTEROV: constexpr, MAXIMIZE: constexpr, FIRST: constexpr,
    GRADIENT_ALIGNED: constexpr, WRITTEN_ALIGNED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Update a chunk of a tensor. ALIGNED: the addresses of the gradient, of all written tensors, divide by 16."""
    gradient = elements_at(address, start, GRADIENT_DTYPE, GRADIENT_ALIGNED)
    param = elements_at(tl.load(entry + PARAM), start, PARAM_DTYPE, WRITTEN_ALIGNED)
    # Any pointer, where there is no momentum: a kernel compiled without states never uses it.
    buffer = param
    if STATE_DTYPE is not None:
        buffer = elements_at(tl.load(entry + STATE), start, STATE_DTYPE, WRITTEN_ALIGNED)
    # Any pointer: it is not used without a shadow, but the block's signature has one.
    shadow = param
    has_shadow = False
    if SHADOW_DTYPE is not None:
        shadow_address = tl.load(entry + SHADOW)
        has_shadow = shadow_address != 0
        shadow = elements_at(shadow_address, start, SHADOW_DTYPE, WRITTEN_ALIGNED)
    # Whole blocks go without a mask, so that their accesses are wide.
    whole = length // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        sgd_block(
            gradient, param, buffer, shadow, has_shadow, first, length, scale, rate, momentum, one_minus_dampening,
            weight_decay, PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, NESTEROV, MAXIMIZE, FIRST, False, BLOCK,
        )  # fmt: skip
    if whole < length:
        sgd_block(
            gradient, param, buffer, shadow, has_shadow, whole, length, scale, rate, momentum, one_minus_dampening,
            weight_decay, PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, NESTEROV, MAXIMIZE, FIRST, True, BLOCK,
        )  # fmt: skip


@jit(do_not_specialize_on_alignment=["lr", "grad_scale", "found_inf"])
def sgd_kernel(
    chunks, entries, gradients, lr, grad_scale, found_inf,
    lr_value, momentum, one_minus_dampening, weight_decay,
    GRADIENT_DTYPE: constexpr, PARAM_DTYPE: constexpr, STATE_DTYPE: constexpr, SHADOW_DTYPE: constexpr,
    DECAY: constexpr, NESTEROV: constexpr, MAXIMIZE: constexpr, FIRST: constexpr, ALIGNED: constexpr,
    CHUNK: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Update one chunk. Grid: a program for each of C chunks of T tensors.

    chunks: int32 [C, 2]; entries: int64 [T, 9]; gradients: int64 [T], addresses: ``tables``.
    At those addresses, each element once: gradient GRADIENT_DTYPE, read; parameter PARAM_DTYPE, read and written;
    momentum buffer STATE_DTYPE (None: none), written, and read unless this is the first step; shadow SHADOW_DTYPE
    (None: none), written. All arithmetic is fp32.
    grad_scale, found_inf: fp32 [1] or None; lr: fp32 or fp64 [1], or None, where lr_value stands for it.
    """
    # Read on the device: the host does not wait to learn whether the step is skipped.
    if found_inf is not None:
        if tl.load(found_inf) != 0.0:
            return
    tensor, entry, start, length = chunk_place(chunks, entries, CHUNK)
    address = tl.load(gradients + tensor)
    if address == 0:
        return
    scale = 1.0
    rate = lr_value
    if grad_scale is not None:
        scale = tl.div_rn(1.0, tl.load(grad_scale))
    if lr is not None:
        rate = tl.load(lr).to(tl.float32)

    # If some tensor of the launch is unaligned, each program decides by its own tensor's addresses. With ALIGNED the
    # compiler sees the first call alone.
    if ALIGNED or (written_aligned(entry) and address % 16 == 0):
        sgd_chunk(
            address, entry, start, length, scale, rate, momentum, one_minus_dampening, weight_decay,
            GRADIENT_DTYPE, PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, NESTEROV, MAXIMIZE, FIRST,
            True, True, BLOCK,
        )  # fmt: skip
    elif written_aligned(entry):
        sgd_chunk(
            address, entry, start, length, scale, rate, momentum, one_minus_dampening, weight_decay,
            GRADIENT_DTYPE, PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, NESTEROV, MAXIMIZE, FIRST,
            False, True, BLOCK,
        )  # fmt: skip
    else:
        sgd_chunk(
            address, entry, start, length, scale, rate, momentum, one_minus_dampening, weight_decay,
            GRADIENT_DTYPE, PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, NESTEROV, MAXIMIZE, FIRST,
            False, False, BLOCK,
        )  # fmt: skip


def launch(
    gradients: Gradients,
    settings: SgdSettings,
    *,
    lr: float | Tensor,
    first: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Step in one launch, on the current stream, without host sync.

    Args:
        gradients: ``bind`` of a plan with states (momentum_buffer,), or none without momentum.
        lr: a float, or one float32 or float64 on the plan's device or on the CPU.
        first: with momentum: whether the buffers are yet to begin.
        grad_scale: one float32 on the plan's device, the loss scale, which gradients are divided by.
        found_inf: one float32 on the plan's device: unless it is 0 nothing is written.

    Raises:
        ValueError: a scalar is not one float32 on the plan's device.
    """
    pointer, rate = gradients.scalars(lr, grad_scale, found_inf)
    gradients.update(
        sgd_kernel, _BLOCK, lr=pointer, grad_scale=grad_scale, found_inf=found_inf, lr_value=rate,
        momentum=float(settings.momentum), one_minus_dampening=1.0 - settings.dampening,
        weight_decay=float(settings.weight_decay), DECAY=settings.weight_decay != 0, NESTEROV=settings.nesterov,
        MAXIMIZE=settings.maximize, FIRST=first,
    )  # fmt: skip
