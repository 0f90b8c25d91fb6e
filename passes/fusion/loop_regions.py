"""Which nodes and regions compiled loops may take on a CPU: row operations that torch runs in several passes.

A call, whose sizes are known, prices its region and decides (``kernels/rows/run/gains.py``).

What follows a convolution or a batch norm, or a sum of it, stays: at ``freeze`` oneDNN takes sums and activations into
its convolutions, and in training norms stand between. A dropout stays, since its random numbers are torch's.
"""

from __future__ import annotations

from torch.fx import Node

from fxprec.kernels.rows.program.prices import LoopPrices, count_aten_kernels, is_faster_by_torch, may_gain_alone
from fxprec.passes.fusion.regions import Region, saves
from fxprec.passes.fusion.row_operations import drops, is_row_operation
from fxprec.passes.graph.annotations import notes
from fxprec.passes.ops.table import facts_of


def suits_loops(node: Node, prices: LoopPrices | None) -> bool:
    """Return whether a loop may hold the node. ``prices`` tell where torch's kernel takes less time; None: nowhere."""
    if not is_row_operation(node) or drops(node) or (prices is not None and is_faster_by_torch(node, prices)):
        return False
    sources = [*node.all_input_nodes]
    sources += [each for source in sources if notes(source).op.name == "add" for each in source.all_input_nodes]
    return not any(map(_makes_images, sources))


def _makes_images(node: Node) -> bool:
    name = notes(node).op.name
    return name == "batch_norm" or facts_of(name).cost in ("convolution", "transposed convolution")


def gains(region: Region) -> bool:
    """Return whether torch runs more than one kernel for a region, or one that is slow, be it for one node."""
    worth = count_aten_kernels(region.nodes) > 1 or any(map(may_gain_alone, region.nodes))
    return worth and bool(region.outputs) and (saves(region) or len(region.nodes) == 1)
