"""Calls attention in bfloat16 on a CPU, another way than torch's kernel where that is faster.

The way is that of the conversion: "products" or "recomputed", whichever takes less time on this CPU
(``fxprec.kernels.cpu.attention_products``), or with ``fuse=True`` "compiled"
(``fxprec.kernels.cpu.compiled_attention``). It is taken from ``from_flop`` on, one number for a forward alone and one
where a backward follows; what is smaller is torch's, and what the kernels do not serve.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.direct import Run
from fxprec.kernels.launch.graph_call import graph_call

#: FLOP from which a way is taken, by whether a backward follows: ``from_flop[False]`` and ``from_flop[True]``. None:
#: never.
FromFlop: TypeAlias = tuple[int | None, int | None]


@graph_call
def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, way: str = "products",
    from_flop: FromFlop = (None, None),
) -> Tensor:  # fmt: skip
    """Return ``F.scaled_dot_product_attention``, computed the given way from so many FLOP on."""
    arguments = query, key, value, attn_mask, is_causal
    if not dropout_p and _is_taken(*arguments, enable_gqa, from_flop):
        if way == "compiled":
            from fxprec.kernels.cpu import compiled_attention

            return compiled_attention.compiled_attention(*arguments, scale)
        from fxprec.kernels.cpu import attention_products as products

        # Unlike the compiled loop, these keep the probabilities for a backward, in memory that grows with the square of
        # the length.
        if products.is_short(query, key, value, is_causal):
            attend = products.recomputed_attention if way == "recomputed" else products.attention_by_products
            return attend(*arguments, scale)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _is_taken(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, grouped: bool, from_flop: FromFlop
) -> bool:
    """Return whether another way than torch's kernel serves these, and there is enough to compute."""
    if query.dtype is not torch.bfloat16 or query.dim() != 4:
        return False
    from fxprec.kernels.cpu import attention  # whose ops are registered when it is imported

    trained = attention.wants_gradients(query, key, value)
    flop, limit = 4 * query.numel() * key.shape[-2], from_flop[trained]
    if causal and not trained:
        # torch's forward leaves out the masked half. Ours leaves out less, in up to four blocks with calls for each: it
        # is taken only where there is four times as much to compute.
        flop //= 4
    return limit is not None and flop >= limit and attention.serves(query, key, value, mask, causal, grouped)


def run_for(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, from_flop: FromFlop = (None, None),
) -> Run | None:  # fmt: skip
    """Return ``cpu_attention`` as a compiled loop, of tensors with the shapes and strides of these.

    None where a gradient is wanted, or the loop does not serve. Where ``sdpa_kernel`` forbids fused kernels the
    function calls torch's.
    """
    from fxprec.kernels.cpu import attention, compiled_attention

    trained = attention.wants_gradients(query, key, value)
    if trained or not _is_taken(query, key, value, None, is_causal, enable_gqa, from_flop):
        return None
    run = compiled_attention.run_for(query, key, value, is_causal, scale)
    if run is None:
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # This switch of torch's, despite its name, holds for the CPU's flash kernel as well.
        if torch.backends.cuda.flash_sdp_enabled():
            return run(query, key, value)
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, **options)

    return attend
