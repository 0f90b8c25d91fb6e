"""Defines the metadata of a tensor: shape, strides and dtype without values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spec:
    """Metadata of a tensor.

    Attributes:
        wanted: it wants a gradient.
        dropped: how many trailing dimensions a reduction took from it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    wanted: bool = False
    dropped: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.dtype.itemsize * math.prod(self.shape)

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of this shape, strides and dtype."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def spec_of(x: Tensor) -> Spec:
    """Return the metadata of a tensor."""
    return Spec(tuple(x.shape), x.stride(), x.dtype, x.requires_grad)
