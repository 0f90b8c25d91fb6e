"""The seeds of a graph's dropouts, drawn by one call."""

from __future__ import annotations

from torch import Tensor

__all__ = ["draw_seeds_like"]


def draw_seeds_like(x: Tensor, count: int) -> Tensor:
    """int64 [count] on the device of ``x``, from torch's generator there."""
    from fxprec.kernels.philox import draw_seeds  # which loads Triton

    return draw_seeds(count, x.device)
