"""Decides which row operations and regions are worth a kernel of ours: by their sizes on a GPU, by their ops on a CPU.

On a GPU a region of few elements is left to torch (``kernels/calls/sizes.py`` says why).

On a CPU compiled loops take row operations that torch runs in several kernels; a call, whose sizes are known, prices
its region and decides (``kernels/rows/run/gains.py``). What follows a convolution or a batch norm, or a sum of it, is
not taken: at ``freeze`` oneDNN takes sums and activations into its convolutions, and in training norms stand between. A
dropout is not taken either, since its random numbers are torch's.
"""

from __future__ import annotations

from math import isqrt, prod
from typing import Final

from torch.fx import Node

from fxprec.kernels.calls import sizes
from fxprec.kernels.rows.program.prices import LoopPrices, count_aten_kernels, is_faster_by_torch, may_gain_alone
from fxprec.passes.fusion.regions import Region, saves
from fxprec.passes.fusion.row_operations import drops, is_row_operation
from fxprec.passes.graph.annotations import notes
from fxprec.passes.ops.table import facts_of

#: Ops from which one kernel is less work for the host, too: forward and backward together, as many calls of torch.
_FEWEST_OPS: Final = 5


def has_few_ops(region: Region) -> bool:
    """Return whether a kernel is more work for the host than torch's ops. A bias is none: its product adds it."""
    return sum(notes(node).op.name != "to" and not notes(node).state("bias_of") for node in region.nodes) < _FEWEST_OPS


def elements_of(region: Region) -> int | None:
    """Return the elements of a region's values, broadcast; None where its sizes are not known, or vary."""
    sizes = [size for size in region.shape or () if isinstance(size, int)]
    return None if region.shape is None or len(sizes) < len(region.shape) else prod(sizes)


def grows_to(given: int, largest: int) -> int:
    """Elements of an input, of which there were ``given``, up to which no region reaches ``sizes.FEWEST``.

    Args:
        largest: elements of the largest region, fewer than those. It may grow as the square of an input, as scores of
            a sequence do.
    """
    return given * isqrt(sizes.FEWEST // max(1, largest))


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
