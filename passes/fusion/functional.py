"""Makes in-place row operations on memory that nobody else sees ordinary ones, so that they can join a region.

Before, and after::

    %conv = conv2d(%x, %w)                 %conv = conv2d(%x, %w)
    %relu = relu_(%conv)                   %relu = relu(%conv)
    %add = add(%conv, 1)                   %add = add(%relu, 1)          # reads what was written

Only where the memory was made in this graph, by an op that gives fresh memory, and no view of it was taken before the
last write: then there is no way to see the difference.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fxprec.kernels.rows.program.lowering import LOWERINGS
from fxprec.passes.canonical.in_place import out_of_place
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.fusion.effects import segments
from fxprec.passes.fusion.row_operations import INTEGERS
from fxprec.passes.graph.annotations import NO_OP, notes
from fxprec.passes.graph.casts import cast
from fxprec.passes.insert_casts import actual_dtype
from fxprec.passes.ops.aliases import alias_roots, written_by
from fxprec.passes.ops.table import row_of


@bodies_first
def make_functional(gm: GraphModule, context: Context) -> PassResult:
    """Replace in-place row operations by functional ones where regions are formed and nobody can tell."""
    if not context.regions:
        return PassResult(gm, False)
    graph = gm.graph
    written = [(target, node) for node in graph.nodes for target in written_by(node)]
    roots = alias_roots(graph) if written else {}
    writes: dict[Node, list[Node]] = {}
    for target, node in written:
        writes.setdefault(roots[target], []).append(node)
    changed = False
    position = {node: number for number, node in enumerate(graph.nodes)}
    segment = segments(graph)
    for writers in writes.values():
        # All writes are to the memory that one node made, in one stretch of the graph that nothing unknown interrupts.
        last, root = writers[-1], _maker(writers[0])
        if any(_maker(node) is not root for node in writers) or segment[last] != segment[root]:
            continue
        if not _fresh(root) or notes(root).op.in_place or not all(map(_can_change, writers)):
            continue
        members = [root, *writers]
        early = {user for node in members for user in node.users if position[user] < position[last]}
        # A reader may keep a view of what it reads: it would see later writes.
        if not all(map(_fresh, early.difference(writers))):
            continue
        # Each write becomes a value of its own, which whoever came behind the write reads from now on.
        current = root
        for node in writers:
            _rewrite(node, current)
            for user in [*current.users]:
                if user is not node and position[user] > position[node]:
                    user.replace_input_with(current, node)
            current = node
        changed = True
    return PassResult(gm, changed)


def _maker(writer: Node) -> Node:
    """Return the node that made the memory that a node writes to: each write goes to the result of the one before."""
    target = writer
    while notes(target).op.in_place and isinstance(target.args[0], Node):
        target = target.args[0]
    return target


def _fresh(node: Node) -> bool:
    """Return whether the result is memory of its own: of an op that we know, and no view or tuple of views."""
    row = row_of(notes(node).op.name)
    return row is not None and (not row.view or _converts(node))


def _converts(node: Node) -> bool:
    """Return whether it is a cast of ours to another dtype: always a copy."""
    return node.target is cast and actual_dtype(node.all_input_nodes[0]) not in (None, actual_dtype(node))


def _can_change(node: Node) -> bool:
    """Return whether this is an in-place row operation whose result has the dtype of what it writes to."""
    op = notes(node).op
    if op is NO_OP or not op.in_place or op.name not in LOWERINGS:
        return False
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or actual_dtype(node) is not actual_dtype(source):
        return False
    for other in node.all_input_nodes:
        # An integer takes the dtype of the float that it meets.
        converted = actual_dtype(source) is not None and notes(other).dtype in INTEGERS
        if actual_dtype(other) is not actual_dtype(source) and not converted:
            return False  # out of place it would promote
    return out_of_place(node) is not None


def _rewrite(node: Node, source: Node) -> None:
    twin = out_of_place(node)
    assert twin is not None
    node.target, node.args, node.kwargs = twin
    node.update_arg(0, source)
    notes(node).op = notes(node).op._replace(in_place=False)
