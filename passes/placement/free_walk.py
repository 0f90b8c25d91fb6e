"""The walk over a graph in which every op may be FP32 or low, whatever its rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import Rule, notes
from fxprec.passes.ops.names import dtype_argument
from fxprec.passes.placement.mincut import PricedWalk
from fxprec.passes.placement.op_costs import OpCosts
from fxprec.passes.placement.pins import commutes_with_rounding
from fxprec.passes.placement.sites import Site, dtype_reference
from fxprec.passes.placement.solver import CutProblem, Tensor


class FreeWalk(PricedWalk):
    """The cut problem in which ops that follow, promote or are FULL are free as LOW ones are."""

    def __init__(self, context: Context, costs: OpCosts) -> None:
        super().__init__(context, costs)
        self.free: dict[Node, int] = {}
        self.parts: dict[Node, tuple[Node, ...]] = {}  # value -> those that it is made of without a rounding

    def share_dtype(self, node: Node, whole: Node) -> None:
        super().share_dtype(node, whole)
        self.parts[node] = (whole,)

    def bind_operand(self, placeholder: Node, operand: Node) -> None:
        super().bind_operand(placeholder, operand)
        self.parts[placeholder] = (operand,)

    def read_by_user_cast(self, node: Node, source: Node) -> None:
        super().read_by_user_cast(node, source)
        self.parts[node] = (source,)

    def view_of_written(self, site: Site, floats: bool) -> None:
        super().view_of_written(site, floats)
        self.parts[site.node] = (site.base,)

    def low(self, site: Site, floats: bool) -> None:
        super().low(site, floats)
        if site.node in self.priced:
            self.free[site.node] = self.priced[site.node][2]

    def full(self, site: Site, floats: bool) -> None:
        node, variables = site.node, self.variables
        if self.is_overridden(site) or not floats or notes(node).dtype is not torch.float32:
            return super().full(site, floats)
        if not self._may_be_low(site):
            super().full(site, floats)  # a norm's data may still be low, and the values of a sum
            read = self.decided[node].read
            if read is not None and self.has(node):
                self.free[node] = read
            return None
        variable = variables.value[node] = variables.new(node)
        variables.read_data(site, variable)
        self.free[node] = variable
        return self.decide(node, site.rule, site.why, variable, site=site)

    def _may_be_low(self, site: Site) -> bool:
        node, asked = site.node, dtype_argument(site.node)
        own = site.has_mixed_kernel(self.context) or site.accumulates_wide(self.context, asked)
        safe = self.context.low is torch.bfloat16 and site.facts.low_kernel and node not in self.squares
        safe = safe and not any(map(self.origins.counts, (node, *site.data)))
        return safe and not own and asked is None and dtype_reference(node) is None and node not in self.classes

    def follow(self, site: Site, floats: bool) -> None:
        super().follow(site, floats)
        decided = self.decided[site.node]
        if site.facts.exact or commutes_with_rounding(site):
            self.parts[site.node] = site.data
        if floats and decided.read is not None and notes(site.node).dtype is torch.float32:
            self.free[site.node] = decided.read

    def promote(self, site: Site, variable: int) -> None:
        """FP32 inputs make nobody FP32: that, too, is weighed. But of memory that is written there is one dtype."""
        if site.node in self.classes:
            super().promote(site, variable)

    def tie(self, choices: Mapping[Node, int]) -> None:
        """Tie all ops of a name to one decision."""
        names: dict[str, list[int]] = defaultdict(list)
        for node, variable in choices.items():
            names[node.name].append(variable)
        for first, *others in names.values():
            for other in others:
                self.variables.widen_with((first,), other)
                self.variables.widen_with((other,), first)

    def digits_of(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes that made the digits of a value; itself unless the op only moves values."""
        found: dict[Node, None] = {}
        waiting, seen = [node], {node}
        while waiting:
            each = waiting.pop()
            parts = [part for part in self.parts.get(each, ()) if self.has(part)]
            if not parts:
                found[self.variables.same(each)] = None
            waiting += [part for part in parts if part not in seen]
            seen.update(parts)
        return tuple(found)

    def errors(
        self, time: CutProblem, squares: Mapping[Node, float], reads: Mapping[tuple[Node, Node], float]
    ) -> CutProblem:
        """Return the cut problem of squared errors: what is lost, in the place of what is taken.

        A tensor whose readers would all widen it for nothing costs where it is FP32 and one of them low, and no more.
        """
        value = self.variables.value
        unary: dict[int, float] = defaultdict(float)
        for node, square in squares.items():
            if node in value:
                unary[value[node]] -= square
        tensors = []
        for (node, reader), square in reads.items():
            read = self._read_in(node, reader)
            made = value.get(self._unwidened(node))
            if read is not None and made is not None and made != read and square > 0:
                tensors.append(Tensor(made, (read,), square, frozenset((read,))))
        return replace(time, tensors=tuple(tensors), unary=unary)

    def _read_in(self, node: Node, reader: Node) -> int | None:
        """The variable in whose dtype a value is read; None where the reader takes what arrives."""
        decided = self.decided.get(reader)
        if decided is None:
            return None
        known = (decided.read, decided.out)
        return next((each for each in known if each is not None and self.variables.is_read(node, each)), None)

    def _unwidened(self, node: Node) -> Node:
        """Return what a cast of the user's to FP32 was made of: it has no more digits than that."""
        while notes(node).op.name == "to" and len(parts := self.parts.get(node, ())) == 1 and self.has(parts[0]):
            if self.variables.dtype_of(self.variables.value[node]) is not torch.float32:
                break
            node = parts[0]
        return node

    def streams(self, node: Node) -> tuple[float, float]:
        """Picoseconds of an op that is no LOW one, in FP32 and low."""
        assert isinstance(self.verdict.costs, OpCosts)
        costs = self.verdict.costs
        return costs.stream(node, torch.float32), costs.stream(node, costs.low)

    def base(self) -> float:
        """Picoseconds of all ops where the free ones are low."""
        total = 0.0
        for node, decided in self.decided.items():
            if node in self.priced:
                total += self.priced[node][1].low
            elif node.op.startswith("call") and decided.rule is not Rule.KEEP:
                out = decided.out
                wide = (
                    out is not None
                    and self.variables.is_pinned(out)
                    and self.variables.dtype_of(out) is not self.context.low
                )
                total += self.streams(node)[0 if wide else 1]
        return total
