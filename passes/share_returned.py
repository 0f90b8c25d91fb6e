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

Left alone are memory that the graph writes to, and views in another grad mode than what is returned. Two views of a
value that is not returned itself stay two tensors.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context, PassResult, bodies_last
from fxprec.passes.graph.annotations import Arrival, nested, notes
from fxprec.passes.graph.grad_mode import grad_mode_at_nodes, returned_values
from fxprec.passes.keep_returned import widened
from fxprec.passes.ops.aliases import written_memory
from fxprec.passes.ops.table import facts_at


@bodies_last
def share_returned(gm: GraphModule, context: Context) -> PassResult:
    """Replace the casts of returned views by views of the casts of what they are views of."""
    casts = {wide: source for wide in returned_values(gm.graph) if (source := widened(wide)) is not None}
    found = _views(casts) if len(casts) > 1 else []
    if not found or context.policy.level == "O0":
        return PassResult(gm, False)
    recorded = grad_mode_at_nodes(gm.graph, context.gradients)
    roots, written = written_memory(gm.graph)
    now: dict[Node, Node] = {}  # what became of a cast that others are views of
    for wide, views, base in found:
        alike = len({recorded[node] for node in (wide, *views, base)}) == 1
        if alike and roots[base] not in written:
            now[wide] = _view_of(now.get(base, base), views, wide)
    return PassResult(gm, bool(now))


def _views(casts: dict[Node, Node]) -> list[tuple[Node, list[Node], Node]]:
    """Find each returned cast of a view, the views that lead to it from another returned cast, and that one."""
    returned_as = {source: wide for wide, source in casts.items()}
    for wide in casts:  # readers of what is returned read it through a cast back (``keep_returned``)
        returned_as |= {user: wide for user in wide.users if notes(user).returns}
    found = []
    for wide, source in casts.items():
        views: list[Node] = []
        node: Node | None = source
        while node is not None and (not views or node not in returned_as):
            views.insert(0, node)
            node = _viewed(node)
        if node is not None:
            found.append((wide, views, returned_as[node]))
    return found


def _viewed(node: Node) -> Node | None:
    """Return what a node gives a view of; None where it may be anything else."""
    facts = facts_at(node)
    if not facts.view or notes(node).op.in_place or notes(node).op.name == "to" or len(node.all_input_nodes) != 1:
        return None
    return node.all_input_nodes[0]


def _view_of(base: Node, views: list[Node], wide: Node) -> Node:
    """Put views of ``base`` in the place of the cast ``wide`` of the last of ``views``; return the last of them."""
    graph = wide.graph
    if wide < base:  # which is a cast still: others are where the cast was that they replaced
        base.all_input_nodes[0].append(base)
    read = views[0].all_input_nodes[0]
    now = {read: base}
    for view in views:
        with graph.inserting_before(wide):
            new = now[view] = graph.node_copy(view, now.__getitem__)
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
