"""The seeds of a graph's dropouts, drawn by one call."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Proxy

from fxprec.passes.graph.leaves import leaf


def draw_seeds_like(x: Tensor, count: int) -> Tensor:
    """int64 [count] on the device of ``x``, from torch's generator there."""
    if isinstance(x, Proxy):
        return leaf(draw_seeds_like, x, count)
    from fxprec.kernels.launch.philox import draw_seeds  # which loads Triton

    return draw_seeds(count, x.device)
