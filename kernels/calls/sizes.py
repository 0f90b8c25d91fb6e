"""Tells from a tensor's size and layout whether a kernel of ours is worth its call.

Where elements are few, the Python of our kernels takes the host longer than they save the GPU: each of torch's ops is a
call of C++, and an autograd node of C++; one of our kernels is as much Python as several of them. A pass over a million
elements takes a GPU a microsecond, a region's Python took an H100's host 50 to 150, forward and backward (2026-11-27):
eight layers of a BERT whose inputs have 64 x 64 elements took 1.18 times autocast's time with their regions as kernels,
and 0.96 times without.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

#: Elements from which on a GPU fewer bytes weigh more than calls.
FEWEST: Final = 1 << 20


def is_large(x: Tensor) -> bool:
    """Return whether a kernel saves a GPU more time than it costs the host.

    True on any other device: there the callers have limits of their own.
    """
    return x.numel() >= FEWEST or x.device.type != "cuda"


def is_channels_last(x: Tensor) -> bool:
    """Return whether these are images whose channels, and nothing else, are next to each other in memory."""
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
