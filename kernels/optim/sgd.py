"""SGD for all parameters in one launch: unscale, clip, update, and the low-precision copy, in one pass.

``reference`` is what it computes. In FP32 that is what torch's ``_fused_sgd_`` computes on a CPU with FMA, bit for bit:
hyper-parameters rounded to FP32 once, and

    g   = fma(p, weight_decay, ±g * (1 / grad_scale) * clip_coef)
    buf = fma(1 - dampening, g, buf * momentum), at the first step g
    p   = p - lr * (fma(buf, momentum, g) if nesterov else buf), one fma

The first step never reads the buffer, so it may be uninitialised. Which step is the first, the caller says; or, where a
first step may be skipped on the device without the host knowing, the plan's step counts say (0: the buffer is not
begun), which the kernel counts up. Where ``found_inf`` is set or a gradient is missing nothing is written: parameter,
buffer, step and shadow keep their bits. The gradient is only read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fxprec.kernels.launch.arithmetic import float32, fma
from fxprec.kernels.launch.rounding import random_words, round_block, rounding_offset, stochastic_round
from fxprec.kernels.launch.triton_support import constant, constexpr, int64, jit, require_triton, tl, triton_dtype
from fxprec.kernels.optim.lists import check_scalar, device_rate
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
)

_BLOCK: Final = 512
_WARPS: Final = 4
# Which step is the first.
NOT_NOW, NOW, BY_STEP = (constant(case) for case in (0, 1, 2))


@dataclass(frozen=True, slots=True)
class SgdSettings:
    """What stays the same from step to step.

    ``rounding_seed``: round a bfloat16 momentum buffer stochastically with this seed; None rounds it to nearest.

    :raises ValueError: a value that is negative or not finite, nesterov without momentum or with dampening, a seed
        beyond 63 bits.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False
    rounding_seed: int | None = None

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
        if self.rounding_seed is not None and not 0 <= self.rounding_seed < 1 << 63:
            raise ValueError(f"rounding_seed must be in [0, 2**63), got {self.rounding_seed}.")


def bytes_per_element(
    gradient: torch.dtype,
    param: torch.dtype = torch.float32,
    state: torch.dtype | None = torch.float32,
    shadow: torch.dtype | None = None,
    first: bool = False,
) -> int:
    """Bytes that the update moves for each element: the gradient is read, the shadow written, all else both.

    ``state`` None: no momentum. ``first``: the caller says that this is the first step; the buffer is only written.
    Low gradient, FP32 parameter and buffer, low shadow: read 2 + 4 + 4, write 4 + 4 + 2, 20 in all. Beside that a
    program reads some 100 bytes of tables, for 8192 elements or more.
    """
    buffer = 0 if state is None else state.itemsize * (1 if first else 2)
    return gradient.itemsize + 2 * param.itemsize + buffer + (0 if shadow is None else shadow.itemsize)


@jit()
def sgd_block(
    gradient, param, buffer, shadow, has_shadow, first, length, start, seed, step, index, scale, clip, rate,
    momentum, one_minus_dampening, weight_decay,
    PARAM_DTYPE: constexpr, STATE_DTYPE: constexpr, SHADOW_DTYPE: constexpr, DECAY: constexpr,
    NESTEROV: constexpr, MAXIMIZE: constexpr, STOCHASTIC: constexpr, FIRST: constexpr,
    MASKED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Update the block that begins ``first`` elements into a chunk; MASKED: the chunk ends within it."""
    offset = first + tl.arange(0, BLOCK)
    mask = offset < length if MASKED else None
    g = tl.load(gradient + offset, mask=mask).to(tl.float32) * scale * clip
    p = tl.load(param + offset, mask=mask).to(tl.float32)
    if MAXIMIZE:
        g = -g
    if DECAY:
        g = tl.fma(p, weight_decay, g)
    if STATE_DTYPE is not None:
        kept = g
        if FIRST == NOT_NOW:
            before = tl.load(buffer + offset, mask=mask).to(tl.float32)
            kept = tl.fma(g, one_minus_dampening, before * momentum)
        if FIRST == BY_STEP:
            begun = tl.zeros((BLOCK,), tl.float32) + step > 1.0
            inside = (begun & (offset < length)) if MASKED else begun
            before = tl.load(buffer + offset, mask=inside, other=0.0).to(tl.float32)
            kept = tl.where(begun, tl.fma(g, one_minus_dampening, before * momentum), g)
        if STOCHASTIC:
            words = random_words(seed, step.to(tl.int32), index, start + first, BLOCK)
            tl.store(buffer + offset, round_block(kept, words & 0xFFFF), mask=mask)
        else:
            tl.store(buffer + offset, kept.to(STATE_DTYPE), mask=mask)
        g = tl.fma(kept, momentum, g) if NESTEROV else kept
    p_stored = tl.fma(g, -rate, p).to(PARAM_DTYPE)
    tl.store(param + offset, p_stored, mask=mask)
    if SHADOW_DTYPE is not None:
        if has_shadow:
            tl.store(shadow + offset, p_stored.to(tl.float32).to(SHADOW_DTYPE), mask=mask)


@jit(do_not_specialize=["seed"], do_not_specialize_on_alignment=["lr", "grad_scale", "clip_coef", "found_inf"])
def sgd_kernel(
    chunks, entries, gradients, arrivals, lr, grad_scale, clip_coef, found_inf,
    lr_value, momentum, one_minus_dampening, weight_decay, seed: int64,
    GRADIENT_DTYPE: constexpr, PARAM_DTYPE: constexpr, STATE_DTYPE: constexpr, SHADOW_DTYPE: constexpr,
    DECAY: constexpr, NESTEROV: constexpr, MAXIMIZE: constexpr, STOCHASTIC: constexpr,
    FIRST: constexpr, STEPS: constexpr, ALIGNED: constexpr, CHUNK: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Update one chunk. Grid: a program for each of C chunks of T tensors.

    chunks: int32 [C, 2]; entries: int64 [T, 9]; gradients: int64 [T], addresses; arrivals: int32 [T]: ``multi_tensor``.
    At those addresses, each element once: gradient GRADIENT_DTYPE, read; parameter PARAM_DTYPE, read and written;
    momentum buffer STATE_DTYPE (None: none), written, and read unless this is the first step; shadow SHADOW_DTYPE
    (None: none), written; with STEPS the step fp32 [1], read, and written by one program. All arithmetic is fp32.
    grad_scale, clip_coef, found_inf: fp32 [1] or None; lr: fp32 or fp64 [1], or None, where lr_value stands for it.
    """
    if found_inf is not None:
        if tl.load(found_inf) != 0.0:
            return
    tensor, entry, start, length = chunk_place(chunks, entries, CHUNK)
    address = tl.load(gradients + tensor)
    if address == 0:
        return
    scale = 1.0
    clip = 1.0
    rate = lr_value
    if grad_scale is not None:
        scale = tl.div_rn(1.0, tl.load(grad_scale))
    if clip_coef is not None:
        clip = tl.load(clip_coef)
    if lr is not None:
        rate = tl.load(lr).to(tl.float32)
    step_count = tl.load(entry + STEP).to(tl.pointer_type(tl.float32))
    step = 1.0
    if STEPS:
        step = tl.load(step_count) + 1.0

    gradient = elements_at(address, start, GRADIENT_DTYPE, ALIGNED)
    param = elements_at(tl.load(entry + PARAM), start, PARAM_DTYPE, ALIGNED)
    buffer = param
    if STATE_DTYPE is not None:
        buffer = elements_at(tl.load(entry + STATE), start, STATE_DTYPE, ALIGNED)
    shadow = param
    has_shadow = False
    if SHADOW_DTYPE is not None:
        shadow_address = tl.load(entry + SHADOW)
        has_shadow = shadow_address != 0
        shadow = elements_at(shadow_address, start, SHADOW_DTYPE, ALIGNED)
    index = tl.load(entry + INDEX)
    whole = length // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        sgd_block(
            gradient, param, buffer, shadow, has_shadow, first, length, start, seed, step, index, scale, clip, rate,
            momentum, one_minus_dampening, weight_decay, PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, NESTEROV,
            MAXIMIZE, STOCHASTIC, FIRST, False, BLOCK,
        )  # fmt: skip
    if whole < length:
        sgd_block(
            gradient, param, buffer, shadow, has_shadow, whole, length, start, seed, step, index, scale, clip, rate,
            momentum, one_minus_dampening, weight_decay, PARAM_DTYPE, STATE_DTYPE, SHADOW_DTYPE, DECAY, NESTEROV,
            MAXIMIZE, STOCHASTIC, FIRST, True, BLOCK,
        )  # fmt: skip
    if STEPS:
        count_step(arrivals + tensor, tl.load(entry + CHUNKS), step_count, step)


def launch(
    gradients: Gradients,
    settings: SgdSettings,
    *,
    lr: float | Tensor,
    first: bool | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Step in one launch, on the current stream, without host sync. ``reference`` says what it does.

    :param gradients: ``bind`` of a plan with states (momentum_buffer,), or none without momentum.
    :param lr: a float, or one float32 or float64 on the plan's device or on the CPU.
    :param first: with momentum and a plan without steps: whether the buffers are yet to begin. None otherwise.
    :param grad_scale: one float32 on the plan's device, the loss scale, which gradients are divided by.
    :param clip_coef: one float32 on the plan's device, which gradients are multiplied by.
    :param found_inf: one float32 on the plan's device: unless it is 0 nothing is written.
    :raises RuntimeError: no Triton, or not on CUDA (and not in Triton's interpreter).
    :raises ValueError: plan, settings and ``first`` do not fit, or a scalar is not one float32 on its device.
    """
    plan, tables = gradients.plan, gradients.tables
    require_triton(plan.device, "multi_tensor_sgd")
    _check(gradients, settings, first, grad_scale, clip_coef, found_inf)
    if gradients.dtype is None:
        return
    pointer, rate = device_rate(lr, plan.device)
    with plan.on_device():
        sgd_kernel[(len(tables.chunks),)](
            tables.chunks, tables.entries, gradients.row, tables.arrivals, pointer, grad_scale, clip_coef, found_inf,
            lr_value=rate, momentum=float(settings.momentum), one_minus_dampening=1.0 - settings.dampening,
            weight_decay=float(settings.weight_decay), seed=settings.rounding_seed or 0,
            GRADIENT_DTYPE=triton_dtype(gradients.dtype), PARAM_DTYPE=triton_dtype(plan.param_dtype),
            STATE_DTYPE=triton_dtype(plan.state_dtype), SHADOW_DTYPE=triton_dtype(plan.shadow_dtype),
            DECAY=settings.weight_decay != 0, NESTEROV=settings.nesterov, MAXIMIZE=settings.maximize,
            STOCHASTIC=settings.rounding_seed is not None,
            FIRST=BY_STEP if first is None else NOW if first else NOT_NOW, STEPS=plan.steps is not None,
            ALIGNED=gradients.aligned, CHUNK=plan.chunk, BLOCK=_BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


@torch.no_grad()
def reference(
    gradients: Gradients,
    settings: SgdSettings,
    *,
    lr: float | Tensor,
    first: bool | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """The same in plain torch, on any device, tensor by tensor; reads found_inf, lr and the step counts back.

    Stochastic rounding draws other bits than the kernel.
    """
    plan = gradients.plan
    _check(gradients, settings, first, grad_scale, clip_coef, found_inf)
    if found_inf is not None and found_inf.item() != 0:
        return
    for position, (grad, param) in enumerate(zip(gradients.tensors, plan.params, strict=True)):
        if grad is None:
            continue
        step = None if plan.steps is None else plan.steps[position]
        g, p = grad.float(), param.float()
        if grad_scale is not None:
            g = g * grad_scale.reciprocal()
        if clip_coef is not None:
            g = g * clip_coef
        if settings.maximize:
            g = -g
        if settings.weight_decay != 0:
            g = fma(p, settings.weight_decay, g)
        if plan.states:
            buffer = plan.states[0][position]
            begins = first if step is None else step.item() == 0
            kept = g if begins else fma(g, 1 - settings.dampening, buffer.float() * float32(settings.momentum))
            if settings.rounding_seed is not None and step is not None:
                offset = rounding_offset(int(step.item()) + 1, plan.indices[position], 0)
                buffer.copy_(stochastic_round(kept, settings.rounding_seed, offset))
            else:
                buffer.copy_(kept)
            g = fma(kept, settings.momentum, g) if settings.nesterov else kept
        param.copy_(fma(g, -float(lr), p))
        shadow = None if plan.shadows is None else plan.shadows[position]
        if shadow is not None:
            shadow.copy_(param)
        if step is not None:
            step.add_(1)


def _check(
    gradients: Gradients,
    settings: SgdSettings,
    first: bool | None,
    grad_scale: Tensor | None,
    clip_coef: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    plan = gradients.plan
    expected = 0 if settings.momentum == 0 else 1
    if len(plan.states) != expected:
        raise ValueError(
            f"SGD with momentum {settings.momentum} needs a plan with {expected} lists of states, got "
            f"{len(plan.states)}."
        )
    if expected and (first is None) == (plan.steps is None):
        raise ValueError(
            "With momentum the first step is known either by first=True or False, or by the plan's step counts: "
            f"got first={first} and {'no ' if plan.steps is None else ''}steps."
        )
    if settings.rounding_seed is not None and (plan.state_dtype != torch.bfloat16 or plan.steps is None):
        raise ValueError(
            "rounding_seed is for a bfloat16 momentum buffer, and needs the plan's step counts: got "
            f"{plan.state_dtype} and {'no ' if plan.steps is None else ''}steps."
        )
    for name, scalar in (("grad_scale", grad_scale), ("clip_coef", clip_coef), ("found_inf", found_inf)):
        check_scalar(name, scalar, plan.device)
