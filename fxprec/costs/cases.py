"""One size of one kind of work, which ``calibrate`` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Run = Callable[[], object]


class Case(NamedTuple):
    """Amount of work, and a function that makes it for a dtype, ``calls`` times over."""

    amount: float
    make: Callable[[torch.device, torch.dtype], Run]
    calls: int = 1


def random(device: torch.device, dtype: torch.dtype, *shape: int, gradient: bool = False) -> Tensor:
    """Return normal random numbers."""
    return torch.randn(shape, device=device).to(dtype).requires_grad_(gradient)
