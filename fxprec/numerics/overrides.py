"""Choose overrides of a policy, tell them in few lines, and measure what each saves.

Which nodes compute with a value (``readers``) and which lines tell of them (``in_fewer_lines``)::

    [nodes]                                    [modules]
    "linear" = "float32"               ->      "blocks.*.up" = "float32"
    "linear_2" = "float32"
    "linear_4" = "float32"

A line takes the place of others only where every node of every graph is decided as it was by them.

A row's ``share`` of an error is the part of its own roundings. What its node in FP32 saves is another figure: the low
copy of its weight and the casts of its inputs go with it, and a cast of its result may come. So it is measured on
copies of the model, for one override after the other (``with_savings``)::

    linear_1, its weight's low copy, the cast of its input    -> nodes={"linear_1": torch.float32}, for all three rows
    a copy with that, on the same batches                     -> the mean square error that it has

What is gone of a loss's error is told with little noise. Roundings are as good as independent, so a mean square error
is the sum of their squares, and of the square of all bends together. Those of nodes that are and feed the same in both
models are equal but for chance: only what differs counts. Of outputs and gradients, whose error has many elements, it
is the error itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import torch
from torch import nn
from torch.fx import Node

from fxprec.errors import FxprecError
from fxprec.inspection.nodes import places
from fxprec.inspection.text import fold
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.model.conversion import conversion_of
from fxprec.numerics.ledger import Ledger, Row
from fxprec.numerics.problem import Batch, Problem, converted_anew
from fxprec.passes.graph.annotations import Rule, module_path, notes, weight_path
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.ops.table import facts_of
from fxprec.passes.policy.policy import Kind, Policy

#: Kind and pattern of an override.
Words: TypeAlias = tuple[Kind, str]

#: A type of op and a pattern with ``*`` want to be about as many nodes: else a name says more.
_SEVERAL: Final = 2


def overridden(policy: Policy, precisions: Mapping[Words, torch.dtype]) -> Policy:
    """Return the policy with these overrides after its own."""
    found: dict[Kind, dict[str, torch.dtype]] = {"ops": {}, "modules": {}, "nodes": {}}
    for (kind, pattern), precision in precisions.items():
        found[kind][pattern] = precision
    return policy.override(ops=found["ops"], modules=found["modules"], nodes=found["nodes"])


def in_fp32(policy: Policy, chosen: Iterable[Words]) -> Policy:
    """Return the policy with what is chosen in FP32."""
    return overridden(policy, dict.fromkeys(chosen, torch.float32))


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
    row = facts_of(notes(node).op.name)
    return row.view and row.rule is Rule.FOLLOW


def in_fewer_lines(
    nodes: Mapping[str, torch.dtype],
    everywhere: Sequence[Node],
    modules: Collection[str],
    alike: Callable[[Mapping[str, Words]], bool],
) -> dict[str, Words]:
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
        agreeing = [(own, names) for own, names in candidates if len({nodes[name] for name in names}) == 1]
        accept(agreeing)
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


#: Overrides that are measured where nobody says how many.
MEASURED: Final = 10
#: Of all squares: a bend that is less is no route that is looked into.
_LEAST: Final = 0.001


#: What an override has in FP32: names of nodes.
Names = tuple[str, ...]
#: (problem, batch) -> the ledger of that batch.
Audit = Callable[[Problem, Batch], Ledger]


def with_savings(problem: Problem, ledger: Ledger, batches: Sequence[Batch], audited: Audit, most: int) -> Ledger:
    """Return the ledger with ``saves``, ``saves_error`` and ``override`` of the rows whose override was measured.

    Args:
        problem: whose ledger it is.
        ledger: of all batches.
        batches: those of the ledger.
        audited: makes a ledger as that was made.
        most: overrides that are measured: those whose rows have the largest shares together.
    """
    nodes, weights = _nodes(problem.model)
    total = sum(row.squares + row.bend**2 for row in ledger.rows) or 1.0
    wanted: list[Names] = []
    shares: dict[Names, float] = {}
    for row in ledger.rows:
        # A row that is mostly bend has its cause elsewhere: in the op that decided over its indices.
        bends = row.bend**2 > max(row.squares, _LEAST * total)
        names = (_route(row, nodes) if bends else ()) or _override(row, nodes, weights)
        wanted.append(names)
        if names:
            shares[names] = shares.get(names, 0.0) + (row.squares + bends * row.bend**2) / total
    chosen = sorted(shares, key=lambda names: -shares[names])[:most]
    before = [audited(problem, batch) for batch in batches]
    start, own = [mean_square(each) for each in before], _signatures(problem.model)
    measured: dict[Names, tuple[float, float | None]] = {}
    for names in chosen if any(start) else ():
        policy = in_fp32(conversion_of(problem.model).settings.policy, (("nodes", name) for name in names))
        try:
            trial = replace(problem, model=converted_anew(problem.model, policy=policy))
            after = [audited(trial, batch) for batch in batches]
            other = _signatures(trial.model)
            # Nodes that are the same in both models differ by chance: their squares are left out on both sides.
            same = {name for name in own if own[name] == other.get(name)}
            gone = [_gone(one, two, same) for one, two in zip(before, after, strict=True)]
            measured[names] = saved(start, gone)
        except (FxprecError, ValueError):  # a node has another name where it is in FP32; an error that is not finite
            continue
    rows = [
        replace(row, saves=measured[names][0], saves_error=measured[names][1], override=names)
        if names in measured
        else row
        for row, names in zip(ledger.rows, wanted, strict=True)
    ]
    left = len(shares) - len(measured)
    remark = (
        "saves: the part of the mean square error that is gone with row.override in FP32, measured on a copy of the "
        f"model for each of {len(measured)} overrides"
        + (f"; savings=N tries more of the {left} others" if left else "")
    )
    return replace(ledger, rows=tuple(rows), remarks=(*ledger.remarks, remark))


def mean_square(ledger: Ledger) -> float:
    """Return the mean square error that the ledger of one batch tells."""
    if ledger.target != "loss":
        return ledger.measured**2
    return sum(row.squares for row in ledger.rows) + sum(row.bend for row in ledger.rows) ** 2


def _gone(before: Ledger, after: Ledger, same: Container[str]) -> float:
    """Return how much less the mean square error of one batch is; ``same``: nodes and weights that did not change."""
    if before.target != "loss":
        return before.measured**2 - after.measured**2
    squares = [sum(row.squares for row in each.rows if row.node not in same) for each in (before, after)]
    bends = [sum(row.bend for row in each.rows) ** 2 for each in (before, after)]
    return squares[0] - squares[1] + bends[0] - bends[1]


def _signatures(model: nn.Module) -> dict[str, frozenset[object]]:
    """Return for each node and weight the facts that its roundings depend on: its dtypes, and who reads them."""
    nodes, weights = _nodes(model)
    found: dict[str, set[object]] = {}
    for (_, name), node in nodes.items():
        precision = notes(node).precision
        readers_of = frozenset(user.name for user in node.users)
        found.setdefault(name, set()).add((precision.compute, precision.output, readers_of))
    for path, own in weights.items():
        read = frozenset((each.name, notes(each).precision.compute) for node in own for each in readers(node))
        found.setdefault(path, set()).add(read)
    return {name: frozenset(each) for name, each in found.items()}


def saved(start: Sequence[float], gone: Sequence[float]) -> tuple[float, float | None]:
    """Return the part of the sum of errors that is gone, and its standard error (jackknife over batches).

    Args:
        start: mean square errors of the batches.
        gone: how much less they are with the override.
    """
    whole, less, count = sum(start), sum(gone), len(start)
    if count < 2:
        return less / whole, None
    pairs = zip(gone, start, strict=True)
    without = [(less - own) / (whole - other) for own, other in pairs if whole > other]
    mean = sum(without) / len(without)
    return less / whole, math.sqrt((count - 1) / count * sum((each - mean) ** 2 for each in without))


def _nodes(model: nn.Module) -> tuple[Mapping[tuple[int, str], Node], Mapping[str, list[Node]]]:
    """Return the nodes by graph and name, and those that read each weight."""
    graphs = [captured.gm for captured in conversion_of(model).captured]
    found = {(number, place.name): place.node for number, gm in enumerate(graphs) for place in places(number, gm)}
    weights: dict[str, list[Node]] = {}
    for node in found.values():
        if node.op == "get_attr":
            weights.setdefault(weight_path(node), []).append(node)
    return found, weights


def _route(row: Row, nodes: Mapping[tuple[int, str], Node]) -> Names:
    """Return what decided over the indices that bent a row; (): there are none.

    Its own roundings know nothing of a route: where low precision takes another expert, the op that gathers its answer
    has the bend, and the product whose maximum was taken is the cause, which may have no row at all.
    """
    node = nodes.get((row.graph, row.node))
    indices = [] if node is None else [each for each in node.all_input_nodes if is_index(notes(each).dtype)]
    return tuple(dict.fromkeys(each.name for index in indices for each in _deciding(index)))


def is_index(dtype: object) -> bool:
    """Return whether values of a dtype are positions, or yes and no."""
    return isinstance(dtype, torch.dtype) and not dtype.is_floating_point and not dtype.is_complex


def _deciding(index: Node) -> list[Node]:
    """Return the nodes in low precision that are next above an index."""
    found: list[Node] = []
    seen, left = {index}, [index]
    while left:
        for each in left.pop().all_input_nodes:
            if each not in seen and isinstance(notes(each).dtype, torch.dtype | tuple):  # and no size
                seen.add(each)
                low = notes(each).precision.compute in LOW_DTYPES and each.target not in CASTS
                (found if low and not facts_of(notes(each).op.name).view else left).append(each)
    return found


def _override(row: Row, known: Mapping[tuple[int, str], Node], weights: Mapping[str, list[Node]]) -> Names:
    """Return the nodes that are to be in FP32 for a row's rounding to go; (): there are none."""
    if row.kind == "weight":
        found = [reader for node in weights.get(row.node, []) for reader in readers(node)]
    elif (node := known.get((row.graph, row.node))) is not None:
        found = readers(node) if node.target in CASTS else [node]
    else:
        found = []
    names = (node.name for node in found if not facts_of(notes(node).op.name).arrives)
    return tuple(dict.fromkeys(names))
