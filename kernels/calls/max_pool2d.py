"""Calls max pooling, in a kernel or a loop of ours for large images whose channels are last in memory."""

from __future__ import annotations

from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.calls.sizes import is_channels_last, is_large
from fxprec.kernels.launch.graph_call import graph_call, triton_serves
from fxprec.kernels.launch.observers import runs_eagerly
from fxprec.kernels.launch.operands import suits_loops

#: Elements, with channels last, from which a loop's fewer bytes weigh more than its call.
FEWEST_FOR_LOOP: Final = 1 << 17


@graph_call
def max_pool2d(input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, compiled: bool = False) -> Tensor:
    """Return ``F.max_pool2d``, by a kernel of ours where it serves; ``compiled``: on a CPU by a C++ loop."""
    if runs_eagerly() and is_channels_last(input):
        looped = compiled and input.numel() >= FEWEST_FOR_LOOP and suits_loops(input)
        if looped or (triton_serves(input) and is_large(input)):
            from fxprec.kernels.nn.max_pool import max_pool2d as kernel  # which loads Triton
            from fxprec.kernels.nn.max_pool import why_not

            sizes = kernel_size, kernel_size if stride is None or stride == [] else stride, padding
            # Sizes of another length than 1 or 2 are torch's to refuse.
            window = [(each[0], each[-1]) for each in map(numbers, sizes) if len(each) in (1, 2)]
            if len(window) == len(sizes) and not why_not(input, *window):
                return kernel(input, *window, compiled=looped)
    return F.max_pool2d(input, kernel_size, stride, padding)


def numbers(size: Any) -> tuple[Any, ...]:
    """Return a size of a window as a tuple: torch takes one number for both dimensions."""
    return tuple(size) if isinstance(size, tuple | list) else (size,)
