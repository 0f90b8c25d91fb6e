"""Choose overrides of a policy: which nodes compute with a value, and in how few lines they are told.

::

    [nodes]                                    [modules]
    "linear" = "float32"               ->      "blocks.*.up" = "float32"
    "linear_2" = "float32"
    "linear_4" = "float32"

A line takes the place of others only where every node of every graph is decided as it was by them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch.fx import Node

from fxprec.inspection.text import fold
from fxprec.passes.graph.annotations import Rule, module_path, notes
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.ops.table import facts_at
from fxprec.passes.policy.policy import Kind, Policy

#: Kind and pattern of an override.
Words: TypeAlias = tuple[Kind, str]

#: A type of op and a pattern with ``*`` want to be about as many nodes: else a name says more.
_SEVERAL: Final = 2


def overridden(policy: Policy, precisions: Mapping[Words, torch.dtype]) -> Policy:
    """Return the policy with these overrides after its own."""
    # Later overrides win, so these come after the policy's own.
    found: dict[Kind, dict[str, torch.dtype]] = {"ops": {}, "modules": {}, "nodes": {}}
    for (kind, pattern), precision in precisions.items():
        found[kind][pattern] = precision
    return policy.override(ops=found["ops"], modules=found["modules"], nodes=found["nodes"])


def readers(node: Node) -> list[Node]:
    """Return the nodes that compute with a value, through casts and views."""
    return near_by(node, lambda each: each.users)


def near_by(node: Node, near: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Return the nearest nodes with arithmetic of their own, through casts and views; ``near``: users, or inputs."""
    found: list[Node] = []
    for each in near(node):
        # A cast or a view has no arithmetic of its own: whoever reads it decides, and so on through chains of them.
        if each.target in CASTS or (is_view(each) and [*near(each)]):
            found += near_by(each, near)
        elif each.op not in ("placeholder", "output"):
            found.append(each)
    return found


def is_view(node: Node) -> bool:
    """Return whether a node shows what it reads in another way, in the dtype that arrives."""
    row = facts_at(node)
    return row.view and row.rule is Rule.FOLLOW


def in_fewer_lines(
    nodes: Mapping[str, torch.dtype], everywhere: Sequence[Node], modules: Collection[str],
    alike: Callable[[Mapping[str, Words]], bool],
) -> dict[str, Words]:  # fmt: skip
    """Return for each node the override that it shares with others, or that names its module.

    Args:
        nodes: the decisions.
        everywhere: the nodes of all graphs.
        modules: paths that overrides may name.
        alike: whether all is decided as before where nodes are told in these words.
    """
    words: dict[str, Words] = {}

    # Asking redecides every graph: groups that fit together are accepted at once, others are halved.
    def accept(tried: Sequence[tuple[Words, set[str]]]) -> None:
        """Accept as many candidates as decide alike, with few questions where most of them do."""
        more = {name: own for own, names in tried for name in names if name not in words}
        if not more:
            return
        if alike(words | more):
            words.update(more)
        elif len(tried) > 1:
            middle = len(tried) // 2
            accept(tried[:middle])
            accept(tried[middle:])

    for candidates in _candidates([node for node in everywhere if node.name in nodes], modules):
        accept([(own, names) for own, names in candidates if len({nodes[name] for name in names}) == 1])
    return words


def _candidates(chosen: Sequence[Node], modules: Collection[str]) -> Iterator[list[tuple[Words, set[str]]]]:
    """Yield candidates for overrides with the nodes they cover, those that say most first."""
    yield [
        (("ops", op), names)
        for op, names in _grouped((notes(node).op.name, node.name) for node in chosen)
        if len(names) >= _SEVERAL
    ]
    paths = [(module_path(node).split("."), node.name) for node in chosen if module_path(node)]
    for depth in range(1, max((len(parts) for parts, _ in paths), default=0) + 1):
        at_depth = [(".".join(parts[:depth]), name) for parts, name in paths if len(parts) >= depth]
        at_depth = [(path, name) for path, name in at_depth if path in modules]
        layers = _grouped((fold(path), name) for path, name in at_depth if fold(path) != path)
        yield [(("modules", pattern), names) for pattern, names in layers if len(names) >= _SEVERAL]
        yield [(("modules", path), names) for path, names in _grouped(at_depth)]


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, set[str]]]:
    groups: dict[str, set[str]] = defaultdict(set)
    for key, name in pairs:
        groups[key].add(name)
    return [*groups.items()]
