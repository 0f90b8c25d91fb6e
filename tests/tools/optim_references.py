"""What the multi-tensor kernels of ``kernels/optim`` compute, in plain torch: tensor by tensor, to the last bit.

In FP32 ``adam`` and ``sgd`` are what torch's fused kernels compute on a CPU with FMA; the tests hold them to that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxprec.kernels.launch.rounding import rounding_offset, stochastic_round
from fxprec.kernels.optim.adam import AdamSettings, _lerp_weight, float32
from fxprec.kernels.optim.norm import NormResult
from fxprec.kernels.optim.sgd import SgdSettings
from fxprec.kernels.optim.tables import Gradients


@torch.no_grad()
def adam(
    gradients: Gradients,
    settings: AdamSettings,
    *,
    lr: float | Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """The same in plain torch, on any device, tensor by tensor; reads found_inf, lr and the step counts back.

    Stochastic rounding draws other bits than the kernel.
    """
    plan = gradients.plan
    if found_inf is not None and found_inf.item() != 0:
        return
    rate = float(lr)
    beta1, beta2 = settings.betas
    lerp_weight, from_gradient = _lerp_weight(beta1)
    assert plan.steps is not None
    for position, (grad, param, step) in enumerate(zip(gradients.tensors, plan.params, plan.steps, strict=True)):
        if grad is None:
            continue
        t = step.item() + 1
        correction = param.new_tensor(math.sqrt(1 - beta2**t), dtype=torch.float32)
        states = [state[position] for state in plan.states]
        g, p, m, v, *largest = (tensor.float() for tensor in (grad, param, *states))
        if grad_scale is not None:
            g = g * grad_scale.reciprocal()
        if settings.maximize:
            g = -g
        if settings.weight_decay != 0 and settings.decoupled:
            p = p * float32(1 - rate * settings.weight_decay)
        elif settings.weight_decay != 0:
            g = fma(p, settings.weight_decay, g)
        m = fma(g - m, lerp_weight, g if from_gradient else m)
        v = fma(g * float32(1 - beta2), g, v * float32(beta2))
        if settings.rounding_seed is not None:
            offsets = [rounding_offset(int(t), plan.indices[position], state) for state in (0, 1)]
            stored = [stochastic_round(x, settings.rounding_seed, o) for x, o in zip((m, v), offsets, strict=True)]
        else:
            stored = [x.to(plan.state_dtype) for x in (m, v)]
        if settings.amsgrad:
            stored.append(torch.maximum(largest[0], stored[1].float()))
            v = torch.maximum(largest[0], v)
        denominator = sqrt(v) / correction + float32(settings.eps)
        param.copy_(p - m * float32(rate / (1 - beta1**t)) / denominator)
        for state, value in zip(states, stored, strict=True):
            state.copy_(value)
        shadow = plan.shadows[position] if plan.shadows is not None else None
        if shadow is not None:
            shadow.copy_(param)
        step.fill_(t)


@torch.no_grad()
def sgd(
    gradients: Gradients,
    settings: SgdSettings,
    *,
    lr: float | Tensor,
    first: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """The same in plain torch, on any device, tensor by tensor; reads found_inf and lr back."""
    plan = gradients.plan
    if found_inf is not None and found_inf.item() != 0:
        return
    for position, (grad, param) in enumerate(zip(gradients.tensors, plan.params, strict=True)):
        if grad is None:
            continue
        g, p = grad.float(), param.float()
        if grad_scale is not None:
            g = g * grad_scale.reciprocal()
        if settings.maximize:
            g = -g
        if settings.weight_decay != 0:
            g = fma(p, settings.weight_decay, g)
        if plan.states:
            buffer = plan.states[0][position]
            kept = g if first else fma(g, 1 - settings.dampening, buffer.float() * float32(settings.momentum))
            buffer.copy_(kept)
            g = fma(kept, settings.momentum, g) if settings.nesterov else kept
        param.copy_(fma(g, -float(lr), p))
        shadow = None if plan.shadows is None else plan.shadows[position]
        if shadow is not None:
            shadow.copy_(param)


@torch.no_grad()
def norm(gradients: Gradients, *, grad_scale: Tensor | None = None) -> NormResult:
    """The same in plain torch, on any device; only the order of the sum differs."""
    plan = gradients.plan
    factor = 1.0 if grad_scale is None else grad_scale.reciprocal()
    total = found = torch.zeros((), device=plan.device)
    for tensor in gradients.tensors:
        if tensor is not None:
            values = tensor.float() * factor
            total = total + values.square().sum()
            found = torch.maximum(found, (~values.isfinite()).any().float())
    return NormResult(total, found)


def fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """``a * b + c`` of FP32 tensors, rounded once as ``fma.rn.f32`` does: the product of two FP32 is exact in FP64.

    The sum is rounded to FP64 first, which shows in the result about once in 2**29 times. A float is taken as FP32.
    """
    factor = b.double() if isinstance(b, Tensor) else float32(b)
    return (a.double() * factor + c.double()).float()


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded FP32 square root; ``torch.sqrt`` on a CPU may be 1 ulp off."""
    return x.double().sqrt().to(torch.float32)
