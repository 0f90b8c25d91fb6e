"""Rewrites what matches a pattern: a node of some op, a check that finds what is to become of it, and the rewrite.

A pass of small rewrites is a table of patterns::

    _PATTERNS = (Pattern(("conv2d",), _depthwise, _call_depthwise),)

    @bodies_first
    def call_kernels(gm, context):
        return rewrite_matches(gm, context, _PATTERNS)

A check changes nothing. It returns what its rewrite takes; or why a user who would expect the rewrite does not get it,
for the report; or None where the node is something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeAlias

from torch.fx import Graph, GraphModule, Node

from fxprec.passes.context import Context, PassResult
from fxprec.passes.graph.annotations import annotated
from fxprec.passes.graph.grad_mode import ever_records, exposed_with_gradient
from fxprec.passes.ops.aliases import alias_roots, written_roots

#: A match of a rewrite that needs nothing but the node.
MATCH: Final = object()


class WholeGraph:
    """The graph around a node: what checks ask of it as a whole, found once, when it is first asked for."""

    def __init__(self, graph: Graph, context: Context) -> None:
        self.graph, self.context = graph, context

    @cached_property
    def roots(self) -> dict[Node, Node]:
        """Map each node to the first node of those that may share its memory."""
        return alias_roots(self.graph)

    @cached_property
    def _written(self) -> set[Node]:
        return written_roots(self.graph, self.roots)

    def is_written(self, node: Any) -> bool:
        """Return whether the graph writes in place to the memory of a node.

        False for a node that was made since, and for an argument that is none.
        """
        return self.roots.get(node) in self._written

    @cached_property
    def returned(self) -> set[Node]:
        """Values that are returned with a gradient: a rewrite must keep reading these, not what they are a cast of."""
        return exposed_with_gradient(self.graph, self.context.gradients)

    @cached_property
    def records(self) -> bool:
        """Flag of a graph in which autograd records anywhere."""
        return ever_records(self.graph, self.context.gradients)


Check: TypeAlias = Callable[[Node, WholeGraph], Any]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Rewrite of one kind of node.

    Attributes:
        ops: canonical names of the ops that it begins at.
        check: (node, its graph as a whole) -> what to rewrite, a reason why not (a str), or None.
        rewrite: (node, what the check found) -> None.
    """

    ops: Sequence[str]
    check: Check
    rewrite: Callable[[Node, Any], None]


def rewrite_matches(gm: GraphModule, context: Context, patterns: Sequence[Pattern]) -> PassResult:
    """Rewrite every node that a pattern matches, in the order of the graph, each after the rewrites before it.

    An op belongs to one pattern. Matches are listed before the first rewrite, so a rewrite may erase only nodes that no
    pattern begins at.
    """
    by_op = {op: pattern for pattern in patterns for op in pattern.ops}
    around = WholeGraph(gm.graph, context)
    changed, declined = False, list[str]()
    matched = [(node, by_op[at.op.name]) for node, at in annotated(gm.graph) if at.op.name in by_op]
    for node, pattern in matched:
        found = pattern.check(node, around)
        if isinstance(found, str):
            declined.append(f"{node.name}: {found}")
        elif found is not None:
            pattern.rewrite(node, found)
            changed = True
    return PassResult(gm, changed, tuple(declined))
