"""Take a returned view of another returned value from that value as it is returned.

In the original program the two share memory: who writes to a returned ``h`` writes to a returned ``h[:, 0]``. Casts of
both would be two tensors.

Before::

    %linear: bfloat16 = linear(%x_bf16, %w_bf16)
    %getitem: bfloat16 = getitem(%linear, 0)
    %linear_f32: float32 = cast(%linear, torch.float32)
    %getitem_f32: float32 = cast(%getitem, torch.float32)
    return (%linear_f32, %getitem_f32)

After::

    %linear: bfloat16 = linear(%x_bf16, %w_bf16)
    %linear_f32: float32 = cast(%linear, torch.float32)
    %getitem_1: float32 = getitem(%linear_f32, 0)
    return (%linear_f32, %getitem_1)

Two views of a value that is not returned itself (``h[0]`` and ``h[:2]``) are views of a cast of it, unless they are
different parts: different numbers of one dimension, or of what a ``chunk`` gives. Left alone are memory that the graph
writes to, and views in another grad mode than what is returned.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import combinations

import torch
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context, PassResult, bodies_last
from fxprec.passes.graph.annotations import Arrival, Special, nested, notes, tensors_of
from fxprec.passes.graph.grad_mode import exposed_values, grad_mode_at_nodes
from fxprec.passes.insert_casts import cast_behind
from fxprec.passes.keep_returned import widened
from fxprec.passes.ops.aliases import written_memory
from fxprec.passes.ops.names import is_idle_dropout
from fxprec.passes.ops.table import facts_at


@bodies_last
def share_returned(gm: GraphModule, context: Context) -> PassResult:
    """Replace the casts of returned views by views of the casts of what they are views of."""
    returned = exposed_values(gm.graph)
    casts = {wide: source for wide in returned if (source := widened(wide)) is not None}
    chains = {wide: _chain(source) for wide, source in casts.items()}
    if len(returned) < 2 or context.policy.level == "O0" or not any(len(chain) > 1 for chain in chains.values()):
        return PassResult(gm, False)
    recorded = grad_mode_at_nodes(gm.graph, context.gradients)
    roots, written = written_memory(gm.graph)

    def may_share(views: list[Node]) -> bool:
        return len({recorded[node] for node in views}) == 1 and roots[views[0]] not in written

    # Low value -> the FP32 node that stands for it among the results:
    # 1. a returned value -> its cast;
    returned_as = {source: wide for wide, source in casts.items()}
    # 2. a cast back, by which others read what is returned (``keep_returned``) -> the returned cast that it reads;
    for wide in casts:
        returned_as |= {user: wide for user in wide.users if notes(user).returns}
    # 3. where a result is an FP32 view of a cast of ours: what that casts -> the cast;
    for wide in (_chain(value)[-1] for value in returned if value not in casts):
        if notes(wide).inserted and (source := widened(wide)) is not None:
            returned_as.setdefault(source, wide)
    # 4. a value that is not returned itself, but by several views that may overlap -> a new cast.
    for base in _common_bases(chains, returned_as):
        if all(may_share([wide, *chain]) for wide, chain in chains.items() if base in chain):
            returned_as[base] = new = cast_behind(base, recorded, "views of it are returned")
            recorded[new] = recorded[base]
    now: dict[Node, Node] = {}  # what became of a cast that others are views of
    for wide, chain in chains.items():
        # The nearest of what it is a view of that is returned, too.
        above = next((number for number, node in enumerate(chain) if number and node in returned_as), None)
        base = None if above is None else returned_as[chain[above]]
        if base is not None and may_share([wide, *chain[:above], base]):
            now[wide] = _view_of(now.get(base, base), chain[:above][::-1], wide)
    return PassResult(gm, bool(now))


def _chain(source: Node) -> list[Node]:
    """Return a value and what it is a view of, the nearest first."""
    chain = [source]
    while (node := _viewed(chain[-1])) is not None:
        chain.append(node)
    return chain


def _common_bases(chains: Mapping[Node, list[Node]], returned: Container[Node]) -> list[Node]:
    """Find values that are not returned themselves, but several views that may have elements in common."""
    by_root: dict[Node, list[list[Node]]] = {}
    for chain in chains.values():
        by_root.setdefault(chain[-1], []).append(chain)
    found: dict[Node, None] = {}
    for one, other in (pair for alike in by_root.values() for pair in combinations(alike, 2)):
        base = next(node for node in one if node in other)
        parts = [chain[chain.index(base) - 1] for chain in (one, other) if chain[0] is not base]
        shown = any(node in returned for chain in (one, other) for node in chain[1:])
        if len(parts) == 2 and not shown and isinstance(notes(base).dtype, torch.dtype | Special):
            if not are_apart(*parts):
                found[base] = None
    return list(found)


def are_apart(one: Node, other: Node) -> bool:
    """Return whether two views of a value are known to have no element in common: ``h[:, 0]`` and ``h[:, 1:]``."""
    names, nodes = {notes(one).op.name, notes(other).op.name}, (one, other)
    if names == {"getitem"}:
        indices = [node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],) for node in nodes]
    elif names == {"select"} and one.args[:2] == other.args[:2]:
        indices = [node.args[2:] for node in nodes]
    else:
        return False
    for a, b in zip(*indices, strict=False):
        if not isinstance(a, int | slice) or not isinstance(b, int | slice):
            return False  # None and ... move what comes behind them
        if _ends_before(a, b) or _ends_before(b, a):
            return True
    return False


def _ends_before(one: int | slice, other: int | slice) -> bool:
    """Return whether all places of the one come before those of the other, as far as numbers from one end tell."""
    stop = one.stop if isinstance(one, slice) else one + 1 or None  # -1 ends at the end, which a slice writes as None
    start = (other.start or 0) if isinstance(other, slice) else other
    return type(stop) is int and type(start) is int and (stop < 0) is (start < 0) and stop <= start


def _viewed(node: Node) -> Node | None:
    """Return what a node gives a view of; None where it may be anything else."""
    facts = facts_at(node)
    if not facts.view or notes(node).op.in_place or notes(node).op.name == "to" or len(tensors_of(node)) != 1:
        return None
    if facts.random and not is_idle_dropout(node):  # a second one would draw other numbers
        return None
    return tensors_of(node)[0]


def _view_of(base: Node, views: list[Node], wide: Node) -> Node:
    """Put views of ``base`` in the place of the cast ``wide`` of the last of ``views``; return the last of them."""
    graph = wide.graph
    # The views are made where ``wide`` stands, so a base that stands behind it moves up, to what it casts. Only a cast
    # does: a base that has become a view itself stands where its cast stood. That was before ``wide``: casts of results
    # stand in the order of the results, and those that ``keep_returned`` moved right behind their low values.
    if wide < base:
        base.all_input_nodes[0].append(base)
    read = tensors_of(views[0])[0]
    now = {read: base}
    for view in views:
        with graph.inserting_before(wide):
            new = now[view] = graph.node_copy(view, lambda each: now.get(each, each))
        annotations = notes(new)
        annotations.precision = notes(view).precision._replace(
            reads=Arrival.AS_IT_ARRIVES,
            compute=torch.float32,
            output=torch.float32,
            why=f"a view of {base.name}, which is returned",
        )
        if "val" in new.meta:
            new.meta["val"] = nested(new.meta["val"], lambda value: value.to(torch.float32))
    wide.replace_all_uses_with(now[views[-1]])
    graph.erase_node(wide)
    for low in (*reversed(views), read):
        if not low.users:
            graph.erase_node(low)
    return now[views[-1]]
