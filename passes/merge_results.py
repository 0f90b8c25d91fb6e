"""Let one node stand for each result of an op that gives several, however often and by whatever name it is read.

In the original program both reads are the very tensor. Two nodes would get casts of their own, and what is returned of
the one would not lie on the gradient's path of who reads the other (``keep_returned``)::

    %topk: (float32, int64) = topk(%h, 2)           %topk: (float32, int64) = topk(%h, 2)
    %a: float32 = getitem(%topk, 0)                 %a: float32 = getitem(%topk, 0)
    %b: float32 = sum(%a)                      ->   %b: float32 = sum(%a)
    %c: float32 = getattr(%topk, values)
    return (%b, %c)                                 return (%b, %a)

A part of a tensor, ``h[0]``, is a new tensor each time: that stays. Propagated dtypes tell the two apart.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.graph.annotations import NO_OP, annotated, notes
from fxprec.passes.ops.spellings import RESULT_FIELDS


@bodies_first
def merge_results(gm: GraphModule, context: Context) -> PassResult:
    """Merge equal accesses."""
    first: dict[tuple[Node, int | str], Node] = {}
    merged = False
    for node, noted in annotated(gm.graph):
        place = _place(node, noted.op.name)
        earlier = node if place is None else first.setdefault(place, node)
        if earlier is not node and not _may_change(earlier.args[0]):  # type: ignore[arg-type]
            node.replace_all_uses_with(earlier)
            gm.graph.erase_node(node)
            merged = True
    return PassResult(gm, merged)


def _place(node: Node, op: str) -> tuple[Node, int | str] | None:
    """Return the op and which of its results a node stands for; None: it stands for something else."""
    if op not in ("getitem", "getattr") or len(node.args) != 2:
        return None
    source, place = node.args
    if not isinstance(source, Node) or type(place) not in (int, str):
        return None
    dtypes = notes(source).dtype
    if not isinstance(dtypes, tuple):
        return None
    # ``found.values`` is ``found[0]`` of an op. Of what is no op, a named tuple may have such a field elsewhere.
    if isinstance(place, str) and notes(source).op is not NO_OP:
        place = RESULT_FIELDS.get(place, place)
    # One dtype may stand for a list of unknown length (``propagate``), of which nobody knows what -1 is.
    if isinstance(place, int) and place < 0 and len(dtypes) > 1:
        place += len(dtypes)
    return source, place  # type: ignore[return-value]


def _may_change(source: Node) -> bool:
    """Return whether the results may be a list that is written to (``found[0] = x``, ``found.append(x)``)."""
    return any(notes(user).op.in_place or user.op == "call_method" for user in source.users)
