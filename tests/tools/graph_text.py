"""Small graphs written as text, in the form that ``format_graph`` prints: for tests of one pass at a time."""

from __future__ import annotations

import ast
import operator
import re
import textwrap
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from fxprec.passes.graph.annotations import CASTABLE, NON_TENSOR, UNKNOWN, Op, Precision, Rule, notes
from fxprec.passes.graph.casts import cast

_LINE = re.compile(r"%(\w+)(?:: ([^=]+?))? = (\w+)(?:\((.*)\))?$")


def graph_of(text: str, casts: bool = True) -> GraphModule:
    """The graph, with annotations as after ``insert_casts``; ``casts=False``: as after ``decide``.

    The dtype of a line is that of the value now; in the original program castable ones were FP32. A call reads what
    arrives; before casts are in, its own dtype. ``to`` is a cast that a pass inserted where its node is named as one
    (``%x_bf16``), else the user's. A line without a dtype has no annotations but its op, as after ``canonicalize``.
    """
    graph = Graph()
    nodes: dict[str, Node] = {}
    for line in filter(None, map(str.strip, textwrap.dedent(text).splitlines())):
        if line.startswith("return "):
            graph.output(_arguments(f"_({line.removeprefix('return ')})", nodes)[0][0])
            continue
        match = _LINE.fullmatch(line)
        assert match is not None, f"no line of a graph: {line}"
        name, dtype, op, arguments = match.groups()
        nodes[name] = node = _node(graph, nodes, name, op, arguments)
        if dtype is not None:
            _annotate(node, dtype, casts)
    return GraphModule({}, graph)


def _node(graph: Graph, nodes: dict[str, Node], name: str, op: str, arguments: str | None) -> Node:
    if op == "placeholder":
        return graph.placeholder(name)
    args, kwargs = _arguments(f"_({arguments})", nodes)
    inserted = op == "to" and re.search(r"_(f32|bf16|f16)(_\d+)?$", name) is not None
    bare = op.removesuffix("_")
    if inserted:
        node = graph.create_node("call_function", cast, args, kwargs, name)
    elif op == "to" or bare != op or (not hasattr(torch, op) and not hasattr(F, op) and op != "getitem"):
        node = graph.create_node("call_method", op, args, kwargs, name)
    else:
        target: Any = operator.getitem if op == "getitem" else getattr(torch, op, None) or getattr(F, op)
        node = graph.create_node("call_function", target, args, kwargs, name)
    notes(node).op = Op(bare, in_place=bare != op)
    if inserted:
        notes(node).inserted = True
    return node


def _annotate(node: Node, text: str, casts: bool) -> None:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        notes(node).dtype = UNKNOWN if text == "unknown" else NON_TENSOR
        notes(node).precision = Precision.arriving(None, None, Rule.KEEP, "as written")
        return
    now = dtype if dtype in CASTABLE else None
    notes(node).dtype = torch.float32 if now else dtype
    arriving = (notes(source).precision.output for source in node.all_input_nodes)
    reads = next((each for each in arriving if each is not None), None)
    reads = now if reads is not None and not casts else reads
    if reads is None:
        notes(node).precision = Precision.arriving(None, now, Rule.KEEP, "as written")
    else:
        notes(node).precision = Precision(reads, now, now, Rule.FOLLOW, "as written")


def _arguments(call: str, nodes: dict[str, Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tree = ast.parse(call.replace("%", ""), mode="eval").body
    assert isinstance(tree, ast.Call)
    args = tuple(_value(each, nodes) for each in tree.args)
    return args, {str(each.arg): _value(each.value, nodes) for each in tree.keywords}


def _value(tree: ast.expr, nodes: dict[str, Node]) -> Any:
    match tree:
        case ast.Name(id="Ellipsis"):
            return ...
        case ast.Name(id=name):
            return nodes[name]
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return getattr(torch, name)
        case ast.Tuple(elts=parts):
            return tuple(_value(part, nodes) for part in parts)
        case ast.List(elts=parts):
            return [_value(part, nodes) for part in parts]
        case ast.Call(func=ast.Name(id="slice"), args=parts):
            return slice(*(_value(part, nodes) for part in parts))
        case _:
            return ast.literal_eval(tree)
