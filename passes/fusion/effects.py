"""Find the order that nodes must keep though no argument says so.

It holds for writes to memory and their readers, random numbers, and unknown calls.

A pass that moves nodes asks here first::

    %a = add(%x, 1)
    %r = rand_like(%a)
    %_ = add_(%b, 1)           # writes %b
    %v = view(%b, -1)          # reads it: stays after the write
    %s = rand_like(%a)         # stays after %r, for the same numbers from the same seed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node

from fxprec.errors import InvariantError
from fxprec.passes.fusion.row_operations import is_row_operation
from fxprec.passes.graph.annotations import NO_OP, notes
from fxprec.passes.ops.aliases import written_memory
from fxprec.passes.ops.table import row_of


def memory_of(graph: Graph) -> tuple[dict[Node, Node], set[Node]]:
    """Return node -> the first node of its memory, and those first nodes whose memory is written to.

    Arguments may be views of each other: where one of them is written to, all count as one memory.
    """
    roots, written = written_memory(graph)
    arguments = graph.find_nodes(op="placeholder")
    if not written.isdisjoint(arguments):
        roots = {node: arguments[0] if root.op == "placeholder" else root for node, root in roots.items()}
        written = written.difference(arguments) | {arguments[0]}
    return roots, written


def segments(graph: Graph) -> dict[Node, int]:
    """Map each node to the number of its segment, a part of the graph between two calls of what is no known op.

    Such a call may write to any memory, or switch a mode (``torch._C._set_grad_enabled``, by which dynamo writes
    ``torch.no_grad``): nothing may be moved across.
    """
    found, count = {}, 0
    for node in graph.nodes:
        count += node.op.startswith("call") and notes(node).op is NO_OP
        found[node] = count
    return found


def order_of_effects(graph: Graph) -> dict[Node, list[Node]]:
    """Map nodes to those that must stay before them though they do not read them.

    Row operations need none. A dropout is one: fused, it draws seeds of its own; unfused, it stays where it was among
    the other random draws unless it reads what moved (``sort``).
    """
    roots, written = memory_of(graph)
    # What touches written memory, or has effects, waits for the last node before it that did: so all are in a chain.
    last: dict[Any, Node] = {}
    order: dict[Node, list[Node]] = {}
    for node in [*graph.nodes]:
        touched: list[Any] = [*dict.fromkeys(roots[n] for n in (node, *node.all_input_nodes) if roots[n] in written)]
        if _has_effects(node):
            touched.append("effects")
        earlier = [last[what] for what in touched if what in last]
        if earlier:
            order[node] = earlier
        last |= dict.fromkeys(touched, node)
    return order


def sort(graph: Graph, order: Mapping[Node, Sequence[Node]], position: Mapping[Node, int]) -> None:
    """Put each node after what it reads and what ``order`` names, else by position. ``order`` holds present nodes."""
    # Takes 0.15 s to import, which only a conversion should pay.
    import networkx as nx

    waits = nx.DiGraph()
    waits.add_nodes_from(graph.nodes)
    waits.add_edges_from((each, node) for node in graph.nodes for each in (*node.all_input_nodes, *order.get(node, ())))
    try:
        sorted_nodes = [*nx.lexicographical_topological_sort(waits, key=lambda node: position.get(node, 0))]
    except nx.NetworkXUnfeasible:
        raise InvariantError(
            "fuse: nodes wait for each other: a region is not convex. "
            "This is a bug in fxprec: please report it, and convert with fuse=False meanwhile"
        ) from None
    # Before the first node stands the graph's own mark, where its list begins.
    last = next(iter(graph.nodes)).prev
    for node in sorted_nodes:
        last.append(node)
        last = node


def _has_effects(node: Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output") or is_row_operation(node):
        return False
    row = row_of(notes(node).op.name)
    return row is None or row.random
