"""Sums that would add up in bfloat16, and stall after some hundred terms, where autocast adds up in FP32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec

WAYS: dict[str, dict[str, Any]] = {"inputs": {"by_inputs": True}, "none": {}, "dynamo": {"capture": "dynamo"}}


class Net(nn.Module):
    def __init__(self, layer: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer, x)


def errors(model: Net, x: Tensor, way: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the relative errors of the value and of gradients: ours, and those of autocast."""
    torch._dynamo.reset()
    settings = dict(way)
    given = (x,) if settings.pop("by_inputs", False) else None
    lowered, _ = fxprec.convert(copy.deepcopy(model), given, dtype=torch.bfloat16, **settings)
    found = []
    for each in (lowered, copy.deepcopy(model), copy.deepcopy(model).double()):
        data = (x.double() if len(found) == 2 else x).clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=len(found) == 1):
            out = each(data)
        (out.double() * torch.linspace(-0.3, 0.7, out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
        found.append([out, data.grad, each.layer.weight.grad])
    exact = found.pop()
    both = [[float((a.double() - b).norm() / b.norm()) for a, b in zip(each, exact, strict=True)] for each in found]
    return list(zip(*both, strict=True))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool3d, lambda h, size: F.interpolate(h, size, mode="area")])
def test_averages_over_large_windows_of_volumes(pool: Callable[..., Tensor], way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net(nn.Conv3d(1, 2, 1), lambda layer, x: pool(layer(x) + 2, 2))
    for ours, theirs in errors(model, torch.rand(1, 1, 24, 24, 24), way):
        assert ours <= 2 * theirs + 1e-3


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_border_that_is_repeated_often(way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net(nn.Conv2d(2, 4, 3, padding=1), lambda layer, x: F.pad(layer(x), (20, 20, 20, 20), mode="replicate"))
    for ours, theirs in errors(model, torch.randn(2, 2, 16, 16), way):
        assert ours <= 2 * theirs + 1e-3


OF_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "neg": torch.neg,
    "tril": torch.tril,
    "where": lambda w: torch.where(torch.eye(16) > 0, 0.0, w),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("function", [*OF_WEIGHTS.values(), None], ids=[*OF_WEIGHTS, "cat"])
def test_a_weight_that_an_op_reads_at_each_step(function: Any, way: dict[str, Any]) -> None:
    def steps(layer: nn.Linear, x: Tensor) -> Tensor:
        if function is None:
            return x[0] @ torch.cat([layer.weight] * 64, 1)
        return torch.stack([F.linear(x[t], function(layer.weight)) for t in range(60)])

    torch.manual_seed(0)
    for ours, theirs in errors(Net(nn.Linear(16, 16, bias=False), steps), torch.randn(60, 8, 16), way):
        assert ours <= 2 * theirs + 1e-3
