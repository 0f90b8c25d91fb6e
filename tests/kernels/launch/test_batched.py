"""Gradients that come in a batch: each is the one that comes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from kernel_tools import backwards_of

FEATURES = 64


class Net(nn.Module):
    """A layer, something that a kernel of ours may run, and a layer."""

    def __init__(self, between: Callable[[Tensor], Tensor], first: nn.Module, *others: nn.Module) -> None:
        super().__init__()
        self.between, self.first, self.others = between, first, nn.ModuleList(others)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.first(x))
        for other in self.others:
            x = other(x)
        return x


def attended(x: Tensor, causal: bool = False) -> Tensor:
    query, key, value = (each.transpose(1, 2) for each in x.unflatten(-1, (3, 2, 32)).unbind(2))
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2).flatten(2)


def turned(x: Tensor) -> Tensor:
    x = x.unflatten(-1, (2, 32)).transpose(1, 2)
    angles = torch.outer(torch.arange(x.shape[2]).float(), 100.0 ** (-torch.arange(16).float() / 16)).repeat(1, 2)
    a, b = x.chunk(2, -1)
    return (x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()).transpose(1, 2).flatten(2)


def loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, -2), torch.arange(x.shape[:-1].numel())).unsqueeze(0)


def square() -> nn.Linear:
    return nn.Linear(FEATURES, FEATURES)


NETS: dict[str, Callable[[], nn.Module]] = {
    "rms_norm": lambda: Net(nn.RMSNorm(FEATURES), square(), square()),
    "layer_norm": lambda: Net(lambda x: F.layer_norm(x + F.gelu(x), (FEATURES,)), square(), square()),
    "softmax": lambda: Net(lambda x: (2 * x + 1).softmax(-1), square(), square()),
    "attention": lambda: Net(attended, nn.Linear(FEATURES, 3 * FEATURES), square()),
    "causal attention": lambda: Net(lambda x: attended(x, True), nn.Linear(FEATURES, 3 * FEATURES), square()),
    "rope": lambda: Net(turned, square(), square()),
    "cross_entropy": lambda: Net(loss, nn.Linear(FEATURES, 4096)),
}
IMAGES: dict[str, Callable[[], nn.Module]] = {
    "max_pool": lambda: Net(lambda x: F.max_pool2d(x, 3, 2, 1), nn.Conv2d(3, 32, 3), nn.Conv2d(32, 4, 1)),
    "depthwise": lambda: Net(nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)),
}


@pytest.mark.parametrize("twice", [False, True], ids=["once", "of gradients"])
@pytest.mark.parametrize("fuse", [True, "auto"])
@pytest.mark.parametrize("name", [*NETS, *IMAGES])
def test_each_is_what_it_is_alone(name: str, fuse: Any, twice: bool):
    torch.manual_seed(0)
    made, x = (NETS[name], torch.randn(2, 128, FEATURES)) if name in NETS else (IMAGES[name], torch.randn(2, 3, 66, 66))
    if name in IMAGES and not twice:  # whose second derivatives of a batch torch itself has not in this layout
        x = x.to(memory_format=torch.channels_last)
    model = fxprec.convert(made(), dtype=torch.bfloat16, fuse=fuse)[0]
    x.requires_grad_()

    def output() -> Tensor:
        out = model(x)
        # Where torch's attention takes less time, it runs, and it has no second derivative.
        if twice and any("FlashAttention" in name for name in backwards_of(out)):
            pytest.skip("attention is torch's on this CPU, which has no second derivative")
        return torch.autograd.grad(out.square().sum(), x, create_graph=True)[0] if twice else out

    out = output()
    given = torch.randn(3, *out.shape)
    wanted = [x, next(model.parameters())]
    alone = [torch.autograd.grad(out, wanted, each, retain_graph=True) for each in given]
    batched = torch.autograd.grad(output(), wanted, given, is_grads_batched=True)
    for found, *expected in zip(batched, *alone, strict=True):
        assert float(found.norm()) > 0
        torch.testing.assert_close(found, torch.stack(expected), rtol=0.05, atol=0.02 * float(found.abs().max()))


def test_a_vectorized_jacobian():
    model = fxprec.convert(NETS["rms_norm"](), dtype=torch.bfloat16, fuse=True)[0]
    x = torch.randn(2, FEATURES)
    by_rows, vectorized = (torch.autograd.functional.jacobian(model, x, vectorize=each) for each in (False, True))
    torch.testing.assert_close(vectorized, by_rows, rtol=0, atol=0)
