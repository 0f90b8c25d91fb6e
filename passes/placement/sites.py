"""Look at a node as placements do before they decide it: its rule, its data ports, what its dtype depends on.

A *site* is one call as the policy sees it. ``data`` are the float arguments on the ports that carry the rule's dtype,
``kept`` the others (a norm's weight), which arrive in their original dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import (
    UNKNOWN,
    Arrival,
    DTypeInfo,
    Precision,
    Rule,
    arg_nodes,
    argument,
    is_castable,
    leaves,
    module_path,
    notes,
)
from fxprec.passes.ops.names import cast_target, dtype_argument
from fxprec.passes.ops.table import OpRule, facts_at, facts_of, row_of
from fxprec.passes.torch_internals import HigherOrderOperator


class UnderAutocast(IntEnum):
    """Dtype that a value would have under torch.autocast, and how it came to have it.

    Only values that a weight or a float input went into are told apart, since only they have gradients. An op's result
    is the highest of its operands, unless the op itself makes it low or FP32; one that promotes is LOWERED only if all
    its operands are.
    """

    #: Neither a weight nor a float input went into it.
    NOTHING = 0
    #: FP32: a weight, or made of weights without a product, as a table of embeddings is.
    TABLE = 1
    #: FP32, although a product may be behind it: an input, or computed in FP32 by autocast after a product.
    WIDENED = 2
    #: Low: a product, or a cast of the user's, made it so.
    LOWERED = 3


def values_under_autocast(graph: Graph, operands: Mapping[Node, Node], known: dict[Node, UnderAutocast]) -> None:
    """Add each value of a graph to ``known``, which has those of its callers already.

    ``operands``: placeholder of a called body -> what it is given.
    """
    for node in graph.nodes:
        row = facts_at(node)
        sources = [
            known.get(each, UnderAutocast.NOTHING) for _, each in arg_nodes(node) if carries_float(notes(each).dtype)
        ]
        found = max(sources, default=UnderAutocast.NOTHING)
        if row.rule is Rule.PROMOTE and found is UnderAutocast.LOWERED and min(sources) is not UnderAutocast.LOWERED:
            found = UnderAutocast.WIDENED  # autocast computes in the widest dtype, which is FP32 here
        cast = cast_target(node) if notes(node).op.name == "to" and not notes(node).inserted else None
        wide = row.autocast is Rule.FULL or not row.low_kernel or cast is torch.float32
        low = (row.autocast or row.rule) is Rule.LOW or cast in LOW_DTYPES
        if notes(node).kind == "parameter":
            found = UnderAutocast.TABLE
        elif node.op == "placeholder" and node not in operands and carries_float(notes(node).dtype):
            found = UnderAutocast.WIDENED  # as earlier layers may have made it
        elif node in operands:
            found = known.get(operands[node], UnderAutocast.NOTHING)
        elif low or isinstance(node.target, HigherOrderOperator):  # what a body gives may come from a product
            found = UnderAutocast.LOWERED
        elif wide:
            found = min(found, UnderAutocast.WIDENED)
        known[node] = found


class Site(NamedTuple):
    """Call as the policy sees it.

    Attributes:
        name: canonical op, or the callee's name where it is no op.
        facts: its row of the table; where it has none, one that states nothing.
        rule: what the policy says; LOW or FULL where it names a dtype.
        dtype: the dtype that the policy names, else None.
        why: the policy's reason.
        in_place: the first argument is written.
        data: float arguments on the ports that carry the rule's dtype, in order.
        kept: the other float arguments.
        lowered: level O3 lowers what is FULL in the table.
    """

    node: Node
    name: str
    facts: OpRule
    rule: Rule
    dtype: torch.dtype | None
    why: str
    in_place: bool
    data: tuple[Node, ...]
    kept: tuple[Node, ...]
    lowered: bool

    @property
    def base(self) -> Node:
        """The first argument: what a view looks at, a write writes, a cast casts."""
        return base_of(self.node)

    @property
    def is_as_in_table(self) -> bool:
        """True if the rule is that of the op table, and the policy says nothing else of the op."""
        # By the reason, since whoever decides otherwise gives another: an override's begins with "override", a level's
        # with "level", looks at the call have texts of their own, and rows of the user's are of ops without one here.
        return self.why == self.facts.why

    def has_mixed_kernel(self, context: Context) -> bool:
        """Return whether an eager kernel reads and writes low, and computes in FP32 inside."""
        return self.dtype is None and context.native_mixed and context.device in self.facts.mixed

    def sums_low_backward(self, context: Context, under_autocast: Callable[[Node], UnderAutocast]) -> bool:
        """Return whether the kernel's backward would add up in low where torch.autocast's adds up in FP32.

        A lookup always counts. Another op counts if it reads a weight or, at O1, an FP32 activation: at O2 and O3
        activations are low anyway. An op that pads counts for activations only if it pads by more than four a side.
        """
        free = self.rule in (Rule.FOLLOW, Rule.PROMOTE) and context.device in self.facts.backward_sums
        if not free or (self.facts.pads and not _repeats(self.node)):
            return False
        base = under_autocast(self.base)
        activations = not context.policy.lowers_sources
        if self.facts.pads:
            return base is UnderAutocast.TABLE or (activations and not _is_narrow(self.node))
        return self.facts.lookup or base is UnderAutocast.TABLE or (activations and base is UnderAutocast.WIDENED)

    def accumulates_wide(self, context: Context, asked: torch.dtype | None) -> bool:
        """Return whether the kernel takes a dtype to compute in, ours or the user's, so that it may read low.

        ``asked``: the dtype that the call names (``x.sum(dtype=torch.float32)``); None: it names none.
        """
        if self.dtype is not None or not context.native_mixed:
            return False
        if asked is None:  # float64 may arrive where nobody knows: a dtype would narrow it
            return self.facts.dtype_keyword and notes(self.node).dtype is not UNKNOWN
        return asked is torch.float32 and "dtype" in self.node.kwargs


def _repeats(node: Node) -> bool:
    """Return whether an op that pads does it with values of its input, not with a constant."""
    mode = argument(node, 2, "mode")
    name = mode if isinstance(mode, str) else str(node.target)  # aten has an op for each mode
    return any(part in name for part in ("reflect", "replic", "circular"))


def _is_narrow(node: Node) -> bool:
    """Return whether an op pads by at most four values a side, as convolutions of width 9 want it."""
    return all(isinstance(each, int) and each <= 4 for each in leaves(argument(node, 1, "pad", ())))


def site_of(node: Node, context: Context) -> Site:
    """Ask the table and the policy about one call."""
    annotations = notes(node)
    op, info = annotations.op, annotations.dtype
    name = op.name or getattr(node.target, "__name__", str(node.target))
    facts = facts_of(op.name)
    sources = [(port, source, notes(source)) for port, source in arg_nodes(node)]
    rule, why, lowered = context.policy.resolve(name, node, module_path(node), row_of(op.name), context.device)
    if annotations.autocast is False:
        rule, why = Rule.KEEP, "inside autocast(enabled=False)"
    elif facts.bits and names_dtype(node):
        rule, why = _rule_of_bits(node, context), "it reads bits, which are those of its input's original dtype"
    elif any(noted.sparse for _, _, noted in sources) and not facts.arrives:
        rule, why = Rule.KEEP, "a sparse operand: few of its kernels take low numbers"
    elif isinstance(info, torch.dtype) and info.is_complex:
        rule, why = Rule.KEEP, "complex numbers are never touched"
    elif _takes_wide(node):
        # Lowered, it would give a result of another dtype than its annotations say.
        rule, why = Rule.KEEP, "of its results that are used one is FP32 whatever arrives"
    # An override, or torch's registry, may name a dtype in place of a rule.
    dtype = None
    if isinstance(rule, torch.dtype):
        dtype, rule = rule, Rule.FULL if rule is torch.float32 else Rule.LOW
    data: list[Node] = []
    kept: list[Node] = []
    for port, source, noted in sources:
        if carries_float(noted.dtype):
            (data if facts.ports is None or port in facts.ports else kept).append(source)
    return Site(node, name, facts, rule, dtype, why, op.in_place, tuple(data), tuple(kept), lowered)


def _rule_of_bits(node: Node, context: Context) -> Rule | torch.dtype:
    """Return the rule of ``x.view(torch.int32)``.

    Its argument keeps its original dtype. At O3 that is FP32 of a value that is annotated as low, since the annotations
    have the weights as low already: unless a cast of the user's made it low.
    """
    source = base_of(node)
    if not context.policy.lowers_parameters or notes(source).dtype not in (context.low, UNKNOWN):
        return Rule.KEEP
    while facts_at(source).view and notes(source).op.name != "to" and base_of(source) is not source:
        source = base_of(source)
    return Rule.KEEP if notes(source).op.name == "to" and cast_target(source) is not None else torch.float32


def _takes_wide(node: Node) -> bool:
    """Return whether anybody uses a result that stays wide in a lowered op (an attention kernel's logsumexp)."""
    wide = notes(node).wide
    return bool(wide) and any(
        user.target is not operator.getitem or (user.args[1] in wide and bool(user.users)) for user in node.users
    )


def base_of(node: Node) -> Node:
    """Return the first argument of a call, of an einsum the first operand; where that is no node, the call itself."""
    first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    if isinstance(first, str):
        first = next((source for _, source in arg_nodes(node)), None)
    return first if isinstance(first, Node) else node


def is_metadata(site: Site) -> bool:
    """Return whether only sizes, flags and the like come out: then any dtype may go in."""
    facts = site.facts
    return facts.result == "none" and facts.rule is Rule.KEEP and not facts.reads_values


def carries_float(info: DTypeInfo | None) -> bool:
    """Return whether a value is, holds, or may be a float that a policy can cast."""
    return any(map(carries_float, info)) if isinstance(info, tuple) else is_castable(info)


def assumed_original(info: DTypeInfo | None) -> torch.dtype:
    """Return the original dtype of a castable value (of the first castable element); FP32 where nobody can know it."""
    if isinstance(info, tuple):
        return assumed_original(next(element for element in info if carries_float(element)))
    return info if isinstance(info, torch.dtype) and info is not UNKNOWN else torch.float32


def dtype_reference(node: Node) -> Node | None:
    """Return the tensor whose dtype a call names: ``x.to(y.dtype)``, ``zeros(n, dtype=y.dtype)``, ``x.type_as(y)``."""
    for source in node.all_input_nodes:
        if notes(source).op.name == "getattr" and source.args[1] == "dtype" and isinstance(source.args[0], Node):
            return source.args[0]
    if notes(node).op.name != "to":
        return None
    return next((each for port, each in arg_nodes(node) if port != 0 and carries_float(notes(each).dtype)), None)


def names_dtype(node: Node) -> bool:
    """Return whether a call says which dtype its result has."""
    return dtype_argument(node) is not None or dtype_reference(node) is not None


def annotate(node: Node, rule: Rule, why: str, reads: torch.dtype | None, output: torch.dtype | None) -> None:
    """Write the decision for a node. ``reads``: the dtype that it asks for, ``output``: of its float; None: none."""
    annotations = notes(node)
    info = annotations.dtype
    if output is None and isinstance(info, torch.dtype) and info.is_floating_point:
        output = info
    compute = reads or (output if node.op.startswith("call") else None)
    if rule is Rule.FULL and compute is not None:
        compute = torch.float32  # inside, also where a norm's kernel reads and writes low
    if output is torch.float64:  # of float64, which nothing casts, whatever the rule
        compute = output
    arrival = reads or (Arrival.ORIGINAL if rule is Rule.KEEP else Arrival.AS_IT_ARRIVES)
    # Parts, casts and copies take what arrives. But a getitem with ``reads`` is a lookup, and asks for it as ops do.
    part = facts_of(annotations.op.name).arrives and (reads is None or annotations.op.name != "getitem")
    if not node.all_input_nodes or annotations.as_written or part:
        arrival = Arrival.AS_IT_ARRIVES
    annotations.precision = Precision(arrival, compute, output, rule, why)
    # Fields of an earlier decision: tune decides the same graph many times.
    annotations.discard("stored_dtype", "names_fp32")
