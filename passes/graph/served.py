"""Whether the hand-written kernels that a graph may call take a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.passes.graph.annotations import CASTABLE


def is_served(x: Tensor) -> bool:
    """Whether a kernel takes this tensor; compilers and exporters get torch's own ops."""
    if torch.compiler.is_compiling() or x.dtype not in CASTABLE:
        return False
    from fxprec.kernels.launch.triton_support import can_launch  # which loads Triton

    return can_launch(x.device)
