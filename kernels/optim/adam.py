"""Runs Adam and AdamW for all parameters in one launch: unscale, clip, update, and the low-precision copy.

In FP32 it computes what torch's ``_fused_adam_`` and ``_fused_adamw_`` compute on a CPU with FMA, bit for bit: opmath
FP32, hyper-parameters rounded to FP32 once, and per step

    g  = fma(p, weight_decay, ±g * (1 / grad_scale))      p = p * (1 - lr * weight_decay) if decoupled
    m  = fma(1 - beta1, g - m, m)                                     v = fma(v, beta2, (1 - beta2) * g * g)
    p  = p - (lr / (1 - beta1**t)) * m / (sqrt(v) / sqrt(1 - beta2**t) + eps)

with the scalars of t and lr in FP64. (torch's CUDA kernel subtracts and raises betas in FP32: its v differs by up to
6e-8 / (1 - beta2), relatively.) The gradient is only read: unlike torch's, the kernel leaves it scaled.

The kernel itself counts the step, which saves a launch: all programs of a tensor read the count, and the last of them
to finish writes it one higher. If ``found_inf`` is set or a gradient is missing nothing is written:
parameter, state, step and shadow keep their bits.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from fxprec.kernels.launch.rounding import random_words, round_block
from fxprec.kernels.launch.triton_support import constexpr, int64, jit, tl
from fxprec.kernels.optim.tables import (
    CHUNKS,
    INDEX,
    PARAM,
    SHADOW,
    STATE,
    STEP,
    Gradients,
    chunk_place,
    count_step,
    elements_at,
    written_aligned,
)

_BLOCK: Final = 512


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Settings of Adam that stay the same from step to step. ``decoupled``: AdamW's weight decay, else an L2 term.

    ``rounding_seed``: round bfloat16 states stochastically with this seed; None rounds them to nearest.

    Raises:
        ValueError: a beta outside [0, 1), a negative or non-finite eps or weight decay, a seed beyond 63 bits.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    amsgrad: bool = False
    maximize: bool = False
    rounding_seed: int | None = None

    def __post_init__(self) -> None:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}.")
        for name, value in (("eps", self.eps), ("weight_decay", self.weight_decay)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}.")
        if self.rounding_seed is not None and not 0 <= self.rounding_seed < 1 << 63:
            raise ValueError(f"rounding_seed must be in [0, 2**63), got {self.rounding_seed}.")


@jit()
def double(high, low):
    """Return the fp64 sum of two fp32 scalars."""
    return tl.full((), high, tl.float64) + tl.full((), low, tl.float64)


@jit()
def adam_block(
    gradient, param, exp_avg, exp_avg_sq, max_exp_avg_sq, shadow, has_shadow, first, length, start, seed, step, index,
    scale, decay, step_size, correction, lerp_weight, beta2, one_minus_beta2, eps, weight_decay,
    PARAM_DTYPE: constexpr, STATE_DTYPE: constexpr, SHADOW_DTYPE: constexpr, DECAY: constexpr,
    DECOUPLED: constexpr, AMSGRAD: constexpr, MAXIMIZE: constexpr, STOCHASTIC: constexpr,
    FROM_GRADIENT: constexpr, MASKED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Update the block that begins ``first`` elements into a chunk; MASKED: the chunk ends within it."""
    offset = first + tl.arange(0, BLOCK)
    mask = offset < length if MASKED else None
    g = tl.load(gradient + offset, mask=mask).to(tl.float32) * scale
    p = tl.load(param + offset, mask=mask).to(tl.float32)
    m = tl.load(exp_avg + offset, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq + offset, mask=mask).to(tl.float32)
    if MAXIMIZE:
        g = -g
    if DECAY:
        if DECOUPLED:
            p = p * decay
        else:
            g = tl.fma(p, weight_decay, g)
    # The forms in which torch's kernel rounds: any other one would differ in last bits.
    m = tl.fma(lerp_weight, g - m, g if FROM_GRADIENT else m)
    v = tl.fma(one_minus_beta2 * g, g, v * beta2)
    if STOCHASTIC:
        words = random_words(seed, step.to(tl.int32), index, start + first, BLOCK)
        m_stored = round_block(m, words & 0xFFFF)
        v_stored = round_block(v, words >> 16)
    else:
        m_stored = m.to(STATE_DTYPE)
        v_stored = v.to(STATE_DTYPE)
    largest = v
    # The update uses the maximum before it is rounded.
    if AMSGRAD:
        before = tl.load(max_exp_avg_sq + offset, mask=mask).to(tl.float32)
        largest = tl.maximum(before, v, propagate_nan=tl.PropagateNan.ALL)
        # The maximum of stored values is stored exactly: it gathers no rounding error and no random drift.
        kept = tl.maximum(before, v_stored.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        tl.store(max_exp_avg_sq + offset, kept.to(STATE_DTYPE), mask=mask)
    denominator = tl.div_rn(tl.sqrt_rn(largest), correction) + eps
    p_stored = (p - tl.div_rn(step_size * m, denominator)).to(PARAM_DTYPE)
    tl.store(param + offset, p_stored, mask=mask)
    tl.store(exp_avg + offset, m_stored, mask=mask)
    tl.store(exp_avg_sq + offset, v_stored, mask=mask)
    if SHADOW_DTYPE is not None:
        if has_shadow:
            tl.store(shadow + offset, p_stored.to(tl.float32).to(SHADOW_DTYPE), mask=mask)


@jit()
def adam_chunk(
    address, entry, start, length, seed, step, scale, decay, step_size, correction, lerp_weight, beta2,
    one_minus_beta2, eps, weight_decay,
    GRADIENT_DTYPE: constexpr, PARAM_DTYPE: constexpr, STATE_DTYPE: constexpr, SHADOW_DTYPE: constexpr,
    DECAY: constexpr, DECOUPLED: constexpr, AMSGRAD: constexpr, MAXIMIZE: constexpr, STOCHASTIC: constexpr,
    FROM_GRADIENT: constexpr, GRADIENT_ALIGNED: constexpr, WRITTEN_ALIGNED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Update a chunk of a tensor. ALIGNED: the addresses of the gradient, of all written tensors, divide by 16."""
    gradient = elements_at(address, start, GRADIENT_DTYPE, GRADIENT_ALIGNED)
    param = elements_at(tl.load(entry + PARAM), start, PARAM_DTYPE, WRITTEN_ALIGNED)
    exp_avg = elements_at(tl.load(entry + STATE), start, STATE_DTYPE, WRITTEN_ALIGNED)
    exp_avg_sq = elements_at(tl.load(entry + STATE + 1), start, STATE_DTYPE, WRITTEN_ALIGNED)
    max_exp_avg_sq = elements_at(tl.load(entry + STATE + 2), start, STATE_DTYPE, WRITTEN_ALIGNED)
    # Any pointer: it is not used without a shadow, but the block's signature has one.
    shadow = param
    has_shadow = False
    if SHADOW_DTYPE is not None:
        shadow_address = tl.load(entry + SHADOW)
        has_shadow = shadow_address != 0
        shadow = elements_at(shadow_address, start, SHADOW_DTYPE, WRITTEN_ALIGNED)
    # Random bits depend on the tensor's number and the element, not on how tensors are cut into chunks.
    index = tl.load(entry + INDEX)
    # Whole blocks go without a mask, so that their accesses are wide.
    whole = length // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        adam_block(
            gradient, param, exp_avg, exp_avg_sq, max_exp_avg_sq, shadow, has_shadow, first, length, start, seed, step,
            index, scale, decay, step_size, correction, lerp_weight, beta2, one_minus_beta2, eps, weight_decay,
            PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, DECOUPLED, AMSGRAD, MAXIMIZE, STOCHASTIC, FROM_GRADIENT,
            False, BLOCK,
        )  # fmt: skip
    if whole < length:
        adam_block(
            gradient, param, exp_avg, exp_avg_sq, max_exp_avg_sq, shadow, has_shadow, whole, length, start, seed, step,
            index, scale, decay, step_size, correction, lerp_weight, beta2, one_minus_beta2, eps, weight_decay,
            PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, DECOUPLED, AMSGRAD, MAXIMIZE, STOCHASTIC, FROM_GRADIENT,
            True, BLOCK,
        )  # fmt: skip


@jit(do_not_specialize=["seed"], do_not_specialize_on_alignment=["lr", "grad_scale", "found_inf"])
def adam_kernel(
    chunks, entries, gradients, arrivals, lr, grad_scale, found_inf,
    lr_high, lr_low, decay_high, decay_low, log1_high, log1_low, log2_high, log2_low,
    lerp_weight, beta2, one_minus_beta2, eps, seed: int64,
    GRADIENT_DTYPE: constexpr, PARAM_DTYPE: constexpr, STATE_DTYPE: constexpr, SHADOW_DTYPE: constexpr,
    DECAY: constexpr, DECOUPLED: constexpr, AMSGRAD: constexpr, MAXIMIZE: constexpr,
    STOCHASTIC: constexpr, FROM_GRADIENT: constexpr, ALIGNED: constexpr, CHUNK: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """Update one chunk. Grid: a program for each of C chunks of T tensors.

    chunks: int32 [C, 2]; entries: int64 [T, 9]; gradients: int64 [T], addresses; arrivals: int32 [T]: ``tables``.
    At those addresses, each element once: gradient GRADIENT_DTYPE, read; parameter PARAM_DTYPE and states STATE_DTYPE,
    read and written; shadow SHADOW_DTYPE (None: none), written; step fp32 [1], read, and written by one program. All
    arithmetic on elements is fp32, that on t and lr fp64.
    grad_scale, found_inf: fp32 [1] or None; lr: fp32 or fp64 [1], or None. Pairs (high, low) are doubles as
    two fp32: lr (where the pointer is None), weight decay, log(beta1), log(beta2).
    """
    if found_inf is not None:
        if tl.load(found_inf) != 0.0:
            return
    # Every program of a skipped tensor returns here, so none counts its step.
    tensor, entry, start, length = chunk_place(chunks, entries, CHUNK)
    address = tl.load(gradients + tensor)
    if address == 0:
        return
    scale = 1.0
    if grad_scale is not None:
        scale = tl.div_rn(1.0, tl.load(grad_scale))
    rate = double(lr_high, lr_low)
    if lr is not None:
        rate = tl.load(lr).to(tl.float64)
    step_count = tl.load(entry + STEP).to(tl.pointer_type(tl.float32))
    step = tl.load(step_count) + 1.0
    # beta ** step in FP64 by its logarithm, which the host computed.
    power1 = tl.exp(step.to(tl.float64) * double(log1_high, log1_low))
    power2 = tl.exp(step.to(tl.float64) * double(log2_high, log2_low))
    step_size = (rate / (1.0 - power1)).to(tl.float32)
    correction = tl.sqrt(1.0 - power2).to(tl.float32)
    decay = (1.0 - rate * double(decay_high, decay_low)).to(tl.float32)

    # If some tensor of the launch is unaligned, each program decides by its own tensor's addresses. With ALIGNED the
    # compiler sees the first call alone.
    if ALIGNED or (written_aligned(entry) and address % 16 == 0):
        adam_chunk(
            address, entry, start, length, seed, step, scale, decay, step_size, correction, lerp_weight, beta2,
            one_minus_beta2, eps, decay_high, GRADIENT_DTYPE, PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, DECOUPLED,
            AMSGRAD, MAXIMIZE, STOCHASTIC, FROM_GRADIENT, True, True, BLOCK,
        )  # fmt: skip
    elif written_aligned(entry):
        adam_chunk(
            address, entry, start, length, seed, step, scale, decay, step_size, correction, lerp_weight, beta2,
            one_minus_beta2, eps, decay_high, GRADIENT_DTYPE, PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, DECOUPLED,
            AMSGRAD, MAXIMIZE, STOCHASTIC, FROM_GRADIENT, False, True, BLOCK,
        )  # fmt: skip
    else:
        adam_chunk(
            address, entry, start, length, seed, step, scale, decay, step_size, correction, lerp_weight, beta2,
            one_minus_beta2, eps, decay_high, GRADIENT_DTYPE, PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, DECOUPLED,
            AMSGRAD, MAXIMIZE, STOCHASTIC, FROM_GRADIENT, False, False, BLOCK,
        )  # fmt: skip
    count_step(arrivals + tensor, tl.load(entry + CHUNKS), step_count, step)


def launch(
    gradients: Gradients,
    settings: AdamSettings,
    *,
    lr: float | Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Step in one launch, on the current stream, without host sync.

    Args:
        gradients: ``bind`` of a plan with states (exp_avg, exp_avg_sq[, max_exp_avg_sq]) and steps.
        lr: a float, or one float32 or float64 on the plan's device or on the CPU.
        grad_scale: one float32 on the plan's device, the loss scale, which gradients are divided by.
        found_inf: one float32 on the plan's device: unless it is 0 nothing is written.

    Raises:
        ValueError: a scalar is not one float32 on the plan's device.
    """
    pointer, rate = gradients.scalars(lr, grad_scale, found_inf)
    beta1, beta2 = settings.betas
    # Triton passes scalars as FP32, which would round lr and log(beta).
    pairs = {"lr": rate, "decay": settings.weight_decay, "log1": _log(beta1), "log2": _log(beta2)}
    halves = [(name, split(value)) for name, value in pairs.items()]
    lerp_weight, from_gradient = _lerp_weight(beta1)
    gradients.update(
        adam_kernel, _BLOCK, arrivals=gradients.tables.arrivals, lr=pointer, grad_scale=grad_scale, found_inf=found_inf,
        **{f"{name}_high": high for name, (high, _) in halves}, **{f"{name}_low": low for name, (_, low) in halves},
        lerp_weight=lerp_weight, beta2=float(beta2), one_minus_beta2=1.0 - beta2, eps=float(settings.eps),
        seed=settings.rounding_seed or 0, DECAY=settings.weight_decay != 0, DECOUPLED=settings.decoupled,
        AMSGRAD=settings.amsgrad, MAXIMIZE=settings.maximize, STOCHASTIC=settings.rounding_seed is not None,
        FROM_GRADIENT=from_gradient,
    )  # fmt: skip


def split(value: float) -> tuple[float, float]:
    """Split a double into two FP32 values, 48 bits of it: kernels take scalars as FP32, and add these up in FP64.

    A double beyond FP32's range becomes (inf, 0).
    """
    # The rest of an infinite high part would be nan.
    high = float32(value)
    return high, float32(value - high) if math.isfinite(high) else 0.0


def float32(value: float) -> float:
    """Return the FP32 value nearest to a double; infinite beyond FP32's range."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _lerp_weight(beta1: float) -> tuple[float, bool]:
    """Return lerp's weight, and whether it starts from the gradient: as in torch, it starts at the nearer end."""
    weight = float32(1 - beta1)
    return (weight, False) if weight < 0.5 else (float32(weight - 1), True)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
