"""Gradients that a forward records itself, called under ``no_grad``, and what a graph captured there is good for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxprec

WAYS: dict[str, dict[str, Any]] = {"inputs": {"by_inputs": True}, "none": {}, "dynamo": {"capture": "dynamo"}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.norm(self.a(x))))


class Returned(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.energy(x)


class Forces(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.b(torch.tanh(self.a(x)).mean(0)).squeeze()
            return torch.autograd.grad(energy, x)[0]


class InPieces(Net):
    """A regularizer beside a graph break: what the break cut off would be missing in the sum."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            h = self.a(x)
            torch._dynamo.graph_break()
            return torch.autograd.grad(self.b(torch.tanh(h)).sum() + x.square().sum() * 0.01, x)[0]


def converted(model: nn.Module, x: Tensor, by_inputs: bool = False, **settings: Any) -> Any:
    torch._dynamo.reset()
    given = (x,) if by_inputs else None
    return fxprec.convert(copy.deepcopy(model), given, dtype=torch.bfloat16, scaler=False, **settings)[0]


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", [Returned, Forces, InPieces])
def test_what_a_forward_records_itself_under_no_grad(kind: type[Net], way: dict[str, Any]) -> None:
    model, x = kind(), torch.randn(6, 8)
    found = []
    for each in (converted(model, x, **way), model):
        with torch.no_grad():
            out = each(x)
        found.append(torch.autograd.grad(out.sum(), each.a.weight)[0] if kind is Returned else out)
    assert (found[0] - found[1]).norm() <= 0.03 * found[1].norm()


def gradient_of_norm(model: Any, x: Tensor, recorded: bool) -> Tensor:
    with torch.set_grad_enabled(recorded):
        out = model(x)
    return torch.autograd.grad(out.sum(), model.norm.weight)[0]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_its_gradients_are_as_exact_as_those_of_a_call_with_gradients(way: dict[str, Any]) -> None:
    """Sums over thousands of rows stall in bfloat16."""
    x = torch.rand(4000, 8)
    lowered = converted(Returned(), x, **way)
    assert torch.equal(gradient_of_norm(lowered, x, False), gradient_of_norm(lowered, x, True))


class HandedOn(nn.Module):
    """What gives its very argument back has a gradient under ``no_grad`` as well."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.a(x)
        with torch.no_grad():
            v = self.function(h)
        return self.b(v)


GIVES_BACK: dict[str, Any] = {
    "contiguous": lambda h: h.contiguous(),
    "flatten": lambda h: h.flatten(1),
    "idle dropout": lambda h: nn.functional.dropout(h, 0.1, False),
    "cpu": lambda h: h.cpu(),
    "to its device": lambda h: h.to(h.device),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("function", GIVES_BACK.values(), ids=GIVES_BACK)
def test_what_gives_its_argument_back_under_no_grad_ends_no_gradient(function: Any, way: dict[str, Any]) -> None:
    model, x = HandedOn(function), torch.randn(4, 8)
    lowered = converted(model, x, **way)
    for each in (model, lowered):
        each(x).square().sum().backward()
    theirs = model.a.weight.grad
    assert theirs is not None
    assert (lowered.a.weight.grad - theirs).norm() <= 0.03 * theirs.norm()


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return self.b(h), h


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_graph_is_one_with_gradients_where_they_are_on(context: Any) -> None:
    lowered, x = converted(Features(), torch.randn(2, 8)), torch.randn(4, 8)
    with context():
        lowered(x)
        assert fxprec.graph_module(lowered)(x)[0].shape == (4, 8)
    y, h = fxprec.graph_module(lowered)(x)
    assert torch.autograd.grad(y.sum(), h)[0].norm() > 0
