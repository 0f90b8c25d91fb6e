"""Calls depthwise convolutions in bfloat16 on a CPU, with a backward in FP32 where that is faster.

The forward is torch's, to the bit. A call decides by sizes alone (``fxprec.kernels.cpu.depthwise.pays``): filters
larger than 3 x 3 or with steps, of an image that is not tiny, where a backward follows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.graph_call import graph_call, stands_for


@stands_for(F.conv2d)
@graph_call
def depthwise_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return ``F.conv2d``, with gradients computed in FP32 where that is faster."""
    if input.dtype is torch.bfloat16 and input.device.type == "cpu":
        from fxprec.kernels.cpu import depthwise  # whose ops are registered when it is imported

        steps, around, apart = map(pair, (stride, padding, dilation))
        if depthwise.pays(input, weight, bias, steps, apart, groups):
            return depthwise.depthwise_conv2d(input, weight, bias, steps, around, apart)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


def pair(size: Any) -> tuple[int, int]:
    """Return a size of two dimensions as a pair: torch takes one number for both."""
    values = tuple(size) if isinstance(size, tuple | list) else (size,)
    return values[0], values[-1]
