"""Models with a fault in them: what is no number, or too large, made at a place that is known."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

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


class Injected(NamedTuple):
    """A fault: what is computed, the kind of the fault, whether the backward has it, and the node that is to blame.

    In a model whose place is "plain"; elsewhere ``blamed`` tells.
    """

    function: Function
    kind: str
    backward: bool
    node: str


FAULTS: dict[str, Injected] = {
    "log of negatives": Injected(lambda h: (-h.abs() - 1).log(), "invalid", False, "log"),
    "sqrt of negatives": Injected(lambda h: (-h.abs() - 1).sqrt(), "invalid", False, "sqrt"),
    "0 / 0": Injected(lambda h: (h * 0) / (h * 0), "invalid", False, "truediv"),
    "1 / 0": Injected(lambda h: h.exp() / (h * 0), "invalid", False, "truediv"),
    "log of 0": Injected(lambda h: (h * 0).log(), "invalid", False, "log"),
    "acos of 2": Injected(lambda h: (h * 0 + 2).acos(), "invalid", False, "acos"),
    "a power": Injected(lambda h: (-h.abs() - 1) ** 0.3, "invalid", False, "pow_1"),
    "a masked row": Injected(lambda h: h.masked_fill(h > -99, -torch.inf).softmax(-1), "invalid", False, "softmax"),
    "products": Injected(lambda h: (h.abs() + 1) * 1e30 * 1e30, "overflow", False, "mul_1"),
    "a square": Injected(lambda h: ((h.abs() + 1) * 1e25) ** 2, "overflow", False, "pow_1"),
    "an exponent": Injected(lambda h: (h.abs() * 1e3 + 1e3).exp(), "overflow", False, "exp"),
    "a sum": Injected(lambda h: h + (h * 0 + 2e38).sum(-1, keepdim=True), "overflow", False, "sum_1"),
    "sqrt's gradient at 0": Injected(lambda h: (h * 0).sqrt() * h, "invalid", True, "sqrt"),
    "a power's gradient at 0": Injected(lambda h: (h * 0) ** 0.5, "invalid", True, "pow_1"),
    "acos' gradient at 1": Injected(lambda h: (h * 0 + 1).acos(), "invalid", True, "acos"),
    "a function's own backward": Injected(BadBackward.apply, "invalid", True, "bwd_body_0.truediv"),
}
#: Those that float16 has, and bfloat16 has not.
NARROW: dict[str, Injected] = {
    "attention scores": Injected(attention, "overflow", False, "matmul"),
    "a product": Injected(lambda h: F.linear((h.abs() + 1) * 3e4, torch.ones(8, 8)), "overflow", False, "mul_f16"),
    "a cube": Injected(lambda h: F.relu((h.abs() + 1) * 1e3) * (h.abs() + 1) * 1e3, "overflow", False, "mul_2_f16"),
}
#: Of the cube FP32 has a value: it is the cast for the layer behind that fails, of what the place makes of it.
CUBE_CAST: Final = {
    "plain": "mul_2_f16", "checkpoint": "h_1_f16", "residual": "add_2_f16", "looped": "mul_5_f16", "written": "mul__f16"
}  # fmt: skip


def blamed(fault: str, place: str, level: str) -> str:
    """The node that a fault is to be found at."""
    injected = (FAULTS | NARROW)[fault]
    node = injected.node
    if fault in NARROW and level == "O2":
        node = node.removesuffix("_f16")  # a low stream overflows without a cast
    elif fault == "a cube":
        return CUBE_CAST[place]
    if place == "looped" and injected.backward:  # which comes to the last turn first
        head, number, tail = re.fullmatch(r"(\D+?)(?:_(\d+))?(\.\w+)?", node).groups(default="")  # type: ignore[union-attr]
        node = f"{head}_{int(number or 0) + 1}{tail}"
    return f"wrap_body_0.{node}" if place == "checkpoint" else node


def made(function: Function, place: str, dtype: torch.dtype, seed: int = 0, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    return fxprec.convert(Net(function, place), dtype=dtype, **settings)[0]


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
