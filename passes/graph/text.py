"""The one-line-a-node text form of a graph, as the snapshot tests and docstrings write it."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxprec.passes.graph.annotations import NO_OP, notes


def dtype_name(dtype: object) -> str:
    """Return ``float16`` for ``torch.float16``; specials and None by their own short names."""
    if dtype is None:
        return "-"
    if isinstance(dtype, tuple):
        return "(" + ", ".join(dtype_name(element) for element in dtype) + ")"
    return str(dtype).removeprefix("torch.")


def format_graph(gm: GraphModule) -> str:
    """Write a graph as text, one line a node: name, dtype and call, as the snapshot tests and docstrings have it.

    ::

        %linear: bfloat16 = linear(%x_low, %weight_low, %bias_low)
    """
    return "\n".join(_line(node) for node in gm.graph.nodes)


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    if node.op in ("placeholder", "get_attr"):
        call = f"{node.op}[{node.target}]" if node.op == "get_attr" else "placeholder"
        return f"%{node.name}: {shown_dtype(node)} = {call}"
    op = notes(node).op
    name = op.name + "_" * op.in_place if op is not NO_OP else getattr(node.target, "__name__", str(node.target))
    parts = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    return f"%{node.name}: {shown_dtype(node)} = {name}({', '.join(parts)})"


def shown_dtype(node: Node) -> str:
    """Return the dtype a node's value has in the rewritten graph; of a region with several results, all of theirs."""
    annotations = notes(node)
    if annotations.state("puts_out"):
        return dtype_name(annotations.puts_out)
    return dtype_name(annotations.precision.output or annotations.dtype)


def _text(argument: object) -> str:
    if isinstance(argument, Node):
        return f"%{argument.name}"
    if isinstance(argument, tuple | list):
        inner = ", ".join(_text(a) for a in argument)
        return f"({inner})" if isinstance(argument, tuple) else f"[{inner}]"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in argument.items()) + "}"
    if isinstance(argument, torch.dtype):
        return str(argument)
    return repr(argument)
