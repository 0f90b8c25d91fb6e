"""Graphs that stay as torch.autocast runs them: those with a ``torch.autograd.Function`` that goes by low dtypes.

::

    class Product(torch.autograd.Function):              x: bfloat16 and w: float32 under autocast
        def forward(ctx, x, w): ...
        def backward(ctx, g):
            return g.to(w.dtype) @ w, g.to(x.dtype).t() @ x     # in the graph: g.to(torch.bfloat16)

dynamo writes the dtypes that such a function asks for into its forward and backward. No pass looks into these, and
they get FP32: in a product, whose operands must agree, constants of the low dtype would meet it.
"""

from __future__ import annotations

import re
from typing import Final

import torch
from torch.fx import GraphModule, Node

from fxprec.capture.dynamo.place import place
from fxprec.passes.canonicalize import every_graph, subgraph_of
from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.names import canonical_op
from fxprec.passes.ops.table import rule_of

_FRAME: Final = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


def function_of_low_dtypes(gm: GraphModule, low: torch.dtype) -> tuple[str, str] | None:
    """Where a graph, as dynamo made it, calls such a function, and why it is left as it is; None where it does not."""
    for graph in every_graph(gm):
        for node in graph.graph.nodes:
            if getattr(node.target, "__name__", "") == "autograd_function_apply" and _names(graph, node, low):
                name = str(low).removeprefix("torch.")
                return _place(node), f"a torch.autograd.Function that casts to {name}, or asks what is {name}"
    return None


def _names(gm: GraphModule, call: Node, low: torch.dtype) -> bool:
    """Whether a body of the call names the low dtype, and has a product."""
    for body in filter(None, [subgraph_of(gm, source) for source in call.all_input_nodes]):
        nodes = [node for graph in every_graph(body) for node in graph.graph.nodes]
        named = any(low in (*node.args, *node.kwargs.values()) for node in nodes)
        if named and any(map(_is_product, nodes)):
            return True
    return False


def _is_product(node: Node) -> bool:
    op = canonical_op(node)
    row = rule_of(op.name) if op is not None else None
    return row is not None and row.rule is Rule.LOW


def _place(node: Node) -> str:
    """``model.py:12 in forward``."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return place(*frames[-1]) if frames else "?"
