"""Calls layer norm of low values on a CPU, with gradients of weight and bias that are added up in FP32.

The forward is torch's, to the bit. Ours runs where a backward may follow that has gradients for the weight or the bias.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.graph_call import graph_call, stands_for


@stands_for(F.layer_norm)
@graph_call
def layer_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Return ``F.layer_norm``, with gradients of weight and bias that are added up in FP32."""
    if input.dtype is not torch.bfloat16 or input.device.type != "cpu":
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    from fxprec.kernels.cpu import layer_norm as kernel  # whose ops are registered when it is imported

    return kernel.layer_norm(input, normalized_shape, weight, bias, eps)
