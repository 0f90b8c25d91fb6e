"""Attention in the reference: torch's CPU kernel and ours, in plain torch, with derivatives in all that they read.

The kernels themselves have none in a mask, none of what a forward keeps for its backward, and none of the backward::

    forward     S = scale * q k^T + mask      out = P v      P = softmax(S) = exp(S - norms)
    backward    reads q, k, v, mask, dout, and what was kept: P (products), nothing (recomputed, compiled), or norms
                and out (torch)

An error of what was kept is rounding of the forward that kept it: so both results of a forward are differentiable, and
a backward is in what it reads of them.

Source: Dao et al., "FlashAttention", NeurIPS 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.cpu.attention import plain_gradients, scores
from fxprec.kernels.cpu.attention_products import in_blocks, out_of_blocks
from fxprec.torch_internals import aten_flash_attention_for_cpu


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, P and norms. A row that attends to nothing gives 0, and has a norm of 0, as in torch's kernel."""
    found = scores(query, key, mask, causal, scale)
    nothing = (found == -torch.inf).all(-1)
    norms = found.masked_fill(nothing.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(nothing, 0.0)
    p = _weights(found, norms)
    return p @ value.repeat_interleave(query.shape[1] // key.shape[1], 1), p, norms


def _weights(found: Tensor, norms: Tensor) -> Tensor:
    """Return P of scores. Some versions of torch have inf for the norm of a row that attends to nothing."""
    return (found - norms.masked_fill(norms.isinf(), 0.0).unsqueeze(-1)).exp()


def _products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, kept: bool
) -> tuple[Tensor, Tensor]:
    out, p, _ = _attend(query, key, value, mask, causal, scale)
    return out, in_blocks(p, key, causal) if kept else p.new_empty(0)


def _products_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, kept: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    return plain_gradients(grad, query, key, value, out_of_blocks(kept, query, key, causal), scale)


def _output(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:  # fmt: skip
    return _attend(query, key, value, mask, causal, scale)[0]


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    p = _attend(query, key, value, mask, causal, scale)[1]
    return plain_gradients(grad, query, key, value, p, scale)


def _torchs(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not torch.is_grad_enabled():  # the kernel serves, in a quarter of the memory
        return aten_flash_attention_for_cpu(query, key, value, dropout, causal, attn_mask=attn_mask, scale=scale)
    out, _, norms = _attend(query, key, value, attn_mask, causal, _scale(query, scale))
    return out, norms


def _torchs_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, norms: Tensor, _dropout: float, causal: bool,
    *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    factor = _scale(query, scale)
    p = _weights(scores(query, key, attn_mask, causal, factor), norms)
    return plain_gradients(grad, query, key, value, p, factor, (grad * out).sum(-1, keepdim=True))


def _scale(query: Tensor, given: float | None) -> float:
    return query.shape[-1] ** -0.5 if given is None else given


#: Op -> what the reference calls, with the same arguments and results.
ATTENTION: Final[dict[str, Callable[..., Any]]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _torchs,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _torchs_backward,
    "fxprec::attention": _products,
    "fxprec::attention_backward": _products_backward,
    "fxprec::compiled_attention": _output,
    "fxprec::compiled_attention_backward": _gradients,
    "fxprec::recomputed_attention": _output,
    "fxprec::recomputed_attention_backward": _gradients,
}
