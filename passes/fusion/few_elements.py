"""From which sizes kernels of ours gain on a GPU: of few elements its host loses more time than the device saves.

Each of torch's ops is a call of C++, and an autograd node of C++; one of our kernels is as much Python as several of
them. Where tensors are small the device waits for its host, and what it saves counts for nothing. Of a million elements
a pass over memory takes a GPU a microsecond, a region's Python took an H100's host 50 to 150, forward and backward
(2026-11-27): eight layers of BERT of 64 x 64 elements took 1.18 of autocast's time with their regions as kernels, 0.96
without.
"""

from __future__ import annotations

from math import isqrt, prod
from typing import Final

from torch import Tensor

from fxprec.passes.fusion.regions import Region
from fxprec.passes.graph.annotations import notes

#: Elements from which fewer bytes weigh more than calls.
FEWEST: Final = 1 << 20
#: Ops from which one kernel is less work for the host, too: forward and backward together, as many calls of torch.
_FEWEST_OPS: Final = 5


def is_large(x: Tensor) -> bool:
    """Return whether a kernel saves a GPU more time than it costs the host; without a GPU any size is large."""
    return x.numel() >= FEWEST or x.device.type != "cuda"


def has_few_ops(region: Region) -> bool:
    """Return whether a kernel is more work for the host than torch's ops. A bias is none: its product adds it."""
    return sum(notes(node).op.name != "to" and not notes(node).state("bias_of") for node in region.nodes) < _FEWEST_OPS


def elements_of(region: Region) -> int | None:
    """Return the elements of a region's values, broadcast; None where its sizes are not known, or vary."""
    sizes = [size for size in region.shape or () if isinstance(size, int)]
    return None if region.shape is None or len(sizes) < len(region.shape) else prod(sizes)


def grows_to(given: int, largest: int) -> int:
    """Elements of an input, of which there were ``given``, up to which no region reaches ``FEWEST``.

    Args:
        largest: elements of the largest region, fewer than those. It may grow as the square of an input, as scores of
            a sequence do.
    """
    return given * isqrt(FEWEST // max(1, largest))
