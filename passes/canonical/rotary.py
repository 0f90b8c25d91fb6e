"""Recognize rotary position embeddings as the one operation that they are: a kernel of their own serves it.

Before, as Llama and its kin write it::

    %x1 = getitem(%q, (..., slice(None, 32)))
    %x2 = getitem(%q, (..., slice(32, None)))
    %neg = neg(%x2)
    %half = cat((%neg, %x1), dim=-1)
    %a = mul(%q, %cos)
    %b = mul(%half, %sin)
    %out = add(%a, %b)

After::

    %out = rope(%q, %cos, %sin, 32)

The tables of cosines and sines are FP32, and would make the queries and keys FP32 by promotion, before they are copied,
turned and copied again. The kernel reads and writes them in their own dtype and computes in FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node, Proxy

from fxprec.passes.graph.annotations import Op, argument, notes
from fxprec.passes.graph.leaves import is_served, leaf


def rope(x: Any, cos: Any, sin: Any, half: int) -> Any:
    """``x * cos + cat((-x[..., half:], x[..., :half]), -1) * sin``, in FP32 for low x, in x's dtype."""
    if isinstance(x, Proxy):
        return leaf(rope, x, cos, sin, half)
    own = _tables(x, cos, sin, half)
    if own is not None:
        from fxprec.kernels.nn.rope import rope as kernel  # which loads Triton

        turned, tables = own
        result = kernel(turned, *tables)
        return result if turned is x else result.transpose(-3, -2)
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    result = x * cos + turned * sin
    return result.to(x.dtype) if result.dtype != x.dtype and x.dtype in (torch.float16, torch.bfloat16) else result


def _tables(x: Any, cos: Any, sin: Any, half: int) -> tuple[Any, tuple[Any, Any]] | None:
    """(x as [B, H, T, D], (cos, sin) as [B, T, D]) where the kernel serves; None where it does not."""
    fits = x.dim() == 4 and x.shape[-1] == 2 * half and cos.shape == sin.shape and cos.dim() == 4
    if not fits or cos.requires_grad or sin.requires_grad or cos.shape[-1] != x.shape[-1] or not is_served(x):
        return None
    if cos.dtype != sin.dtype or cos.device != x.device or cos.shape[0] not in (1, x.shape[0]):
        return None
    for heads, turned in ((1, x), (2, x.transpose(1, 2))):
        if cos.shape[heads] == 1 and cos.shape[3 - heads] == turned.shape[2]:
            return turned, (cos.squeeze(heads), sin.squeeze(heads))
    return None


def recognize_rotary(graph: Graph) -> bool:
    """Replace every rotary embedding of a canonical graph by one call of ``rope``. True where there were any."""
    found = False
    for node in [*graph.nodes]:
        if _is(node, "add") and len(node.args) == 2 and not node.kwargs:
            matched = _match(*node.args) or _match(*reversed(node.args))
            if matched is not None:
                products = node.all_input_nodes
                node.op, node.target, node.args = "call_function", rope, matched
                notes(node).op = Op("rope")
                for product in products:
                    _erase(product)
                found = True
    return found


def _erase(node: Node) -> None:
    """Erase a node that nobody reads any more, and what only it read."""
    if not node.users:
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        for source in sources:
            _erase(source)


def _match(plain: Any, turned: Any) -> tuple[Node, Node, Node, int] | None:
    """(x, cos, sin, half) of the two products."""
    if not (_product(plain) and _product(turned)):
        return None
    for half, sin in (turned.args, reversed(turned.args)):
        source = _rotated(half)
        if source is None or not isinstance(sin, Node):
            continue
        for x, cos in (plain.args, reversed(plain.args)):
            if x is source[0] and isinstance(cos, Node):
                return x, cos, sin, source[1]
    return None


def _rotated(node: Any) -> tuple[Node, int] | None:
    """(x, n) of ``cat((-x[..., n:], x[..., :n]), dim=-1)``."""
    if not _is(node, "cat") or not isinstance(node.args[0], tuple | list) or len(node.args[0]) != 2:
        return None
    if argument(node, 1, "dim", 0) != -1:
        return None
    negative, first = node.args[0]
    if not (_is(negative, "neg") and _is(first, "getitem") and _is(negative.args[0], "getitem")):
        return None
    second = negative.args[0]
    (x, low), (same, high) = first.args, second.args
    if x is not same or not (_slice(low) and _slice(high)):
        return None
    low, high = low[1], high[1]
    fits = low.start is None and high.stop is None and low.stop == high.start and isinstance(low.stop, int)
    return (x, low.stop) if fits and low.stop > 0 else None


def _slice(index: Any) -> bool:
    """``[..., a:b]``"""
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis:
        return False
    return isinstance(index[1], slice) and index[1].step is None


def _product(node: Any) -> bool:
    return _is(node, "mul") and len(node.args) == 2 and not node.kwargs and all(isinstance(a, Node) for a in node.args)


def _is(node: Any, name: str) -> bool:
    op = notes(node).op if isinstance(node, Node) else None
    return op == Op(name)
