"""On a GPU what cuts a tensor into parts, or joins parts, becomes a call that moves them in wide words, both ways.

Before::

    %qkv: bfloat16 = permute(%view, 2, 0, 3, 1, 4)
    %unbind: bfloat16 = unbind(%qkv, 0)
    %q: bfloat16 = getitem(%unbind, 0)
    %cat: bfloat16 = cat((%x, %skip), dim=1)

After::

    %qkv: bfloat16 = permute(%view, 2, 0, 3, 1, 4)
    %unbind: bfloat16 = parts(%qkv, "unbind", 0)           # the same views, whose gradients are put together once
    %q: bfloat16 = getitem(%unbind, 0)
    %cat: bfloat16 = joined((%x, %skip), 1)

Why, and what they do: ``fxprec.kernels.nn.parts``. What is small at run time, or watched by a compiler or a mode, or
lies otherwise in memory, is torch's own op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxprec.kernels.launch.observers import ANY_MODE, COMPILER, DUAL, SCRIPT, TRANSFORM, watcher
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.graph.annotations import argument, notes
from fxprec.passes.graph.retrace import leaf, tracer_of

#: How each op cuts.
_CUTS: Final[dict[str, Callable[..., Any]]] = {"unbind": Tensor.unbind, "chunk": Tensor.chunk, "split": Tensor.split}
#: Arguments, as torch's function has them and as the method does.
_KEYWORDS: Final = {"split_size_or_sections": "split_size"}
#: Elements from which on a gradient's bytes take longer than the calls that move them.
_WORTH: Final = 1 << 20


def parts(x: Any, cut: str, *args: Any, **kwargs: Any) -> Any:
    """``x.unbind(...)``, ``x.chunk(...)`` or ``x.split(...)``, with gradients that are put together in x's layout."""
    if tracer_of(x) is not None:
        return leaf(parts, x, cut, *args, **kwargs)
    if x.numel() >= _WORTH and _is_taken(x):
        from fxprec.kernels.nn.parts import parts as kernel

        return kernel(x, lambda y: _CUTS[cut](y, *args, **kwargs))
    return _CUTS[cut](x, *args, **kwargs)


def joined(tensors: Any, dim: int = 0) -> Any:
    """``torch.cat(tensors, dim)``, with gradients that lie as the tensors do."""
    if tracer_of(tensors) is not None:
        return leaf(joined, tensors, dim)
    if len(tensors) > 1 and sum(x.numel() for x in tensors) >= _WORTH and all(map(_is_taken, tensors)):
        from fxprec.kernels.nn.parts import join, joins

        if joins(tensors, dim):
            return join(tensors, dim)
    return torch.cat(tensors, dim)


def _is_taken(x: Tensor) -> bool:
    plain = x.is_cuda and type(x) in (Tensor, nn.Parameter)
    return plain and watcher(COMPILER, SCRIPT, TRANSFORM, DUAL, ANY_MODE) is None


@bodies_first
def move_wide(gm: GraphModule, context: Context) -> PassResult:
    """Replace what cuts and what joins, on a GPU."""
    changed = False
    serves = context.device == "cuda" and (context.regions or context.native_mixed)
    for node in [*gm.graph.nodes] if serves else ():
        op = notes(node).op
        if op is None:
            continue
        if op.name in _CUTS and node.args and getattr(node.target, "__name__", node.target) == op.name:
            x, *rest = node.args  # not those of unsafe_chunk, which may be written
            kwargs = {_KEYWORDS.get(name, name): value for name, value in node.kwargs.items()}
            node.op, node.target, node.args, node.kwargs = "call_function", parts, (x, op.name, *rest), kwargs
            notes(node).fused = "one gradient of its parts"
            changed = True
        elif op.name == "cat" and node.op == "call_function":
            dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
            if isinstance(dim, int):
                node.target, node.args, node.kwargs = joined, (argument(node, 0, "tensors"), dim), {}
                notes(node).fused = "parts in wide words"
                changed = True
    return PassResult(gm, changed)
