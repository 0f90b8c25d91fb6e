"""Place casts as torch.autocast does on CUDA (placement="autocast"), by promoting dtypes forwards op by op.

Its LOW list runs low, its FP32 list in FP32, its promote list in the widest dtype that arrives; every other op runs on
what arrives, with torch's own promotion. Where eager autocast would fail on mixed dtypes (``index_put_``, ``lerp``) the
widest wins too. The op table says FULL of more ops than the lists name: those run on what arrives here, unless a policy
says otherwise, or they have no low kernel at all. KEEP and unknown ops get their original dtypes, and a number that a
low tensor cannot be filled with still makes it FP32: under autocast both would raise.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch.fx import Node

from fxprec.passes.dtypes.promotion import is_zero_dim
from fxprec.passes.graph.annotations import NON_TENSOR, Rule, notes
from fxprec.passes.ops.aliases import written_by
from fxprec.passes.ops.table import facts_at
from fxprec.passes.placement.pins import overflows, promoting_near_poles, saturating_chains
from fxprec.passes.placement.sites import (
    Site,
    annotate,
    assumed_original,
    base_of,
    carries_float,
    dtype_reference,
    names_dtype,
)
from fxprec.passes.placement.walk import Kind, Step, Walk


def place_as_autocast(walk: Walk) -> None:
    """Annotate ``meta["precision"]`` in the graphs of a walk."""
    promotion = _Promotion(walk)
    walk.read(
        {
            Kind.INPUT: promotion.plain, Kind.SOURCE: promotion.plain, Kind.SHARE: promotion.plain,
            Kind.CAST: promotion.plain, Kind.LOOKUP: promotion.lookup, Kind.COMPUTE: promotion.compute,
            Kind.WRITE: promotion.write,
        }
    )  # fmt: skip


class _Promotion:
    """Reads the steps in order: every value has its dtype as soon as its step was read."""

    def __init__(self, walk: Walk) -> None:
        self.walk, self.context, self.classes = walk, walk.context, walk.classes
        self.dtypes: dict[Node, torch.dtype] = {}
        self.sources: set[Node] = set()  # what nothing of the graph flowed into: it counts as low from O2 on
        self.near_poles: set[Node] = set()
        if self.context.policy.lowers_parameters:
            for graph, _, _ in walk.graphs:
                self.near_poles |= saturating_chains(graph, False, self.context.low).keys()
        # roots of written memory whose bits are read: it cannot be low
        self.original = {root for node, root in self.classes.items() if _reads_bits(node)}

    def assign(self, node: Node, dtype: torch.dtype, source: bool = False) -> None:
        """Give a value its dtype; ``source``: nothing of the graph flowed into it."""
        self.dtypes[node] = dtype
        if source and self.context.policy.lowers_sources:
            self.sources.add(node)

    def assign_named(self, site: Site, source: bool = False) -> None:
        """Give a value the dtype of the tensor that the call names, as it arrives.

        If it names none that has one of ours: low where the call names low since autocast had made a tensor low at
        capture (``names_tensors_dtype``), else the dtype of the original program.
        """
        node = site.node
        reference = None if site.facts.bits else dtype_reference(node)
        if reference is not None and reference in self.dtypes:
            self.dtypes[node] = self.dtypes[reference]
        else:
            low = notes(node).names_tensors_dtype
            self.assign(node, self.context.low if low else assumed_original(notes(node).dtype), source)

    def share(self, node: Node, whole: Node) -> None:
        self.dtypes[node] = self.dtypes[whole]
        if whole in self.sources:
            self.sources.add(node)

    def decide(self, node: Node, rule: Rule, why: str, reads: torch.dtype | None = None) -> None:
        annotate(node, rule, why, reads, self.dtypes.get(node))

    def plain(self, step: Step) -> None:
        """Read the step of a node that computes nothing."""
        if step.kind is Kind.CAST and step.site is not None and step.floats:
            self.assign_named(step.site)
        elif step.of is not None:
            self.share(step.node, step.of)
        elif step.floats:
            annotations = notes(step.node)
            self.assign(step.node, assumed_original(annotations.dtype), source=not annotations.handed_over)
        self.decide(step.node, step.rule, step.why)

    def lookup(self, step: Step) -> None:
        assert step.site is not None
        wide = self.dtypes[step.site.base] is torch.float32
        (self.compute if not wide and self.walk.sums_low_backward(step.site) else self.plain)(step)

    def compute(self, step: Step) -> None:
        assert step.site is not None
        site, floats = promoting_near_poles(step.site, self.near_poles), step.floats
        # A call that writes to its data must see them uncast.
        rule = self.listed(site) if set(site.data).isdisjoint(written_by(site.node)) else Rule.KEEP
        if self.walk.shares_written(site.node) and step.of is not None:
            if floats:  # a view of memory that is written: a cast would miss the writes
                self.share(site.node, site.base)
            return self.decide(site.node, Rule.FOLLOW, site.why)
        if rule is Rule.KEEP:
            return self.settle(site, floats, rule, None, source=not (site.data or site.kept))
        if not site.data or (names_dtype(site.node) and rule not in (Rule.LOW, Rule.FULL)):
            # Made of no floats it is a source, unless it is to be FP32.
            return self.settle(site, floats, Rule.FOLLOW, None, source=rule is not Rule.FULL)
        if site.dtype is not None:
            reads = site.dtype
        elif rule is Rule.FULL or overflows(site, self.context.low):
            reads = torch.float32
        else:
            reads = self.context.low if rule is Rule.LOW else self.widest(site.data)
        # A comparison or a flag takes what arrives, unless the lists name it or its kernel wants one dtype.
        if reads is None or (
            not floats and rule not in (Rule.LOW, Rule.FULL) and (site.facts.native_promotion or len(site.data) == 1)
        ):
            return self.settle(site, floats, Rule.FOLLOW, None)
        if not floats or reads is not self.context.low or not self.walk.sums_low_backward(site):
            return self.settle(site, floats, rule, reads)
        # autocast would have FP32 here, and add up gradients in FP32. So read FP32, and cast the result back to what
        # arrives now.
        self.settle(site, floats, rule, torch.float32)
        notes(site.node).stored_dtype = self.dtypes[site.node] = reads

    def settle(self, site: Site, floats: bool, rule: Rule, reads: torch.dtype | None, source: bool = False) -> None:
        """Give the result its dtype, and write the decision. ``reads``: None where the op takes what arrives."""
        node = site.node
        # An op that reads nothing of its own, or puts out FP32 whatever it reads (gru): its original or named dtype.
        wide = reads is None or site.facts.wide
        if floats and (wide or names_dtype(node)):
            self.assign_named(site, source)
        elif floats and reads is not None:
            self.dtypes[node] = reads
        self.decide(node, rule, site.why, reads)
        if node in self.original and node in self.dtypes:
            dtype = assumed_original(notes(node).dtype)
            if dtype is not self.dtypes[node]:
                notes(node).stored_dtype = self.dtypes[node] = dtype

    def write(self, step: Step) -> None:
        """Decide an in-place op: it computes in the dtype of what it writes to."""
        assert step.site is not None
        site, written = step.site, self.dtypes.get(step.site.base)
        if step.floats:
            self.share(site.node, site.base)
        if site.name == "copy" and written is not None:
            return self.decide(site.node, Rule.FOLLOW, site.why)
        keep = written is None or site.rule is Rule.KEEP
        self.decide(site.node, Rule.KEEP if keep else site.rule, site.why, None if keep else written)

    def listed(self, site: Site) -> Rule:
        """Return what autocast's lists say of an op, unless an override or the level says more."""
        if site.dtype is not None or not site.is_as_in_table:
            return site.rule
        if site.facts.autocast is not None:
            return site.facts.autocast
        if site.rule is Rule.FULL and site.facts.low_kernel:
            return Rule.PROMOTE
        return site.rule

    def widest(self, sources: Iterable[Node]) -> torch.dtype | None:
        """Return the widest float that arrives; 0-dim ones only count among themselves."""
        known = [source for source in sources if source in self.dtypes]
        dimensioned = [source for source in known if not is_zero_dim(source)]
        found = [self.context.low if source in self.sources else self.dtypes[source] for source in dimensioned or known]
        return reduce(torch.promote_types, found) if found else None


def _reads_bits(node: Node) -> bool:
    """Return whether it is a view of floats as other numbers, which wants them in their original dtype."""
    view = node.op.startswith("call") and facts_at(node).view and base_of(node) is not node
    floats = carries_float(notes(node).dtype) or notes(node).dtype is NON_TENSOR
    return view and not floats and carries_float(notes(base_of(node)).dtype) and notes(node).op.name != "to"
