"""The walk that both placements share: forwards through a graph and the bodies that its higher-order ops call.

What a *part* of a value, a user's cast or a called body means is the same for both; they differ in what they say of the
ops that compute, and of memory that is written.

Bodies of checkpointed regions are decided together with their caller: placeholders are the caller's values, results are
the body's, and no cast stands at the border. Branches and loops, and bodies that are called more than once, are decided
alone between original dtypes. Bodies of any other higher-order op (a custom autograd function, flex attention) are left
as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.passes.canonical.autocast_regions import is_kept_region
from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import CASTABLE, Rule, leaves, notes
from fxprec.passes.graph.subgraphs import bodies_in, body_of
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.names import cast_target
from fxprec.passes.ops.table import facts_of
from fxprec.passes.placement.pins import picks_by_tensor
from fxprec.passes.placement.sites import (
    Learned,
    Site,
    assumed_original,
    carries_float,
    dtype_reference,
    is_metadata,
    learned_values,
    site_of,
)
from fxprec.passes.torch_internals import is_higher_order

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


class GraphWalk:
    """Subclasses keep values (``has`` to ``want_original``), record (``decide``), judge (``compute``, ``write``)."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._calls: Counter[int] = Counter()
        self._visited: set[int] = set()
        self.classes: dict[Node, Node] = {}  # of memory that is written: member -> root
        self.operands: dict[Node, Node] = {}  # placeholder of a called body -> what it is given
        self._learned: dict[Node, Learned] = {}
        self._unlearned: list[Graph] = []  # of what was entered; most programs have no op that asks
        self._results: dict[Node, tuple[object, ...]] = {}  # call of a body -> what the body returns

    def run(self, gm: GraphModule) -> None:
        self._graph(gm, None, Rule.KEEP if self.context.keep_output_dtype else Rule.FOLLOW)

    def learned(self, node: Node) -> Learned:
        """Return what autocast would have made of a value of a graph that was entered."""
        while self._unlearned:
            learned_values(self._unlearned.pop(0), self.operands, self._learned)
        return self._learned.get(node, Learned.NOTHING)

    def enter(self, graph: Graph, returns: bool) -> None:
        """Look at a graph before its nodes. ``returns``: its outputs are FP32 in the end, or read by another graph."""

    def has(self, node: Node) -> bool:
        """Return whether the node's value is a float that was given a dtype."""
        raise NotImplementedError

    def is_wide(self, node: Node) -> bool:
        """Return whether a value that has a dtype is FP32 for certain, as it arrives."""
        raise NotImplementedError

    def assign_dtype(self, node: Node, dtype: torch.dtype, source: bool = False) -> None:
        """The node's value has this dtype; ``source``: nothing of the graph flowed into it."""
        raise NotImplementedError

    def assign_dtype_of(self, node: Node, reference: Node) -> None:
        """The node's value is made in the dtype that another has when it arrives."""
        raise NotImplementedError

    def share_dtype(self, node: Node, whole: Node) -> None:
        """The node's value is (part of) another, with no room for a cast between them."""
        raise NotImplementedError

    def bind_operand(self, placeholder: Node, operand: Node) -> None:
        """The placeholder of a called body is the caller's value."""
        self.share_dtype(placeholder, operand)

    def read_by_user_cast(self, node: Node, source: Node) -> None:
        """The node, a cast of the user's, reads another value in its own dtype."""

    def want_original(self, sources: Iterable[Node]) -> None:
        """Somebody reads these in their original dtypes."""

    def decide(self, node: Node, rule: Rule, why: str) -> None:
        """A node that computes nothing, or reads what arrives."""
        raise NotImplementedError

    def input(self, node: Node) -> None:
        """A placeholder of the whole graph."""
        self.source(node, "an input")

    def compute(self, site: Site, floats: bool) -> None:
        raise NotImplementedError

    def write(self, site: Site, floats: bool) -> None:
        """An in-place op."""
        raise NotImplementedError

    def source(self, node: Node, why: str) -> None:
        """A value that comes from outside, or from where we don't look."""
        annotations = notes(node)
        if carries_float(annotations.dtype):
            self.assign_dtype(node, assumed_original(annotations.dtype), source=not annotations.handed_over)
        self.decide(node, Rule.KEEP, why)

    def output(self, node: Node, returns: Rule) -> None:
        if returns is Rule.KEEP:
            self.want_original(source for source in node.all_input_nodes if self.has(source))
        self.decide(node, returns, "what the module returns")

    def assign_named_dtype(self, site: Site, dtype: torch.dtype, source: bool = False) -> None:
        """A value in the dtype of a tensor that the call names (``dtype=x.dtype``), or else in this one.

        Bits are taken for numbers of the dtype that the tensor has in the original program.
        """
        reference = None if site.facts.bits else dtype_reference(site.node)
        if reference is not None and self.has(reference):
            self.assign_dtype_of(site.node, reference)
        else:
            self.assign_dtype(site.node, self.context.low if notes(site.node).names_tensors_dtype else dtype, source)

    def _graph(self, gm: GraphModule, bound: Mapping[Node, Node] | None, returns: Rule) -> None:
        """``bound``: in a called body, placeholder -> the caller's operand, where that is ours to decide."""
        self.operands |= bound or {}
        self._unlearned.append(gm.graph)
        self.enter(gm.graph, returns is Rule.KEEP or bound is not None)
        self._calls += _body_calls(gm)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, bound)
            elif node.op == "get_attr":
                self.source(node, "a parameter or buffer")
            elif node.op == "output":
                self.output(node, returns)
            elif not self._higher_order(node):
                self._call(site_of(node, self.context))

    def _placeholder(self, node: Node, bound: Mapping[Node, Node] | None) -> None:
        if bound is None:
            self.input(node)
        elif node not in bound:
            self.source(node, "as its caller gives it")
        else:
            if self.has(bound[node]):
                self.bind_operand(node, bound[node])
            self.decide(node, Rule.KEEP, "as its caller gives it")

    def _call(self, site: Site) -> None:
        floats = carries_float(notes(site.node).dtype)
        free = site.name == "getitem" and floats and self.has(site.base) and not self.is_wide(site.base)
        if free and picks_by_tensor(site.node.args[1], unknown=site.node not in self.classes):
            lookup = site._replace(facts=facts_of("index"))
            if lookup.adds_up_low(self.context, self.learned):
                return self.compute(lookup, floats)
        if site.name in ("getitem", "getattr"):
            self._part(site, floats)
        elif site.name == "to":
            self._user_cast(site, floats)
        elif is_metadata(site):
            self.decide(site.node, Rule.FOLLOW, site.why)
        elif site.in_place:
            self.write(site, floats)
        else:
            self.compute(site, floats)

    def _part(self, site: Site, floats: bool) -> None:
        node, whole = site.node, site.base
        returned = self._results.get(whole)
        if returned is not None and isinstance(node.args[1], int):
            part = returned[node.args[1]]
            whole = part if isinstance(part, Node) else whole
        if floats and not self.has(whole):
            return self.source(node, site.why)
        if floats:
            self.share_dtype(node, whole)
        self.decide(node, Rule.FOLLOW, site.why)

    def _user_cast(self, site: Site, floats: bool) -> None:
        """Obeyed; what goes in may have any dtype."""
        node, target, reference = site.node, cast_target(site.node), dtype_reference(site.node)
        if floats and (target in CASTABLE or (reference is not None and self.has(reference))):
            self.assign_named_dtype(site, target or assumed_original(notes(node).dtype))
        elif floats and self.has(site.base):  # to a device
            self.share_dtype(node, site.base)
        elif floats:
            return self.source(node, site.why)
        if floats and self.has(site.base):
            self.read_by_user_cast(node, site.base)
        self.decide(node, Rule.KEEP, site.why)

    def _higher_order(self, node: Node) -> bool:
        """Walk the bodies; False where the op is decided like any other."""
        found = _bodies(node)
        if is_kept_region(node, self.context):
            why = f"the user's own autocast: {dtype_name(node.args[1])}" if node.args[2] else "autocast(enabled=False)"
            self._leave_alone(found[0], f"inside {why}")
            self.want_original(source for source in node.all_input_nodes if self.has(source))
            self.decide(node, Rule.KEEP, why)  # its results have dtypes of their own, one by one
            return True
        if not found or not _runs_bodies(node):
            for body in found:
                self._leave_alone(body)
            return False
        bound = _bind_operands(node) if len(found) == 1 and self._calls[id(found[0])] == 1 else None
        if bound is not None:
            self._graph(found[0], bound, Rule.FOLLOW)
            returned = found[0].graph.output_node().args[0]
            if isinstance(returned, Node) and self.has(returned):
                self.share_dtype(node, returned)
            self._results[node] = tuple(returned) if isinstance(returned, tuple | list) else ()
            self.decide(node, Rule.FOLLOW, "its body is decided as part of this graph")
            return True
        for body in found:
            if id(body) not in self._visited:
                self._visited.add(id(body))
                self._graph(body, {}, Rule.KEEP)
        self.want_original(source for source in node.all_input_nodes if self.has(source))
        self.source(node, "its bodies take and give original dtypes")
        return True

    def _leave_alone(self, gm: GraphModule, why: str = "in the body of an op that keeps its dtypes") -> None:
        for node in gm.graph.nodes:
            self.source(node, why)
            for body in _bodies(node):
                self._leave_alone(body, why)


def _bodies(node: Node) -> list[GraphModule]:
    """The graphs that a higher-order op calls."""
    if not is_higher_order(node.target):
        return []
    return [body for source in node.all_input_nodes if (body := body_of(source)) is not None]


def _body_calls(gm: GraphModule) -> Counter[int]:
    """Count how often each body (by id) is called from this graph."""
    return Counter({id(body): len(node.users) for node, body in bodies_in(gm).items()})


def _runs_bodies(node: Node) -> bool:
    """Return whether a higher-order op just runs its bodies, so that their nodes are decided here."""
    name = notes(node).op.name
    return notes(node).autocast is not False and (name in _TRANSPARENT or name in _BOUNDED)


def _bind_operands(node: Node) -> dict[Node, Node] | None:
    """Placeholder of the one body -> the caller's operand; None where the op does not simply hand them on."""
    if notes(node).op.name not in _TRANSPARENT:
        return None
    handed = [leaf for leaf in leaves(node.args) if not isinstance(leaf, str)]
    at = next(i for i, leaf in enumerate(handed) if isinstance(leaf, Node) and body_of(leaf) is not None)
    given = handed[at + 1 :]
    inputs = list(_bodies(node)[0].graph.find_nodes(op="placeholder"))
    if len(inputs) != len(given):
        return None
    return {into: operand for into, operand in zip(inputs, given, strict=True) if isinstance(operand, Node)}
