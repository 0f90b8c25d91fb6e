"""lower="pays": which LOW ops stay FP32, because on this device lowering them takes longer than it saves.

The same minimum cut as ``mincut``, with time in place of bytes, and one free variable more for each LOW op of
known sizes: what it takes longer in FP32 (or less long). Casts take their time, weights that of their shadows. So two
products in a row may be lowered together that alone would each lose::

    %linear    4 us in FP32, 2 us low
    %relu
    %linear_1  4 us in FP32, 2 us low       a cast takes 1.5 us: one of them lowered 2 + 2 * 1.5 > 4,
                                            both 2 * 2 + 2 * 1.5 < 2 * 4

Only the verdict on LOW ops is kept. Where all of them pay, the graph is that of ``lower="always"``.

Safety stays as it is. What an override of the user's lowers is lowered, whatever it costs, and so are ops of unknown
size or cost.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import UNKNOWN, module_path, notes
from fxprec.passes.placement.mincut import CutWalk
from fxprec.passes.placement.op_costs import OpCosts, Price, Verdict
from fxprec.passes.placement.sites import Site, names_dtype
from fxprec.passes.placement.solver import solve


def ops_kept_in_fp32(gm: GraphModule, context: Context) -> Verdict:
    """The LOW ops, of the graph and of the bodies it calls, that are faster left in FP32; annotates nothing.

    The verdict has a node and a reason for each, and by operator how many could not be weighed: of unknown sizes, or
    of a kind without a cost. What an override names is not weighed. Without costs in ``context`` the verdict is empty.
    """
    if context.costs is None:
        return Verdict()
    costs = OpCosts.of(context.costs, context)
    walk = PricedWalk(context, costs)
    walk.run(gm)
    walk.widen_unless_read_low()
    full = solve(walk.variables.problem())
    casts_around = walk.variables.casts_around(full)
    stays = {}
    for node, (site, price, variable) in walk.priced.items():
        if full[variable]:
            wide, low = casts_around(node, variable, site.data)
            stays[node] = costs.why(price, price.full + wide, price.low + low)
    return Verdict(stays, walk.unpriced, costs if stays else None)


class PricedWalk(CutWalk):
    """The cut problem with LOW ops that may stay FP32."""

    def __init__(self, context: Context, costs: OpCosts) -> None:
        super().__init__(context, Verdict(costs=costs))
        self._costs = costs
        self.priced: dict[Node, tuple[Site, Price, int]] = {}
        self.unpriced: dict[Node, str] = {}

    def low(self, site: Site, floats: bool) -> None:
        node, variables = site.node, self.variables
        price = self._price(site, floats)
        if isinstance(price, str):
            self.unpriced[node] = price
        if not isinstance(price, Price):
            return super().low(site, floats)
        variable = variables.value[node] = variables.priced(price.full - price.low)
        variables.read_data(site, variable)
        if node in self.classes:  # what is written in place later on may live in FP32 although the op is low
            variables.value[node] = variables.new(node)
            variables.add_cast_behind(node, variable, variables.value[node])
            variables.widen_with((variable,), variables.value[node])
        self.priced[node] = site, price, variable
        self.decide(node, site.rule, site.why, variable)

    def _price(self, site: Site, floats: bool) -> Price | str | None:
        """None: it is not ours to ask."""
        node = site.node
        if site.dtype is not None or not floats or self.is_overridden(site):
            return None
        dtype = notes(node).dtype
        if dtype is UNKNOWN:
            return "sizes unknown"
        if not isinstance(dtype, tuple) and (dtype is not torch.float32 or names_dtype(node)):
            return None
        return self._costs.price(site)

    def is_overridden(self, site: Site) -> bool:
        """Return whether the policy names it: then that stands, whatever it costs."""
        path = module_path(site.node)
        return any(each.match(site.name, site.node, path) for each in self.context.policy.overrides)
