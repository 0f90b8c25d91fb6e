"""From which sizes kernels of ours gain on a GPU: of few elements its host loses more time than the device saves.

Each of torch's ops is a call of C++, and an autograd node of C++; one of our kernels is as much Python as several of
them. Where tensors are small the device waits for its host, and what it saves counts for nothing. Of a million elements
a pass over memory takes a GPU a microsecond, a region's Python 50 to 150 on the hosts of an H100 and an H200 that were
measured (forward and backward, 2026-11-27): eight layers of BERT of 64 x 64 elements took 1.18 of autocast's time with
their regions as kernels, 0.96 without.
"""

from __future__ import annotations

from math import prod
from typing import Final

from torch import Tensor

from fxprec.passes.fusion.regions import Region
from fxprec.passes.graph.annotations import notes

#: Elements from which fewer bytes weigh more than calls.
FEWEST: Final = 1 << 20
#: Ops from which one kernel is less work for the host, too: forward and backward together, as many calls of torch.
_FEWEST_OPS: Final = 5


def is_large(x: Tensor) -> bool:
    """Whether a GPU saves more time by a kernel than its host loses; where there is none, as for tests, any size is."""
    return x.numel() >= FEWEST or x.device.type != "cuda"


def elements_of(region: Region) -> int:
    """Of a region that is better left to torch's ops, how many it has; 0: a kernel gains, or its sizes are unknown.

    A bias is no op of its own: it goes back into its product.
    """
    shape = region.shape
    sizes = [size for size in shape or () if isinstance(size, int)]
    if shape is None or len(sizes) < len(shape) or prod(sizes) >= FEWEST:
        return 0
    ops = sum(notes(node).op.name != "to" and not notes(node).state("bias_of") for node in region.nodes)
    return prod(sizes) if ops < _FEWEST_OPS else 0


def outgrown_at(given: int, region: int) -> int:
    """Elements of all inputs from which a region gains that has so many for ``given``: both grow alike."""
    return given * FEWEST // region
