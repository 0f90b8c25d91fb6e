"""Find values that take over channels_last from a convolution, and writes that a copy in their place would hide.

Two passes let convolutions leave their channels next to each other in memory: ``fusion.channels_last`` and ``pack``.
A reader that is not known to compute the same in either order then gets a copy in the original one. A copy is no
alias: where some nodes of one memory are in channels_last and others see a copy, a write on one side is lost on the
other. ``first_lost_write`` finds it::

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


def passes_format_on(node: Node) -> bool:
    """Return whether an op computes the same in either memory order, and its result lies as its operands do.

    Not so views, some of which copy in one order and not in the other, and random draws, which follow the memory.
    """
    facts = facts_at(node)
    return node.target in CASTS or (facts.any_format and not facts.view and not facts.random)


def values_in_channels_last(graph: Graph, convolutions: Container[Node], through_views: bool = False) -> set[Node]:
    """Return the convolutions, and the values that take over the order of their results.

    Args:
        through_views: also those behind a view of such a value; the view itself is passed, but not returned.
    """
    inside: set[Node] = set()
    reached: set[Node] = set()
    for node in graph.nodes:
        if notes(node).dtype is NON_TENSOR:
            continue
        follows = any(source in reached for source in node.all_input_nodes)
        if node in convolutions or (follows and passes_format_on(node)):
            inside.add(node)
            reached.add(node)
        elif follows and through_views and facts_at(node).any_format:
            reached.add(node)
    return inside


def first_lost_write(graph: Graph, inside: Iterable[Node]) -> Node | None:
    """Return the first node that writes to memory of which there are two copies by then; None where nobody does.

    Args:
        inside: values in channels_last. Nodes of one memory are inside or not, and one of the two kinds has a copy.
    """
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
