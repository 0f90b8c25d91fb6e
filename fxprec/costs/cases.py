"""What ``calibrate`` runs: one size of one kind of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Run = Callable[[], object]


class Case(NamedTuple):
    """How much work it is, and what does it in a dtype, ``calls`` times over."""

    amount: float
    make: Callable[[torch.device, torch.dtype], Run]
    calls: int = 1


def random(device: torch.device, dtype: torch.dtype, *shape: int, gradient: bool = False) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, device=device).to(dtype).requires_grad_(gradient)
