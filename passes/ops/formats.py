"""Find values that take over channels_last from a convolution, and readers that may not see a copy in its place.

Two passes let convolutions leave their channels next to each other in memory: ``fusion.channels_last`` and ``pack``.
Whoever is not known to take either order then reads a copy. A copy is no alias: where somebody writes to memory of
which one side has the value and the other a copy, ``writes_across`` finds the writer::

    %conv2d = conv2d(%x, %w)           # channels next to each other
    %copy = contiguous(%conv2d)
    %view = view(%copy, -1)
    %mul_ = mul_(%view, 2)             # of the copy: a later reader of %conv2d would not see it
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch.fx import Graph, Node

from fxprec.passes.graph.annotations import NON_TENSOR, notes
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.ops.aliases import alias_roots, written_by
from fxprec.passes.ops.table import facts_at


def takes_over(node: Node) -> bool:
    """Return whether an op's values are the same in either order, and its image has the order of its operands.

    Not so views, some of which copy in one order and not in the other, and random draws, which follow the memory.
    """
    facts = facts_at(node)
    return node.target in CASTS or (facts.any_format and not facts.view and not facts.random)


def taken_over(graph: Graph, convolutions: Container[Node], through_views: bool = False) -> set[Node]:
    """Return the convolutions, and the tensors that take over the order of their results.

    Args:
        through_views: also those behind a view of such a tensor; the view itself is none.
    """
    inside: set[Node] = set()
    reached: set[Node] = set()
    for node in graph.nodes:
        if notes(node).dtype is NON_TENSOR:
            continue
        follows = any(source in reached for source in node.all_input_nodes)
        if node in convolutions or (follows and takes_over(node)):
            inside.add(node)
            reached.add(node)
        elif follows and through_views and facts_at(node).any_format:
            reached.add(node)
    return inside


def writes_across(graph: Graph, inside: Iterable[Node]) -> Node | None:
    """Return the first node that writes to memory of which one side has a copy by then. None: nobody does."""
    inside, roots = {*inside}, alias_roots(graph)
    touched = {roots[node] for node in inside}
    sides: dict[Node, set[bool]] = {root: set() for root in touched}
    for node in graph.nodes:
        for source in written_by(node):
            if (root := roots[source]) in touched and len(sides[root] | {node in inside}) > 1:
                return node
        if roots[node] in touched and notes(node).dtype is not NON_TENSOR:
            sides[roots[node]].add(node in inside)
    return None
