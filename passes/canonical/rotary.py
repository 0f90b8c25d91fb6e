"""Recognizes rotary position embeddings as the one operation that they are: a kernel of their own serves it.

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

So are halves by ``chunk`` and ``split``, and pairs of neighbours (GPT-J): ``stack((-x[..., 1::2], x[..., ::2]), -1)``,
flattened. The tables of cosines and sines are FP32, and would make the queries and keys FP32 by promotion, before they
are copied, turned and copied again. The kernel reads and writes them in their own dtype and computes in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxprec.kernels.calls.rope import NEIGHBOURS, rope
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.graph.annotations import Op, argument, notes
from fxprec.passes.graph.patterns import Pattern, WholeGraph, rewrite_matches
from fxprec.passes.graph.subgraphs import attribute_of


@bodies_first
def recognize_rotary(gm: GraphModule, context: Context) -> PassResult:
    """Replace rotary embeddings of a canonical graph by calls of ``rope``, where regions run as kernels."""
    return rewrite_matches(gm, context, _PATTERNS if context.regions in ("triton", "loops") else ())


class _Rotary(NamedTuple):
    """Rotary embedding: x, its tables and its ``half``, as ``rope`` takes them.

    ``half``: how many columns the first half has, of which the second takes the rest; None: half of them, rounded up,
    as ``chunk`` cuts; ``NEIGHBOURS``: the halves are the even columns and the odd ones.
    """

    x: Node
    cos: Node
    sin: Node
    half: int | str | None


def _rotary(node: Node, around: WholeGraph) -> tuple[Any, ...] | None:
    """Match the sum of an embedding; return the arguments of ``rope``.

    Left alone are embeddings whose tensors the graph writes to, perhaps between product and sum; those whose result has
    another dtype than x, as with float64 tables; and where regions are loops those with learned tables, which no loop
    serves.
    """
    if not _is(node, "add") or len(node.args) != 2 or node.kwargs:
        return None
    found = _match(*node.args) or _match(*reversed(node.args))
    if found is None or any(map(around.is_written, found[:3])):
        return None
    before, after = found.x.meta.get("val"), node.meta.get("val")
    if isinstance(before, Tensor) and isinstance(after, Tensor) and before.dtype != after.dtype:
        return None
    values = [_value(around.roots.get(table, table)) for table in (found.cos, found.sin)]
    known = [value for value in values if isinstance(value, Tensor)]
    looped = around.context.regions == "loops"
    if any(value.dtype is torch.float64 or (looped and value.requires_grad) for value in known):
        return None
    return (*found, True) if looped else found


def _call_rope(node: Node, arguments: tuple[Any, ...]) -> None:
    products = node.all_input_nodes
    node.op, node.target, node.args = "call_function", rope, arguments
    notes(node).op = Op("rope")
    for product in products:
        _erase(product)


_PATTERNS: Final = (Pattern(("add",), _rotary, _call_rope),)


def _value(node: Node) -> Any:
    """Return the tensor of a table where it is known: a buffer or parameter, or a fake one."""
    return attribute_of(node) if node.op == "get_attr" else node.meta.get("val")


def _erase(node: Node) -> None:
    """Erase a node that nobody reads any more, and what only it read."""
    if not node.users:
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        for source in sources:
            _erase(source)


def _match(plain: Any, turned: Any) -> _Rotary | None:
    """Match the two products of an embedding: of x, and of x turned by a quarter."""
    if not (_product(plain) and _product(turned)):
        return None
    for rotated, sin in (turned.args, reversed(turned.args)):
        source = _rotated(rotated)
        if source is None or not isinstance(sin, Node):
            continue
        for x, cos in (plain.args, reversed(plain.args)):
            if x is source[0] and isinstance(cos, Node):
                return _Rotary(x, cos, sin, source[1])
    return None


def _rotated(node: Any) -> tuple[Node, int | str | None] | None:
    """Return x and its ``half`` where the pairs of x are turned by a quarter; see ``rope``."""
    if _is(node, "flatten") and argument(node, 1, "start_dim", 0) == -2 and argument(node, 2, "end_dim", -1) == -1:
        parts, neighbours = _parts(node.args[0], "stack"), True
    else:
        parts, neighbours = _parts(node, "cat"), False
    if parts is None or not _is(parts[0], "neg"):
        return None
    second, first = (_half(part) for part in (parts[0].args[0], parts[1]))
    if first is None or second is None or (first.x, first.columns) != (second.x, second.columns):
        return None
    if neighbours:
        return (first.x, NEIGHBOURS) if (first.which, second.which) == ("even", "odd") else None
    return (first.x, first.columns) if (first.which, second.which) == ("first", "second") else None


def _parts(node: Any, joined: str) -> Sequence[Any] | None:
    """Return the two tensors that ``cat`` or ``stack`` join along the last dim."""
    if not _is(node, joined) or not isinstance(node.args[0], tuple | list) or len(node.args[0]) != 2:
        return None
    return node.args[0] if argument(node, 1, "dim", 0) == -1 else None


@dataclass(frozen=True)
class _Half:
    """Half of x's columns: "first" or "second", or every other, "even" or "odd".

    ``columns``: how many the first has; None: what ``chunk`` takes.
    """

    x: Node
    which: str
    columns: int | None = None


def _half(node: Any) -> _Half | None:
    """Match half of a tensor: ``x[..., :n]``, ``x[..., ::2]``, a part of ``chunk(x, 2, -1)`` or ``split``."""
    if not _is(node, "getitem"):
        return None
    source, index = node.args
    if index in (0, 1) and _is(source, "chunk"):
        fits = argument(source, 1, "chunks") == 2 and argument(source, 2, "dim", 0) == -1
        return _Half(source.args[0], ("first", "second")[index]) if fits else None
    if index in (0, 1) and _is(source, "split"):
        sizes = argument(source, 1, "split_size_or_sections", source.kwargs.get("split_size"))
        fits = isinstance(sizes, tuple | list) and len(sizes) == 2 and argument(source, 2, "dim", 0) == -1
        fits = fits and isinstance(sizes[0], int) and sizes[0] == sizes[1]
        return _Half(source.args[0], ("first", "second")[index], sizes[0]) if fits else None
    if not (isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice)):
        return None
    start, stop, step = index[1].start, index[1].stop, index[1].step
    if stop is None and step == 2 and start in (None, 0, 1):
        return _Half(source, "odd" if start else "even")
    if step is None and start is None and isinstance(stop, int) and stop > 0:
        return _Half(source, "first", stop)
    return _Half(source, "second", start) if step is stop is None and isinstance(start, int) and start > 0 else None


def _product(node: Any) -> bool:
    return _is(node, "mul") and len(node.args) == 2 and not node.kwargs and all(isinstance(a, Node) for a in node.args)


def _is(node: Any, name: str) -> bool:
    op = notes(node).op if isinstance(node, Node) else None
    return op == Op(name)
