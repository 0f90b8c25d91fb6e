"""Estimate what the nodes of a rewritten graph take, by the device's costs, for the page's strip and cards."""

from __future__ import annotations

from typing import Final

import torch
from torch.fx import Graph, Node

from fxprec.inspection.nodes import is_inserted, is_shadow
from fxprec.passes.graph.annotations import notes
from fxprec.passes.placement.op_costs import OpCosts, elements
from fxprec.passes.placement.sites import site_of
from fxprec.settings import Settings

#: Sizes, or what the op costs, are not known.
UNKNOWN: Final = -1.0


class Times:
    """Estimated times of the nodes of a conversion's graphs.

    Args:
        settings: of the conversion.
        gradients: whether the backward is counted.
    """

    def __init__(self, settings: Settings, gradients: bool) -> None:
        self._context = settings.context(gradients)
        costs = settings.device_costs
        self._costs = costs if settings.dtype in costs.curves else None
        self._of_graphs: dict[Graph, OpCosts] = {}

    def of(self, node: Node) -> float:
        """Return seconds of a step; 0 for inputs, shadows and casts within regions; ``UNKNOWN`` for other dtypes."""
        if node.op == "placeholder" or is_shadow(node) or notes(node).state("in_region"):
            return 0.0
        costs = self._of_graph(node.graph)
        if costs is None or elements(node) is None or node.op == "call_module":
            return UNKNOWN
        precision = notes(node).precision
        if is_inserted(node):
            return costs.cast(node.all_input_nodes[0]) * 1e-12
        site = site_of(node, self._context)
        priced = site.facts.cost is not None
        dtype = (precision.compute if priced else precision.output) or torch.float32
        if dtype not in (torch.float32, self._context.low):  # float64, or a low dtype of this node's own
            return UNKNOWN
        # Ops without a cost of their own are bound by memory.
        if not priced:
            return costs.stream(node, dtype) * 1e-12
        price = costs.price(site)
        if isinstance(price, str):
            return UNKNOWN
        return (price.low if dtype is self._context.low else price.full) * 1e-12

    def _of_graph(self, graph: Graph) -> OpCosts | None:
        if self._costs is None:
            return None
        if graph not in self._of_graphs:
            context = self._context
            self._of_graphs[graph] = OpCosts.of(self._costs, context)
            self._of_graphs[graph].enter(graph)
        return self._of_graphs[graph]
