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

So are halves by ``chunk`` and ``split``, and pairs of neighbours (GPT-J): ``stack((-x[..., 1::2], x[..., ::2]), -1)``,
flattened. The tables of cosines and sines are FP32, and would make the queries and keys FP32 by promotion, before they
are copied, turned and copied again. The kernel reads and writes them in their own dtype and computes in FP32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node, Proxy

from fxprec.kernels.launch.direct import Run
from fxprec.kernels.launch.observers import COMPILER, DUAL, SCRIPT, TRANSFORM, watcher
from fxprec.kernels.launch.operands import suits_loops
from fxprec.passes.graph.annotations import Op, argument, notes
from fxprec.passes.graph.fetched import attribute_of
from fxprec.passes.graph.leaves import is_served, leaf
from fxprec.passes.ops.aliases import alias_roots, written_roots

#: As a ``half``: pairs are neighbours, and not columns half of all apart.
NEIGHBOURS: Final = "neighbours"
_HALVES: Final = ("first", "second")


def rope(x: Any, cos: Any, sin: Any, half: int | str | None, compiled: bool = False) -> Any:
    """``x * cos + turned(x) * sin``, in FP32 for low x, in x's dtype.

    Args:
        x: (..., columns).
        cos, sin: an angle's for each column; of shapes that broadcast to x's.
        half: turned is ``cat((-x[..., half:], x[..., :half]), -1)``; None: the half that ``chunk`` takes;
            ``NEIGHBOURS``: ``stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)``.
        compiled: on a CPU as a C++ loop.
    """
    if isinstance(x, Proxy):
        return leaf(rope, x, cos, sin, half, *([compiled] if compiled else []))
    columns: int | str = (x.shape[-1] + 1) // 2 if half is None else half
    compiled = compiled and _is_looped(x, cos, sin)
    own = _tables(x, cos, sin, columns) if compiled or is_served(x) else None
    if own is not None:
        from fxprec.kernels.nn.rope import rope as kernel  # which loads Triton

        turned, tables = own
        result = kernel(turned, *tables, interleaved=columns == NEIGHBOURS, compiled=compiled)
        return result if turned is x else result.transpose(-3, -2)
    if isinstance(columns, str):
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-x[..., columns:], x[..., :columns]), dim=-1)
    result = x * cos + turned * sin
    return result.to(x.dtype) if result.dtype != x.dtype and x.dtype in (torch.float16, torch.bfloat16) else result


def run_for(x: Tensor, cos: Tensor, sin: Tensor, half: int | str | None) -> Run | None:
    """``rope`` as a loop, of tensors that lie like these, where nobody looks on; None where a gradient is wanted."""
    if torch.is_grad_enabled() and x.requires_grad:
        return None
    own = _tables(x, cos, sin, (x.shape[-1] + 1) // 2 if half is None else half)
    if own is None or not _is_looped(x, cos, sin):
        return None
    from fxprec.kernels.nn.rope import run_for as kernel  # which loads Triton

    return kernel(x, *own, interleaved=half == NEIGHBOURS)


def _is_looped(*tensors: Tensor) -> bool:
    """Not where somebody looks into the ops: our own have no rule for vmap and forward mode."""
    return watcher(COMPILER, SCRIPT, TRANSFORM, DUAL) is None and all(map(suits_loops, tensors))


def _tables(x: Tensor, cos: Tensor, sin: Tensor, half: int | str) -> tuple[Tensor, Sequence[Tensor]] | None:
    """(x as [B, H, T, D], (cos, sin) as [B, T, D]) where the kernel serves; None where it does not."""
    columns = x.shape[-1]
    fits = x.dim() == 4 and columns % 2 == 0 and half in (columns // 2, NEIGHBOURS)
    if not fits or cos.shape != sin.shape or not 2 <= cos.dim() <= 4 or cos.shape[-1] != columns:
        return None
    if cos.requires_grad or sin.requires_grad or cos.dtype != sin.dtype or cos.device != x.device:
        return None
    if cos.dim() == 2 and cos.shape[0] == x.shape[2]:
        return x, (cos, sin)
    four = [table[(None,) * (4 - table.dim())] for table in (cos, sin)]
    if four[0].shape[0] not in (1, x.shape[0]):
        return None
    for heads, turned in ((1, x), (2, x.transpose(1, 2))):
        if four[0].shape[heads] == 1 and four[0].shape[3 - heads] == turned.shape[2]:
            return turned, [table.squeeze(heads) for table in four]
    return None


def recognize_rotary(graph: Graph, compiled: bool = False) -> bool:
    """Replace rotary embeddings of a canonical graph by calls of ``rope``. True where there were any.

    Those stay whose tensors are written to, which might be between product and sum; and whose result is another dtype
    than x's was, as of float64 tables. With ``compiled`` also those whose tables are learned: no loop serves them.
    """
    found, roots, written = False, dict[Node, Node](), set[Node]()
    for node in [*graph.nodes]:
        if _is(node, "add") and len(node.args) == 2 and not node.kwargs:
            matched = _match(*node.args) or _match(*reversed(node.args))
            if matched is not None and not roots:
                roots = alias_roots(graph)
                written = written_roots(graph, roots)
            if matched is not None and _may_be_one(node, matched[:3], roots, written, compiled):
                products = node.all_input_nodes
                node.op, node.target = "call_function", rope
                node.args = (*matched, True) if compiled else matched
                notes(node).op = Op("rope")
                for product in products:
                    _erase(product)
                found = True
    return found


def _may_be_one(
    node: Node, tensors: Sequence[Node], roots: Mapping[Node, Node], written: set[Node], compiled: bool
) -> bool:
    x, *tables = tensors
    if any(roots.get(each) in written for each in tensors):
        return False
    before, after = x.meta.get("val"), node.meta.get("val")
    if isinstance(before, Tensor) and isinstance(after, Tensor) and before.dtype != after.dtype:
        return False
    return not (compiled and any(_is_learned(roots.get(table, table)) for table in tables))


def _is_learned(node: Node) -> bool:
    value = attribute_of(node) if node.op == "get_attr" else node.meta.get("val")
    return isinstance(value, Tensor) and value.requires_grad


def _erase(node: Node) -> None:
    """Erase a node that nobody reads any more, and what only it read."""
    if not node.users:
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        for source in sources:
            _erase(source)


def _match(plain: Any, turned: Any) -> tuple[Node, Node, Node, int | str | None] | None:
    """(x, cos, sin, half) of the two products."""
    if not (_product(plain) and _product(turned)):
        return None
    for rotated, sin in (turned.args, reversed(turned.args)):
        source = _rotated(rotated)
        if source is None or not isinstance(sin, Node):
            continue
        for x, cos in (plain.args, reversed(plain.args)):
            if x is source[0] and isinstance(cos, Node):
                return x, cos, sin, source[1]
    return None


def _rotated(node: Any) -> tuple[Node, int | str | None] | None:
    """(x, half) of an x whose pairs are turned by a quarter; see ``rope``."""
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
    """The two tensors that ``cat`` or ``stack`` join along the last dim."""
    if not _is(node, joined) or not isinstance(node.args[0], tuple | list) or len(node.args[0]) != 2:
        return None
    return node.args[0] if argument(node, 1, "dim", 0) == -1 else None


@dataclass(frozen=True)
class _Half:
    """Half of x's columns: the first or second, of which the first has so many (None: what ``chunk`` takes), or every
    other, "even" or "odd"."""

    x: Node
    which: str
    columns: int | None = None


def _half(node: Any) -> _Half | None:
    """Of ``x[..., :n]``, ``x[..., ::2]`` and the like, parts of ``chunk(x, 2, -1)`` and of ``split(x, (n, n), -1)``."""
    if not _is(node, "getitem"):
        return None
    source, index = node.args
    if index in (0, 1) and _is(source, "chunk"):
        fits = argument(source, 1, "chunks") == 2 and argument(source, 2, "dim", 0) == -1
        return _Half(source.args[0], _HALVES[index]) if fits else None
    if index in (0, 1) and _is(source, "split"):
        sizes = argument(source, 1, "split_size_or_sections", source.kwargs.get("split_size"))
        fits = isinstance(sizes, tuple | list) and len(sizes) == 2 and argument(source, 2, "dim", 0) == -1
        fits = fits and isinstance(sizes[0], int) and sizes[0] == sizes[1]
        return _Half(source.args[0], _HALVES[index], sizes[0]) if fits else None
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
