"""Defines attention on a CPU in bfloat16: the arguments it supports, and its reference in plain torch::

    S = scale * q k^T + mask
    P = softmax(S)
    out = P v

    dP = dout v^T
    dS = P * (dP - rowsum(P * dP))
    dq = scale * dS k,  dk = scale * dS^T q,  dv = P^T dout

Implementations: ``attention_products`` and ``compiled_attention``.

Source: Dao et al., "FlashAttention", NeurIPS 2022 (the derivatives); PyTorch, ``scaled_dot_product_attention`` (the
semantics).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.launch.kernel_op import KernelOp
from fxprec.kernels.launch.observers import runs_eagerly
from fxprec.kernels.torch_internals import attention_choice

#: Torch's choice if it has no fused kernel.
_BY_OPS: Final = 0


def serves(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, grouped: bool) -> bool:
    """Return whether our implementations can replace ``scaled_dot_product_attention`` for these arguments.

    They cannot where torch has no fused kernel and computes in FP32; under a tracer or transform, since vmap and
    forward mode have no rule for our ops and a tracer would unroll them; nor where a row attends to no key, whose
    result torch's kernel alone defines.
    """
    if (
        query.device.type != "cpu"
        or query.dtype is not torch.bfloat16
        or not query.dtype is key.dtype is value.dtype
        or query.dim() != 4
        or not runs_eagerly()
        or 0 in (query.numel(), key.numel(), value.numel())
        or key.dim() != 4
        or (key.shape[1] != query.shape[1] and not (grouped and query.shape[1] % key.shape[1] == 0))
    ):
        return False
    try:
        if attention_choice(query, key, value, mask, 0.0, causal, enable_gqa=grouped) == _BY_OPS:
            return False
    except RuntimeError:  # torch refuses the arguments: its own call will raise
        return False
    if mask is None:
        return True
    return not causal and bool((mask if mask.dtype is torch.bool else mask > -math.inf).any(-1).all())


def empty_like(x: Tensor) -> Tensor:
    """Allocate [N, H, T, E] in memory order [N, T, H, E], as the result of torch's kernel."""
    batch, heads, rows, width = x.shape
    return x.new_empty(batch, rows, heads, width).transpose(1, 2)


def scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Return the scores of each row and key, [N, H, T, S], in plain torch and the dtype of the arguments."""
    found = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2) * scale
    if causal:
        found = found + torch.full(found.shape[-2:], -math.inf, dtype=found.dtype).triu(1)
    return found if mask is None else found + mask


def reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Compute attention in plain torch, in FP32, differentiable any number of times; the result has query's dtype."""
    # float64 stays, for comparisons.
    wide = torch.promote_types(query.dtype, torch.float32)
    p = torch.softmax(scores(query.to(wide), key.to(wide), mask, causal, scale), -1)
    return (p @ value.to(wide).repeat_interleave(query.shape[1] // key.shape[1], 1)).to(query.dtype)


def plain_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, p: Tensor, scale: float, sums: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, in plain torch and differentiable, from P, [N, H, T, S].

    ``sums``: rowsum(P * dP), [N, H, T, 1], where it is known.
    """
    group = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
    of_p = grad @ values.transpose(-1, -2)
    of_scores = scale * p * (of_p - ((p * of_p).sum(-1, keepdim=True) if sums is None else sums))
    of_keys, of_values = of_scores.transpose(-1, -2) @ query, p.transpose(-1, -2) @ grad
    of_keys, of_values = (x.unflatten(1, (-1, group)).sum(2) for x in (of_keys, of_values))
    return of_scores @ keys, of_keys, of_values


def additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask as an FP32 addend to the scores, [N, H, T, S]; only a broadcast last dimension is copied."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -math.inf)
    mask = mask.to(torch.promote_types(query.dtype, torch.float32))
    mask = mask.expand(*mask.shape[:-1], key.shape[2]).contiguous()
    return mask.expand(*query.shape[:3], key.shape[2])


def wants_gradients(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether a backward may follow."""
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def gradients_like(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Allocate the gradients of query, key and value."""
    return empty_like(query), empty_like(key), empty_like(value)


def scale_of(query: Tensor, given: float | None) -> float:
    """Return the scale of the scores: the given one, or 1 / sqrt(E)."""
    return 1.0 / math.sqrt(query.shape[3]) if given is None else float(given)


def elements_side_by_side(x: Tensor) -> Tensor:
    """Return x with the elements of each row adjacent in memory, as kernels read them; a copy if they are not."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def op_of(
    name: str, forward: Callable[..., Tensor], backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> KernelOp:
    """Make an attention op that saves nothing but its inputs for the backward.

    Args:
        name: of the op; that of its backward ends in "_backward".
        forward: of query, key, value, mask, causal and scale: the output, as ``empty_like``.
        backward: of the output's gradient and the same: three gradients.
    """
    backward_op = KernelOp(f"{name}_backward", backward, gradients_like)

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return backward_op(grad, *ctx.saved_tensors, *ctx.settings)

    return KernelOp(name, forward, lambda query, *_: empty_like(query), backward=gradients, reference=reference)
