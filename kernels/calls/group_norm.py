"""Calls group norm with the SiLU behind it, in a kernel of ours where that serves."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.graph_call import graph_call, triton_serves
from fxprec.kernels.launch.observers import runs_eagerly


@graph_call
def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    silu: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``F.group_norm``, or ``F.silu`` of it, computed in FP32 and rounded once to the dtype of a low x.

    The compiler calls it for low x alone: float64 would be rounded here.
    """
    if runs_eagerly() and triton_serves(x):
        from fxprec.kernels.nn.group_norm import group_norm as kernel  # which loads Triton

        return kernel(x, num_groups, weight, bias, eps, silu=silu)
    y = F.group_norm(x.float(), num_groups, weight, bias, eps)
    return (F.silu(y) if silu else y).to(x.dtype)
