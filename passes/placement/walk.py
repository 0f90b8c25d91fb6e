"""Walk through a graph once and note, as data, what each node does to dtypes; placements read these steps.

A ``Step`` says that a value comes from outside, is part of another, is written in place, and so on. That is a fact of
the program, so all readers share it: the minimum cut (``mincut``), torch's promotion (``autocast``) and the trade of
time against error (``tradeoff``). They differ in what they say of ops that compute, and of memory that is written.

Bodies of checkpointed regions are decided together with their caller: placeholders are the caller's values, results are
the body's, and no cast stands at the border. Branches and loops, and bodies that are called more than once, are decided
alone between original dtypes. Bodies of any other higher-order op (a custom autograd function, flex attention) are left
as they are.

Written classes: a tensor, its views and its in-place users share memory, so that one of them in another dtype would be
a copy that misses the writes. ``written_classes`` finds them; a class without a write falls apart into ordinary ops.
Who inserts casts keeps to two rules. A cast of a member is good until the next write to its class (its mutation epoch).
And if the root's kernel puts out another dtype than its memory is to have, ``meta["stored_dtype"]`` says which: it is
cast right after it is made, and only the cast is used from then on::

    %y: bfloat16 = linear(%x, %w)           # meta["stored_dtype"] = float32
    %y_f32: float32 = cast(%y, torch.float32)
    %z: float32 = masked_fill_(%y_f32, %mask, -3.4e38)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Final, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.passes.canonical.autocast_regions import is_kept_region
from fxprec.passes.context import Context
from fxprec.passes.costs.op_costs import OpCosts
from fxprec.passes.graph.annotations import CASTABLE, NO_OP, UNKNOWN, Rule, leaves, notes
from fxprec.passes.graph.subgraphs import bodies_in, body_of
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.aliases import shared_sources, written_memory
from fxprec.passes.ops.names import cast_target
from fxprec.passes.ops.spellings import VIEW_ATTRIBUTES
from fxprec.passes.ops.table import facts_of
from fxprec.passes.placement.sites import (
    Site,
    UnderAutocast,
    assumed_original,
    carries_float,
    dtype_reference,
    is_metadata,
    site_of,
    values_under_autocast,
)
from fxprec.passes.torch_internals import HigherOrderOperator

#: Higher-order ops that run their body once, there and then: its nodes are decided as part of the caller's graph.
_TRANSPARENT: Final = frozenset(
    f"higher_order::{name}"
    for name in ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "invoke_subgraph",
                 "wrap_with_set_grad_enabled", "wrap_with_autocast", "strict_mode", "hints_wrapper")
)  # fmt: skip

#: Branches and loops: bodies are decided alone, and what enters and leaves them has its original dtype.
_BOUNDED: Final = frozenset(
    f"higher_order::{name}" for name in ("cond", "while_loop", "scan", "associative_scan", "map", "map_impl")
)


class Kind(Enum):
    """Kind of a step: where the dtype of a node's value comes from."""

    #: An input of the whole graph: a source, which may count as low before anybody casts it.
    INPUT = auto()
    #: From outside, or from where nobody looks: it has its original dtype. Or there is no value, as of an output.
    SOURCE = auto()
    #: From ``of``, of which it is a part, with no room for a cast between them. Also, with ``of=None``, of results that
    #: are no floats (sizes, flags): there is no dtype to decide.
    SHARE = auto()
    #: From a cast of the user's: obeyed; what goes in may have any dtype.
    CAST = auto()
    #: From an index by tensors: a part, as a view gives it or, if its backward would add up in low
    #: (``Walk.sums_low_backward``), an op that computes.
    LOOKUP = auto()
    #: From an op that computes.
    COMPUTE = auto()
    #: From the memory that an in-place op writes.
    WRITE = auto()


class Step(NamedTuple):
    """Constraint that a node puts on dtypes.

    Attributes:
        node: the node.
        kind: where the dtype of its value comes from.
        why: the reason for the report.
        rule: the rule of the annotation, of a node that computes nothing.
        of: the value that this one is (part of), casts or looks at; None: that has no dtype of ours, or there is none.
        site: the call, of ops that compute, write, look up, or cast to a dtype.
        floats: whether the node's value is a float that the placement gives a dtype.
        reads_original: whether its arguments are wanted in their original dtypes.
    """

    node: Node
    kind: Kind
    why: str
    rule: Rule = Rule.KEEP
    of: Node | None = None
    site: Site | None = None
    floats: bool = False
    reads_original: bool = False


class Entered(NamedTuple):
    """A graph on the walk.

    Attributes:
        graph: the graph.
        hands_out: its outputs get their original dtype, or go to the graph that calls it.
        is_body: a higher-order op of another graph calls it.
    """

    graph: Graph
    hands_out: bool
    is_body: bool


class Walk:
    """The steps through graphs and the bodies that they call, in the order in which they run.

    Attributes:
        context: settings of the conversion.
        steps: one for each node, and some more for the bodies of higher-order ops.
        graphs: the graphs in the order in which they were entered, callers first.
        classes: memory that is written in place: member -> root (``written_classes``).
        operands: placeholder of a called body -> what it is given.
        floats: values that get a dtype.
    """

    def __init__(self, graphs: Iterable[GraphModule], context: Context) -> None:
        self.context = context
        self.steps: list[Step] = []
        self.graphs: list[Entered] = []
        self.classes: dict[Node, Node] = {}
        self.operands: dict[Node, Node] = {}
        self.floats: set[Node] = set()
        self._under_autocast: dict[Node, UnderAutocast] = {}
        self._calls: Counter[int] = Counter()
        self._visited: set[int] = set()
        self._results: dict[Node, tuple[object, ...]] = {}  # call of a body -> what the body returns
        for gm in graphs:
            self._graph(gm, None, Rule.KEEP if context.keep_output_dtype else Rule.FOLLOW)

    def shares_written(self, node: Node) -> bool:
        """Return whether a node gives memory that is written, and that another node made: a view, an in-place op."""
        return self.classes.get(node, node) is not node

    def under_autocast(self, node: Node) -> UnderAutocast:
        """Return what autocast would have made of a value; found out at the first question, which few programs ask."""
        if not self._under_autocast:
            for graph, _, _ in self.graphs:
                values_under_autocast(graph, self.operands, self._under_autocast)
        return self._under_autocast.get(node, UnderAutocast.NOTHING)

    def sums_low_backward(self, site: Site) -> bool:
        """Return whether a call's backward adds up in low where torch.autocast's adds up in FP32."""
        return site.sums_low_backward(self.context, self.under_autocast)

    def op_costs(self) -> OpCosts:
        """Return the prices of the graphs' ops, by the costs of the device that the context has."""
        assert self.context.costs is not None
        costs = OpCosts(self.context.costs, self.context)
        for graph, _, is_body in self.graphs:
            costs.enter(graph, is_body)
        return costs

    def read(self, readers: Mapping[Kind, Callable[[Step], None]]) -> None:
        """Hand each step to the reader of its kind."""
        for step in self.steps:
            readers[step.kind](step)

    def _add(self, step: Step) -> None:
        if step.floats:
            self.floats.add(step.node)
        self.steps.append(step)

    def _known(self, node: object) -> Node | None:
        """Return a value that has a dtype of ours, or None."""
        return node if isinstance(node, Node) and node in self.floats else None

    def _source(self, node: Node, why: str, kind: Kind = Kind.SOURCE, reads_original: bool = False) -> None:
        floats = carries_float(notes(node).dtype)
        self._add(Step(node, kind, why, floats=floats, reads_original=reads_original))

    def _share(self, node: Node, why: str, of: Node | None, rule: Rule = Rule.FOLLOW) -> None:
        self._add(Step(node, Kind.SHARE, why, rule, of, floats=of is not None))

    def _graph(self, gm: GraphModule, bound: Mapping[Node, Node] | None, returns: Rule) -> None:
        """Walk a graph. ``bound``: in a called body, placeholder -> the caller's operand, if that is ours to decide."""
        self.operands |= bound or {}
        self.graphs.append(Entered(gm.graph, returns is Rule.KEEP or bound is not None, bound is not None))
        self.classes |= written_classes(gm.graph)
        # A body that is called twice has one set of casts: it cannot be decided as part of either caller.
        self._calls += Counter({id(body): len(node.users) for node, body in bodies_in(gm).items()})
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                if bound is None:
                    self._source(node, "an input", Kind.INPUT)
                elif node in bound:
                    self._share(node, "as its caller gives it", self._known(bound[node]), Rule.KEEP)
                else:
                    self._source(node, "as its caller gives it")
            elif node.op == "get_attr":
                self._source(node, "a parameter or buffer")
            elif node.op == "output":
                step = Step(node, Kind.SOURCE, "what the module returns", returns)
                self._add(step._replace(reads_original=returns is Rule.KEEP))
            elif not self._higher_order(node):
                self._call(site_of(node, self.context))

    def _call(self, site: Site) -> None:
        node, base, why = site.node, self._known(site.base), site.why
        floats = carries_float(notes(node).dtype)
        # Indexing by a tensor reads values and adds up gradients, as ``index`` does; by numbers it is a view.
        # An index of unknown dtype may be a tensor. Of memory that is written it must count as a number: a view.
        is_index = site.name == "getitem" and floats and base is not None
        if is_index and picks_by_tensor(node.args[1], unknown=node not in self.classes):
            lookup = site._replace(facts=facts_of("index"))
            self._add(Step(node, Kind.LOOKUP, why, Rule.FOLLOW, base, lookup, floats))
        elif site.name in ("getitem", "getattr"):
            # A result of a body is the body's own value: what reads it reads that.
            whole: object = site.base
            returned = self._results.get(site.base)
            if returned is not None and isinstance(node.args[1], int):
                part = returned[node.args[1]]
                whole = part if isinstance(part, Node) else whole
            if floats and self._known(whole) is None:
                self._source(node, why)
            else:
                self._share(node, why, self._known(whole) if floats else None)
        elif site.name == "to":
            named = cast_target(node) in CASTABLE or self._known(dtype_reference(node)) is not None
            if floats and not named and base is None:
                self._source(node, why)
            else:
                of, cast = base if floats else None, site if named else None  # one that names no dtype goes to a device
                self._add(Step(node, Kind.CAST, why, Rule.KEEP, of, cast, floats))
        elif is_metadata(site):
            self._share(node, why, None)
        elif site.in_place:
            self._add(Step(node, Kind.WRITE, why, site.rule, base, site, floats and base is not None))
        else:
            self._add(Step(node, Kind.COMPUTE, why, site.rule, base, site, floats))

    def _higher_order(self, node: Node) -> bool:
        """Walk the bodies, and return False where the op is decided like any other."""
        found = _bodies(node)
        if is_kept_region(node, self.context):  # its arguments: device type, dtype, whether it is enabled, ...
            why = f"the user's own autocast: {dtype_name(node.args[1])}" if node.args[2] else "autocast(enabled=False)"
            self._leave_alone(found[0], f"inside {why}")
            self._add(Step(node, Kind.SOURCE, why, reads_original=True))  # its results have dtypes of their own
            return True
        if not found or not _runs_bodies(node):
            for body in found:
                self._leave_alone(body)
            return False
        bound = _bind_operands(node) if len(found) == 1 and self._calls[id(found[0])] == 1 else None
        if bound is not None:
            self._graph(found[0], bound, Rule.FOLLOW)
            returned = found[0].graph.output_node().args[0]
            self._results[node] = tuple(returned) if isinstance(returned, tuple | list) else ()
            self._share(node, "its body is decided as part of this graph", self._known(returned))
            return True
        for body in found:
            if id(body) not in self._visited:
                self._visited.add(id(body))
                self._graph(body, {}, Rule.KEEP)
        self._source(node, "its bodies take and give original dtypes", reads_original=True)
        return True

    def _leave_alone(self, gm: GraphModule, why: str = "in the body of an op that keeps its dtypes") -> None:
        for node in gm.graph.nodes:
            self._source(node, why)
            for body in _bodies(node):
                self._leave_alone(body, why)


def _bodies(node: Node) -> list[GraphModule]:
    """Return the graphs that a higher-order op calls."""
    if not isinstance(node.target, HigherOrderOperator):
        return []
    return [body for source in node.all_input_nodes if (body := body_of(source)) is not None]


def _runs_bodies(node: Node) -> bool:
    """Return whether a higher-order op just runs its bodies, so that their nodes are decided here."""
    name = notes(node).op.name
    return notes(node).autocast is not False and (name in _TRANSPARENT or name in _BOUNDED)


def _bind_operands(node: Node) -> dict[Node, Node] | None:
    """Map the placeholders of the one body to the caller's operands; None where the op does not simply hand them on."""
    if notes(node).op.name not in _TRANSPARENT:
        return None
    handed = [leaf for leaf in leaves(node.args) if not isinstance(leaf, str)]
    # Operands follow the body: before it come flags of the op.
    at = next(i for i, leaf in enumerate(handed) if isinstance(leaf, Node) and body_of(leaf) is not None)
    given = handed[at + 1 :]
    inputs = list(_bodies(node)[0].graph.find_nodes(op="placeholder"))
    if len(inputs) != len(given):
        return None
    return {into: operand for into, operand in zip(inputs, given, strict=True) if isinstance(operand, Node)}


def written_classes(graph: Graph) -> dict[Node, Node]:
    """Map each node whose memory is written in place to the root of those that share it."""
    roots, written = written_memory(graph, _shares_memory_of)
    return {node: root for node, root in roots.items() if root in written}


def _shares_memory_of(node: Node) -> Iterator[Node]:
    """Yield what ``aliases.shared_sources`` yields, without what converts or copies."""
    op = notes(node).op
    if op is not NO_OP and not op.in_place:
        if op.name == "to":  # a cast to the dtype that the tensor has already gives the tensor itself
            target = cast_target(node)
            if target is not None and target != assumed_original(notes(node.all_input_nodes[0]).dtype):
                return
        if op.name == "getattr" and node.args[1] not in VIEW_ATTRIBUTES | {"real"}:
            return
        if op.name == "getitem" and picks_by_tensor(node.args[1]):
            return
    yield from shared_sources(node)


def picks_by_tensor(index: object, unknown: bool = False) -> bool:
    """Return whether indexing copies: by a list or a tensor (``unknown``: or what may be one), or with one."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) or (isinstance(part, Node) and _is_tensor(part, unknown)) for part in parts)


def _is_tensor(node: Node, unknown: bool) -> bool:
    dtype = notes(node).dtype
    return isinstance(dtype, torch.dtype) or (unknown and dtype is UNKNOWN)
