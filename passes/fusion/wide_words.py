"""Replaces, on a GPU, what would move memory value by value by calls that move 16 bytes at once, both ways.

Before::

    %logits: bfloat16 = linear(%x, %weight_low)              # 50257 classes
    %qkv: bfloat16 = permute(%view, 2, 0, 3, 1, 4)
    %unbind: bfloat16 = unbind(%qkv, 0)
    %q: bfloat16 = getitem(%unbind, 0)
    %cat: bfloat16 = cat((%x, %skip), dim=1)

After::

    %logits: bfloat16 = aligned_linear(%x, %weight_low)      # the same values, of 50264 classes
    %qkv: bfloat16 = permute(%view, 2, 0, 3, 1, 4)
    %unbind: bfloat16 = parts(%qkv, "unbind", 0)             # the same views, whose gradients are put together once
    %q: bfloat16 = getitem(%unbind, 0)
    %cat: bfloat16 = joined((%x, %skip), 1)

Low linears whose outputs are no whole 16 bytes take a slow kernel; what cuts a tensor into parts, or joins parts, is
torch's op value by value (``fxprec.kernels.nn.aligned_linear``, ``parts``). What is small at run time, or watched by a
compiler or a mode, or lies otherwise in memory, is torch's own op. It comes behind ``fuse``: a bias may have left its
linear for a region.
"""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F
from torch.fx import GraphModule, Node

from fxprec.kernels.calls.aligned_linear import aligned_linear
from fxprec.kernels.calls.cross_entropy import cross_entropy
from fxprec.kernels.calls.parts import CUTS, joined, parts
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.fusion.kernel_calls import weight_sizes
from fxprec.passes.graph.annotations import argument, leaves, notes
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.patterns import MATCH, Pattern, WholeGraph, rewrite_matches

#: Elements of 16 bits in 16 bytes.
_VECTOR: Final = 8


@bodies_first
def move_wide(gm: GraphModule, context: Context) -> PassResult:
    """Replace linears with odd numbers of outputs, and what cuts and joins."""
    serves = context.device == "cuda" and (context.regions or context.native_mixed)
    return rewrite_matches(gm, context, _PATTERNS if serves else ())


def _odd_outputs(node: Node, around: WholeGraph) -> int | None:
    """Match a low linear whose weight has a number of rows that is no multiple of 8; return that number."""
    sizes = weight_sizes(node) if node.target is F.linear else None
    if notes(node).precision.compute is not around.context.low or sizes is None or len(sizes) != 2:
        return None
    return sizes[0] if sizes[0] % _VECTOR else None


def _align(node: Node, outputs: int) -> None:
    node.target = aligned_linear
    node.kwargs = {**node.kwargs, "apart": all(_takes_padded_rows(user, outputs) for user in node.users)}
    notes(node).fused = f"a product of {-(-outputs // _VECTOR) * _VECTOR} outputs"


def _takes_padded_rows(reader: Node, columns: int) -> bool:
    """Return whether a reader can take rows that lie ``apart``, with a stride above their length of ``columns``.

    Casts, losses and regions can, and views of whole rows if their readers can. A view that cuts rows would fail.
    """
    name = notes(reader).op.name
    if reader.target in CASTS or reader.target in (cross_entropy, F.cross_entropy) or name == "fused_region":
        return True
    if name == "flatten" or (name == "view" and leaves(reader.args)[-1] == columns):
        return all(_takes_padded_rows(each, columns) for each in reader.users)
    return False


def _cut(node: Node, around: WholeGraph) -> object | None:
    """Match what cuts a tensor, by the op of that very name.

    Not ``unsafe_chunk``, which has the same canonical op: its parts may be written to.
    """
    return MATCH if node.args and getattr(node.target, "__name__", node.target) == notes(node).op.name else None


def _call_parts(node: Node, _: object) -> None:
    x, *rest = node.args
    # The function calls the sizes of parts by another name than the method does, which is what runs.
    names = {"split_size_or_sections": "split_size"}
    kwargs = {names.get(name, name): value for name, value in node.kwargs.items()}
    node.op, node.target, node.args, node.kwargs = "call_function", parts, (x, notes(node).op.name, *rest), kwargs
    notes(node).fused = "one gradient of its parts"


def _cat(node: Node, around: WholeGraph) -> int | None:
    """Match what joins tensors along a known dimension; return that."""
    dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
    return dim if node.op == "call_function" and isinstance(dim, int) else None


def _call_joined(node: Node, dim: int) -> None:
    node.target, node.args, node.kwargs = joined, (argument(node, 0, "tensors"), dim), {}
    notes(node).fused = "parts in wide words"


_PATTERNS: Final = (
    Pattern(("linear",), _odd_outputs, _align),
    Pattern(tuple(CUTS), _cut, _call_parts),
    Pattern(("cat",), _cat, _call_joined),
)
