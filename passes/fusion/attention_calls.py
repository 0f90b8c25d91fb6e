"""Attention in bfloat16 on a CPU becomes a call that goes another way than torch's kernel, where that is faster.

Before::

    %attended: bfloat16 = scaled_dot_product_attention(%q, %k, %v, is_causal=True)

After::

    %attended: bfloat16 = cpu_attention(%q, %k, %v, is_causal=True, way="products", from_flop=(19000000, 1100000))

The way is that of the conversion: "products" or "recomputed", whichever takes less time here
(``fxprec.kernels.cpu.attention_products``), or with ``fuse=True`` "compiled"
(``fxprec.kernels.cpu.compiled_attention``). It is taken from so many FLOP on, by a forward alone and by one with a
backward; what is smaller is torch's, and what the kernels do not serve. The numbers are where the curves of the
device's costs cross; a forward alone under a mask is torch's, where ours would be compiled.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Proxy

from fxprec.kernels.launch.direct import Run
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.costs.device_costs import AttentionWay
from fxprec.passes.graph.annotations import argument, notes
from fxprec.passes.graph.retrace import leaf


def cpu_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, way: AttentionWay = "products",
    from_flop: tuple[int | None, int | None] = (None, None),
) -> Any:  # fmt: skip
    """``scaled_dot_product_attention``, another way from so many FLOP on: (of a forward alone, with its backward)."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if isinstance(query, Proxy):
        options |= {"way": way, "from_flop": from_flop}
        return leaf(cpu_attention, query, key, value, attn_mask, dropout_p, is_causal, **options)
    if query.dtype is torch.bfloat16 and query.dim() == 4 and not dropout_p:
        from fxprec.kernels.cpu import attention  # whose ops are registered when it is imported

        trained = attention.wants_gradients(query, key, value)
        if _is_enough(query, key, is_causal, from_flop[trained], trained):
            arguments = query, key, value, attn_mask, is_causal
            if attention.serves(*arguments, enable_gqa):
                if way == "compiled":
                    from fxprec.kernels.cpu import compiled_attention

                    return compiled_attention.compiled_attention(*arguments, scale)
                from fxprec.kernels.cpu import attention_products as products

                if products.is_short(query, key, value, is_causal):
                    recomputed = way == "recomputed"
                    attend = products.recomputed_attention if recomputed else products.attention_by_products
                    return attend(*arguments, scale)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _is_enough(query: Tensor, key: Tensor, causal: bool, limit: int | None, trained: bool) -> bool:
    flop = 4 * query.numel() * key.shape[-2]
    if causal and not trained:
        flop //= 4  # torch's forward leaves half of them out; ours comes in up to four blocks, with calls of each
    return limit is not None and flop >= limit


def run_for(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, from_flop: tuple[int | None, int | None] = (None, None),
) -> Run | None:  # fmt: skip
    """``cpu_attention`` as a compiled loop, of tensors that lie like these.

    None where a gradient is wanted, or it is not the loop's. Where ``sdpa_kernel`` forbids fused kernels it is torch's.
    """
    from fxprec.kernels.cpu import attention, compiled_attention

    if query.dtype is not torch.bfloat16 or query.dim() != 4 or attention.wants_gradients(query, key, value):
        return None
    if not _is_enough(query, key, is_causal, from_flop[0], False):
        return None
    if not attention.serves(query, key, value, None, is_causal, enable_gqa):
        return None
    run = compiled_attention.run_for(query, key, value, is_causal, scale)
    if run is None:
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if torch.backends.cuda.flash_sdp_enabled():  # that of CPUs, too
            return run(query, key, value)
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, **options)

    return attend


@bodies_first
def call_attention(gm: GraphModule, context: Context) -> PassResult:
    """Replace what is computed low, where another way than torch's kernel is faster from some size on."""
    if context.attention is None:
        return PassResult(gm, False)
    way, alone, trained = context.attention
    both = tuple(None if each == inf else round(each) for each in (alone, trained))
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        decided = notes(node).precision
        if decided.compute is not context.low:
            continue
        # A forward alone under a mask: torch's takes less time than a loop with the mask that it adds, at every size.
        masked = argument(node, 3, "attn_mask") is not None
        limits = (None, both[1]) if masked and way == "compiled" else both
        node.target = cpu_attention
        node.kwargs = {**node.kwargs, "way": way, "from_flop": limits}
        why = f"{_WAYS[way]} from {_flop(limits[1])} on, without a backward from {_flop(limits[0])}"
        notes(node).precision = decided._replace(why=f"{decided.why}; {why}")
        notes(node).fused = f"attention by {_WAYS[way]}"
        changed = True
    return PassResult(gm, changed)


_WAYS: dict[AttentionWay, str] = {
    "products": "plain products",
    "recomputed": "torch's forward and a backward of plain products",
    "compiled": "a compiled loop",
}


def _flop(limit: int | None) -> str:
    return "no size" if limit is None else f"{limit / 1e6:.3g} MFLOP"
