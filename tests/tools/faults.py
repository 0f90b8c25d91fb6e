"""Models with a fault in them: what is no number, or too large, made at a place that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec

Function = Callable[[Tensor], Tensor]


class Fault(nn.Module):
    """What goes wrong, in a module of its own."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


class Net(nn.Module):
    """A fault between layers: the place says how it is reached."""

    def __init__(self, function: Function, place: str) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.fault, self.place = Fault(function), place
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x).tanh()) - self.mean
        if self.place == "checkpoint":
            h = checkpoint(self.fault, h, use_reentrant=False)
        elif self.place == "residual":
            h = h + self.fault(h)
        elif self.place == "looped":
            for _ in range(2):
                h = self.fault(h)
        elif self.place == "masked":
            mask = torch.zeros(8).masked_fill(torch.arange(8) > 6, -torch.inf)
            h = (self.fault(h) + mask).softmax(-1)
        elif self.place == "written":
            held = torch.empty_like(h)
            held.copy_(self.fault(h))
            h = held.mul_(2)
        elif self.place == "broken":
            h = h * 2 if h.abs().max().item() > 0 else h
            torch._dynamo.graph_break()
            h = self.fault(h)
        else:
            h = self.fault(h)
        return self.last(h)


PLACES: Final = ("plain", "checkpoint", "residual", "looped", "masked", "written")


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return (gradient - gradient) / (gradient - gradient)


def attention(h: Tensor) -> Tensor:
    q = (h * 2e4).view(1, 1, 4, 8)
    return ((q @ q.transpose(-2, -1)).softmax(-1) @ q).view(4, 8)


#: Name -> what is computed, the kind of the fault, and whether the backward has it.
FAULTS: dict[str, tuple[Function, str, bool]] = {
    "log of negatives": (lambda h: (-h.abs() - 1).log(), "invalid", False),
    "sqrt of negatives": (lambda h: (-h.abs() - 1).sqrt(), "invalid", False),
    "0 / 0": (lambda h: (h * 0) / (h * 0), "invalid", False),
    "1 / 0": (lambda h: h.exp() / (h * 0), "invalid", False),
    "log of 0": (lambda h: (h * 0).log(), "invalid", False),
    "acos of 2": (lambda h: (h * 0 + 2).acos(), "invalid", False),
    "a power": (lambda h: (-h.abs() - 1) ** 0.3, "invalid", False),
    "a masked row": (lambda h: h.masked_fill(h > -99, -torch.inf).softmax(-1), "invalid", False),
    "products": (lambda h: (h.abs() + 1) * 1e30 * 1e30, "overflow", False),
    "a square": (lambda h: ((h.abs() + 1) * 1e25) ** 2, "overflow", False),
    "an exponent": (lambda h: (h.abs() * 1e3 + 1e3).exp(), "overflow", False),
    "a sum": (lambda h: h + ((h.abs() + 1) * 2e38).sum(-1, keepdim=True), "overflow", False),
    "sqrt's gradient at 0": (lambda h: (h * 0).sqrt() * h, "invalid", True),
    "a power's gradient at 0": (lambda h: (h * 0) ** 0.5, "invalid", True),
    "acos' gradient at 1": (lambda h: (h * 0 + 1).acos(), "invalid", True),
    "a function's own backward": (BadBackward.apply, "invalid", True),
}  # fmt: skip
#: Those that float16 has, and bfloat16 has not.
NARROW: dict[str, tuple[Function, str, bool]] = {
    "attention scores": (attention, "overflow", False),
    "a product": (lambda h: F.linear((h.abs() + 1) * 3e4, torch.ones(8, 8)), "overflow", False),
    "a cube": (lambda h: F.relu((h.abs() + 1) * 1e3) * (h.abs() + 1) * 1e3, "overflow", False),
}


def made(function: Function, place: str, dtype: torch.dtype, seed: int = 0, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    return fxprec.convert(Net(function, place), dtype=dtype, **settings)[0]


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
