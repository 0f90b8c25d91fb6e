"""placement="mincut": turn a graph into a cut problem, solve it, and read every node's dtypes from the answer.

One variable an op that follows or promotes; one for the data port and the output of a norm whose kernel reads and writes
low; one for the input of a sum. LOW and FULL ops, sources, user casts and outputs are pins. ``decide`` says what the
levels pin; ``pins`` what safety and memory do.

Where an FP32 input makes an op FP32 (its closure), two are let off: one that only moves or drops values and leads only to
low readers (the cast may then stand before it, where the tensor is smaller), and one whose FP32 operand is 0-dim, which
does not promote in torch either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context
from fxprec.passes.cut_variables import FP32, LOW, Variables
from fxprec.passes.ir import CASTABLE, Precision, Rule, dtype_name
from fxprec.passes.mincut import solve
from fxprec.passes.op_names import cast_target, dtype_argument
from fxprec.passes.pins import commutes_with_rounding, exp_chains, unsafe_number, written_classes
from fxprec.passes.sites import (
    Site,
    bind_operands,
    bodies,
    body_calls,
    carries_float,
    dtype_reference,
    is_metadata,
    may_be_container,
    original,
    runs_bodies,
    site_of,
)

__all__ = ["place_by_cut"]

_NOTHING: Mapping[Node, Node] = {}


class _Decided(NamedTuple):
    """What is known of a node before the cut: the variables of what it reads and puts out."""

    read: int | None
    out: int | None
    rule: Rule
    why: str
    site: Site | None = None


def place_by_cut(gm: GraphModule, context: Context) -> list[str]:
    """Annotate ``meta["precision"]`` in the graph and the bodies it calls; 'node: reason' where a pin was overruled."""
    walk = _Walk(context)
    walk.graph(gm, None, Rule.KEEP if context.keep_output_dtype else Rule.FOLLOW)
    walk.let_off()
    _annotate(walk, walk.variables.dtypes(solve(walk.variables.problem())))
    return walk.variables.declined


class _Walk:
    """One forward walk over a graph and the bodies it calls."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.variables = Variables(context.low)
        self.decided: dict[Node, _Decided] = {}
        self.early: dict[Node, list[int]] = {}  # ops that commute with rounding -> their inputs
        self.roots: list[Node] = []  # LOW ops that make a written class
        self.classes: dict[Node, Node] = {}
        self.chains: set[Node] = set()
        self.calls: Counter[int] = Counter()
        self.results: dict[Node, tuple[object, ...]] = {}  # call of a body -> what the body returns

    def graph(self, gm: GraphModule, bound: Mapping[Node, Node] | None, returns: Rule) -> None:
        """Collect a graph. ``bound``: in a called body, the caller's operands that are ours to decide."""
        self.classes |= written_classes(gm.graph)
        self.chains |= exp_chains(gm.graph)
        self.calls += body_calls(gm)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self.placeholder(node, bound)
            elif node.op == "get_attr":
                self.source(node, "a parameter or buffer")
            elif node.op == "output":
                self.output(node, returns)
            elif not isinstance(node.target, HigherOrderOperator) or not self.higher_order(node, gm):
                self.call(site_of(node, self.context), carries_float(node.meta.get("dtype")))
            self.variables.note_dimensions(node)

    def placeholder(self, node: Node, bound: Mapping[Node, Node] | None) -> None:
        variables = self.variables
        if bound and node in bound:
            variables.tie_operand(node, bound[node])
            self.decide(node, None, Rule.KEEP, "as its caller gives it")
            return
        self.source(node, "an input")
        lowered = self.context.policy.lowers_sources and bound is None and node in variables.value
        if lowered and node not in self.classes and not may_be_container(node):
            variables.arrives[node], variables.value[node] = variables.value[node], LOW

    def source(self, node: Node, what: str) -> None:
        if carries_float(node.meta.get("dtype")):
            self.variables.value[node] = self.variables.pin(original(node.meta["dtype"]))
            if self.context.policy.lowers_sources:
                self.variables.unpromoting.add(node)
        self.decide(node, None, Rule.KEEP, what)

    def output(self, node: Node, returns: Rule) -> None:
        if returns is Rule.KEEP:
            sources = [source for source in node.all_input_nodes if source in self.variables.value]
            for source in sources:
                if isinstance(source.meta["dtype"], tuple):  # nobody can cast a tuple on its way out
                    self.variables.hold(source, self.variables.value[source], original(source.meta["dtype"]))
            self.variables.use_original(sources)
        self.decide(node, None, returns, "what the module returns")

    def call(self, site: Site, floats: bool) -> None:
        node = site.node
        if site.name in ("getitem", "getattr"):
            self.part(site, floats)
        elif site.name == "to":
            self.user_cast(site, floats)
        elif is_metadata(site):
            self.decide(node, None, Rule.FOLLOW, site.why)
        elif site.in_place:
            self.write(site, floats)
        elif self.classes.get(node, node) is not node and site.base in self.variables.value:
            self.view_of_written(site, floats)
        else:
            {Rule.KEEP: self.keep, Rule.LOW: self.low, Rule.FULL: self.full}.get(site.rule, self.follow)(site, floats)

    def part(self, site: Site, floats: bool) -> None:
        """Part of a value: in the dtype of the whole, since a cast can only stand after it."""
        node, whole = site.node, site.base
        if floats:
            returned = self.results.get(whole)
            if returned is not None and isinstance(node.args[1], int):
                whole = returned[node.args[1]]
            if isinstance(whole, Node) and whole in self.variables.value:
                self.variables.tie(node, whole)
                self.early[node] = []
            else:
                return self.source(node, site.why)
        self.decide(node, None, Rule.FOLLOW, site.why)

    def user_cast(self, site: Site, floats: bool) -> None:
        """Obeyed; what goes in may have any dtype."""
        node, variables = site.node, self.variables
        target, reference = cast_target(node), dtype_reference(node)
        if not floats:
            pass
        elif target in CASTABLE:
            variables.value[node] = variables.pin(target)
        elif reference is not None and reference in variables.value:
            variables.value[node] = variables.arriving(reference)
        elif site.base in variables.value:  # to a device
            variables.tie(node, site.base)
        else:
            return self.source(node, site.why)
        if floats and node in self.classes and site.base in variables.value and target in CASTABLE:
            variables.hold(node, variables.value[site.base], target)
            variables.tie(node, site.base)
        self.decide(node, None, Rule.KEEP, site.why)

    def write(self, site: Site, floats: bool) -> None:
        """In place: the result has the dtype of what is written, and no operand widens it."""
        node, variables = site.node, self.variables
        variable = variables.value.get(site.base)
        others = [source for source in (*site.data, *site.kept) if source is not site.base]
        if variable is not None and floats:
            variables.tie(node, site.base)
        if variable is None or (site.rule is Rule.KEEP and site.name != "copy"):
            if variable is not None:
                variables.hold(node, variable, original(site.base.meta["dtype"]))
            variables.use_original(others)
            return self.decide(node, None, Rule.KEEP, site.why)
        if site.name == "copy":  # it converts
            return self.decide(node, None, Rule.FOLLOW, site.why)
        why = self.unsafe(site)
        if why:
            variables.hold(node, variable, torch.float32)
        for source in () if site.promotes else others:
            variables.use(source, variable)
        self.decide(node, variable, site.rule, why or site.why)

    def view_of_written(self, site: Site, floats: bool) -> None:
        """One variable with the memory that it shares."""
        node, variables = site.node, self.variables
        variable = variables.value[site.base]
        if site.rule is Rule.KEEP and floats:
            variables.hold(node, variable, original(node.meta["dtype"]))
        elif site.rule in (Rule.LOW, Rule.FULL):
            variables.hold(node, variable, site.dtype or (self.context.low if site.rule is Rule.LOW else torch.float32))
        if floats:
            variables.tie(node, site.base)
        variables.use_original(site.kept)
        self.decide(node, variable, Rule.FOLLOW, site.why)

    def keep(self, site: Site, floats: bool) -> None:
        node, variables = site.node, self.variables
        variables.use_original((*site.data, *site.kept))
        if floats:
            self.make(site, variables.pin(original(node.meta["dtype"])), source=not (site.data or site.kept))
        self.decide(node, None, Rule.KEEP, site.why)

    def low(self, site: Site, floats: bool) -> None:
        node, variables = site.node, self.variables
        read = variables.pin(site.dtype or self.context.low)
        variables.use_data(site, read)
        if floats:
            variables.value[node] = read
            if node in self.classes and not isinstance(node.meta["dtype"], tuple):
                variables.value[node] = variables.new(node)
                variables.step(node, read, variables.value[node])
                self.roots.append(node)
        self.decide(node, read, Rule.LOW, site.why, out=read if floats else None)

    def full(self, site: Site, floats: bool) -> None:
        node, variables = site.node, self.variables
        read = out = FP32
        asked = dtype_argument(node)
        if site.has_mixed_kernel(self.context) and asked is None:
            read = out = variables.new(node)
        elif site.accumulates_wide(self.context, asked):
            read = variables.new()
        if asked is not None and floats:
            out = variables.pin(original(node.meta["dtype"]))
        variables.use_data(site, read)
        variables.close(variables.promoting(site), read)
        if floats:
            self.make(site, out)
        self.decide(node, read if site.data else None, Rule.FULL, site.why)

    def follow(self, site: Site, floats: bool) -> None:
        node, variables, info = site.node, self.variables, site.node.meta.get("dtype")
        if not site.data or dtype_argument(node) is not None or dtype_reference(node) is not None:
            variables.use_original(site.kept)
            if floats:  # made in the dtype that the call gives, or out of integers
                self.make(site, variables.pin(original(info)), source=True)
            return self.decide(node, None, Rule.FOLLOW, site.why)
        if not floats and (site.promotes or len(site.data) == 1):
            return self.decide(node, None, Rule.FOLLOW, f"{site.why}; reads what arrives")
        unsafe = self.unsafe(site)
        if unsafe:
            variable = FP32
        elif floats and original(info) is self.context.low:
            variable = LOW
        else:
            variable = variables.new(node)
        variables.use_data(site, variable)
        if commutes_with_rounding(site) and node not in self.classes:
            self.early[node] = variables.promoting(site)
        else:
            variables.close(variables.promoting(site), variable)
        if floats:
            variables.value[node] = variable
        self.decide(node, variable, site.rule, unsafe or site.why, site=site)

    def higher_order(self, node: Node, gm: GraphModule) -> bool:
        """Walk the bodies; False where the op is decided like any other and its bodies are left alone."""
        found, variables = bodies(node, gm), self.variables
        if not runs_bodies(node):
            for body in found:
                self.leave_alone(body)
            return False
        bound = bind_operands(node, gm) if len(found) == 1 and self.calls[id(found[0])] == 1 else None
        if bound is not None:
            self.graph(found[0], bound, Rule.FOLLOW)
            returned = found[0].graph.output_node().args[0]
            if isinstance(returned, Node):
                variables.tie(node, returned)
            else:
                self.results[node] = tuple(returned) if isinstance(returned, tuple | list) else ()
            self.decide(node, None, Rule.FOLLOW, "its body is decided as part of this graph")
            return True
        for body in found:
            if not any(inner in self.decided for inner in body.graph.nodes):
                self.graph(body, _NOTHING, Rule.KEEP)
        variables.use_original(node.all_input_nodes)
        self.source(node, "its bodies take and give original dtypes")
        return True

    def leave_alone(self, gm: GraphModule) -> None:
        for node in gm.graph.nodes:
            if carries_float(node.meta.get("dtype")) and node.op != "output":
                self.variables.value[node] = self.variables.pin(original(node.meta["dtype"]))
            self.decide(node, None, Rule.KEEP, "in the body of an op that keeps its dtypes")
            for body in bodies(node, gm):
                self.leave_alone(body)

    def make(self, site: Site, variable: int, source: bool = False) -> None:
        """A value of its own: in the dtype of a tensor that the call names (``dtype=x.dtype``), or as given."""
        variables, reference = self.variables, dtype_reference(site.node)
        if reference is not None and reference in variables.value:
            variable = variables.arriving(reference)
        variables.value[site.node] = variable
        if source and self.context.policy.lowers_sources:
            variables.unpromoting.add(site.node)

    def unsafe(self, site: Site) -> str | None:
        if site.node in self.chains:
            return "between an exponential and a reduction of it"
        return unsafe_number(site, self.context.low)

    def decide(
        self, node: Node, read: int | None, rule: Rule, why: str, *, out: int | None = None, site: Site | None = None
    ) -> None:
        value = self.variables.arriving(node) if node in self.variables.value else None
        self.decided[node] = _Decided(read, value if out is None else out, rule, why, site)

    def let_off(self) -> None:
        """Close the ops that commute with rounding too, unless all their readers are low."""
        low: set[Node] = set()
        for node, wide in reversed(self.early.items()):
            if all(self.reads_low(user, low) for user in node.users):
                low.add(node)
            else:
                self.variables.close(wide, self.variables.value[node])

    def reads_low(self, user: Node, low: set[Node]) -> bool:
        decided = self.decided.get(user)
        if decided is None or user.op == "output" or isinstance(user.target, HigherOrderOperator):
            return False
        return user in low or decided.read == LOW or (decided.read is None and decided.out in (None, LOW))


def _annotate(walk: _Walk, dtype: Callable[[int | None], torch.dtype | None]) -> None:
    for node, (read, out, rule, why, site) in walk.decided.items():
        reads, output, info = dtype(read), dtype(out), node.meta.get("dtype")
        if output is None and isinstance(info, torch.dtype) and info.is_floating_point:
            output = info
        compute = reads or (output if node.op.startswith("call") else None)
        if rule is Rule.FULL and compute is not None:
            compute = torch.float32
        if site is not None and read is not None and not walk.variables.is_pinned(read):
            why = f"{why}; {_reason(walk.variables, site, reads, dtype)}"
        node.meta["precision"] = Precision(reads, compute, output, rule, why)
        node.meta.pop("root_dtype", None)
    for node in walk.roots:
        lives = dtype(walk.variables.value[node])
        if lives is not node.meta["precision"].output:
            node.meta["root_dtype"] = lives


def _reason(variables: Variables, site: Site, reads: torch.dtype | None, dtype: Callable) -> str:
    for source in site.data:
        if source in variables.value and dtype(variables.arriving(source)) is reads:
            return f"%{source.name} is {dtype_name(reads)}"
    return "fewest bytes cast"
