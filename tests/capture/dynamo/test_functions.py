"""A torch.autograd.Function that asks for dtypes: its graph stays as torch.autocast runs it, where it must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxprec

BF16 = torch.bfloat16


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g.to(w.dtype) @ w, g.to(x.dtype).t() @ x


class Scaled(torch.autograd.Function):
    """Goes by dtypes, but where they may differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return x * w.sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g.to(ctx.dtype) * 2, None


class Net(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.function.apply(self.first(x), self.second.weight))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    model(x).float().square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("ignore::fxprec.ServiceWarning")
def test_the_product_is_that_of_autocast() -> None:
    model, x = Net(Product), torch.randn(5, 4)
    with torch.autocast("cpu", dtype=BF16):
        output = model(x)
    output.float().square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    fxprec.convert(model, dtype=BF16, example_inputs=(x,))
    torch.testing.assert_close(model(x), output.float())
    for own, eager in zip(gradients(model, x), expected, strict=True):
        assert (own is None) == (eager is None)
        if own is not None:
            torch.testing.assert_close(own, eager)


@pytest.mark.filterwarnings("ignore::fxprec.ServiceWarning")
def test_the_report_says_so() -> None:
    model, _ = fxprec.convert(Net(Product), dtype=BF16, example_inputs=(torch.randn(5, 4),))
    assert "a torch.autograd.Function that casts to bfloat16, or asks what is bfloat16" in str(fxprec.report(model))
    assert "test_functions.py" in str(fxprec.report(model))


def test_others_are_rewritten() -> None:
    model, _ = fxprec.convert(Net(Scaled), dtype=BF16, example_inputs=(torch.randn(5, 4),))
    assert len(fxprec.graphs(model)) == 1
    assert all(g is None or g.isfinite().all() for g in gradients(model, torch.randn(5, 4)))
