"""The seeds of a graph's dropouts, drawn by one call."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw_seeds_like"]


def draw_seeds_like(x: Tensor, count: int) -> Tensor:
    """int64 [count] on the device of ``x``, from torch's generator there; empty where no kernel will read them."""
    from fxprec.kernels.philox import draw_seeds  # which loads Triton

    return draw_seeds(count, x.device) if x.device.type == "cuda" or count else torch.empty(0, dtype=torch.int64)
