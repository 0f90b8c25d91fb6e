"""Norms of converted models under transforms of torch.func, which has no derivatives of mixed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import fxprec

NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


def network(norm: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), NORMS[norm](8), nn.Tanh(), nn.Linear(8, 3))


def per_sample(model, x):
    def loss(parameters, x):
        return functional_call(model, parameters, (x,)).square().sum()

    return vmap(grad(loss), (None, 0))(dict(model.named_parameters()), torch.stack([x, x + 1]))["3.weight"]


def of_autograd(model, x):
    def gradient(x):
        x.requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), model[3].weight)[0]

    return gradient(x.clone())


TRANSFORMS = {
    "vmap(grad)": per_sample,
    "vmap(jacrev)": lambda model, x: vmap(jacrev(model))(torch.stack([x, x + 1])),
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "hessian": lambda model, x: hessian(lambda x: model(x).square().sum())(x),
    "autograd.grad": of_autograd,
}


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("norm", NORMS)
def test_derivatives_through_a_norm(norm, transform, training, capture):
    model, x = network(norm).train(training), torch.randn(5, 4)
    if training and norm == "batch":
        model[1] = nn.BatchNorm1d(8, track_running_stats=False)
    want = TRANSFORMS[transform](model, x).detach()
    converted = fxprec.convert(model, dtype=torch.bfloat16, capture=capture)[0]
    for _ in range(2):
        got = TRANSFORMS[transform](converted, x).detach()
        torch.testing.assert_close(got, want, rtol=0, atol=2**-4 * float(want.abs().max()))
    low = converted(x)
    assert low.dtype is torch.float32
    if capture == "dynamo" and transform != "autograd.grad":
        outside = str(fxprec.report(converted))
        assert "it runs in FP32, since torch.func has no derivatives of a norm" in outside


class Residual(nn.Module):
    """A norm of a sum, whose dtype is not known without inputs."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(16, 16), norm, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(x + torch.tanh(self.before(x))))


def tangent_of(value: Tensor) -> Tensor:
    tangent = forward_ad.unpack_dual(value).tangent
    assert tangent is not None
    return tangent


def of_dual_numbers(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return tangent_of(model(forward_ad.make_dual(x, x.cos())))


def of_dual_weights(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        weights = {name: forward_ad.make_dual(each, each.cos()) for name, each in model.named_parameters()}
        return tangent_of(functional_call(model, weights, (x,)))


FORWARD = {
    "jvp": lambda model, x: jvp(model, (x,), (x.cos(),))[1],
    "dual numbers": of_dual_numbers,
    "dual weights": of_dual_weights,
}
OF_SUMS = {"layer": lambda: nn.LayerNorm(16), "group": lambda: nn.GroupNorm(4, 16), "rms": lambda: nn.RMSNorm(16)}


@pytest.mark.parametrize("options", [{}, {"fuse": True}, {"capture": "dynamo"}], ids=["", "fused", "dynamo"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("transform", FORWARD)
@pytest.mark.parametrize("norm", OF_SUMS)
def test_forward_mode_through_a_norm_of_a_sum(
    norm: str, transform: str, training: bool, level: Any, options: dict[str, Any]
):
    torch.manual_seed(0)
    model, x = Residual(OF_SUMS[norm]()).train(training), torch.randn(5, 16)
    want = FORWARD[transform](model, x).detach()
    converted = fxprec.convert(model, dtype=torch.bfloat16, level=level, **options)[0]
    for _ in range(2):
        got = FORWARD[transform](converted, x).detach()
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=2**-4 * float(want.abs().max()))


class Norms(nn.Module):
    """A norm reads another's result."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before, self.norms, self.after = nn.Linear(16, 16), nn.Sequential(norm(), norm()), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norms(x + torch.tanh(self.before(x))))


@pytest.mark.parametrize("by_inputs", [False, True])
@pytest.mark.parametrize("transform", ["jvp", "dual numbers", "vmap(jacrev)", "hessian"])
@pytest.mark.parametrize("norm", OF_SUMS)
def test_norms_with_low_weights(norm: str, transform: str, by_inputs: bool):
    torch.manual_seed(0)
    model, x = Norms(OF_SUMS[norm]), torch.randn(5, 16)
    derivative = (FORWARD | TRANSFORMS)[transform]
    want = derivative(model, x).detach()
    converted = fxprec.convert(model, (x,) if by_inputs else None, dtype=torch.bfloat16, level="O3")[0]
    got = derivative(converted, x).detach()
    torch.testing.assert_close(got, want, rtol=0, atol=2**-3 * float(want.abs().max()))
