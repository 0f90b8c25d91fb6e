"""Calls batch norm with what follows it, in a kernel of ours where that serves and gains."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.calls.sizes import is_channels_last, is_large
from fxprec.kernels.launch.graph_call import graph_call, triton_serves
from fxprec.kernels.launch.observers import runs_eagerly
from fxprec.kernels.launch.operands import FLOATS


@graph_call
def batch_norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: Any = 0.1, eps: float = 1e-5,
    residual: Tensor | None = None, relu: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``relu?(F.batch_norm(...) [+ residual])``: one kernel after the statistics, where it serves and gains.

    Torch's ops run for small tensors, where the kernel takes the host longer than it saves the GPU, and for batch norm
    alone of contiguous (NCHW) images, where torch's kernel is as fast.
    """
    # The kernel broadcasts no residual, and takes no momentum of None.
    fits = residual is None or (residual.shape == x.shape and residual.dtype in FLOATS)
    joined = relu or residual is not None
    served = fits and isinstance(momentum, int | float) and runs_eagerly() and triton_serves(x)
    if served and is_large(x) and (joined or is_channels_last(x)):
        from fxprec.kernels.nn.batch_norm import batch_norm as kernel  # which loads Triton

        options = {"training": training, "momentum": momentum, "eps": eps, "residual": residual, "relu": relu}
        return kernel(x, running_mean, running_var, weight, bias, **options)
    y = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y
