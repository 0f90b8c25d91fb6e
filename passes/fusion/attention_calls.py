"""Attention in bfloat16 on a CPU becomes a call that takes plain matrix products, where these are the faster way.

Before::

    %attended: bfloat16 = scaled_dot_product_attention(%q, %k, %v, is_causal=True)

After::

    %attended: bfloat16 = cpu_attention(%q, %k, %v, is_causal=True, products_from=(60000000, 2000000))

Which way a call goes depends on its sizes: from so many FLOP on, without a backward and with one, by products
(``fxprec.kernels.nn.attention``), below by torch's kernel. The numbers are where the curves of the device's costs
cross.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Proxy

from fxprec.passes.graph.annotations import notes
from fxprec.passes.graph.leaves import leaf


def cpu_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, products_from: tuple[int | None, int | None] = (None, None),
) -> Any:  # fmt: skip
    """``scaled_dot_product_attention``, by products from so many FLOP on: (of a forward alone, with its backward)."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if isinstance(query, Proxy):
        options["products_from"] = products_from
        return leaf(cpu_attention, query, key, value, attn_mask, dropout_p, is_causal, **options)
    if query.dtype is torch.bfloat16 and query.dim() == 4 and not dropout_p:
        from fxprec.kernels.nn import attention as products  # which loads Triton

        enough = products_from[products.wants_gradients(query, key, value)]
        flop = 4 * query.numel() * key.shape[-2]
        if enough is not None and flop >= enough:
            if products.serves(query, key, value, attn_mask, is_causal, enable_gqa):
                return products.attention(query, key, value, attn_mask, is_causal, scale)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def call_attention(graph: Graph, low: torch.dtype, products_from: tuple[float, float]) -> bool:
    """Replace what is computed low. Returns whether anything was."""
    limits = tuple(None if each == inf else round(each) for each in products_from)
    changed = False
    for node in graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        if notes(node).precision.compute is not low:
            continue
        known = inspect.signature(cpu_attention).parameters
        if len(node.args) > len(known) or not known.keys() >= node.kwargs.keys():
            continue
        node.target = cpu_attention
        node.kwargs = {**node.kwargs, "products_from": limits}
        decided = notes(node).precision
        why = f"plain products from {_flop(limits[1])} on, without a backward from {_flop(limits[0])}"
        notes(node).precision = replace(decided, why=f"{decided.why}; {why}")
        notes(node).fused = "the products of attention"
        changed = True
    return changed


def _flop(limit: int | None) -> str:
    return "no size" if limit is None else f"{limit / 1e6:.3g} MFLOP"
