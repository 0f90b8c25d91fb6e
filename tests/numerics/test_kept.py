"""A question between a forward and its backward: the backward gives what it would have given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.model.warm_up import kept
from fxprec.numerics import audit, locate, ranges, tune

pytestmark = pytest.mark.filterwarnings("ignore::fxprec.SlowDtypeWarning")

QUESTIONS: dict[str, Callable[[nn.Module, Any], object]] = {
    "audit": lambda model, batch: audit(model, [batch], F.cross_entropy),
    "audit of gradients": lambda model, batch: audit(model, [batch], F.cross_entropy, gradients=True),
    "locate": lambda model, batch: locate(model, batch, F.cross_entropy),
    "ranges": lambda model, batch: ranges(model, [batch], F.cross_entropy),
    "tune": lambda model, batch: tune(model, [batch] * 4, F.cross_entropy, time=1.0),
}


class Normed(nn.Module):
    """What the backward of an evaluation reads, a forward in training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.register_buffer("rate", torch.ones(8))
        self.rate: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        if not self.training:
            return self.last(h * self.rate)
        with torch.no_grad():
            self.rate.mul_(0.9).add_(h.detach().abs().mean(0), alpha=0.1)
        return self.last(h)


@pytest.mark.parametrize("fuse", [False, "aten"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_pending_backward(question: str, fuse: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(16, 8, generator=generator), torch.randint(5, (16,), generator=generator)

    def gradients(ask: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = fxprec.convert(Normed().eval(), dtype=torch.bfloat16, fuse=fuse)[0]
        loss = F.cross_entropy(model(batch[0]), batch[1])  # reads the buffers themselves
        versions = [tensor._version for tensor in (*model.parameters(), *model.buffers())]
        model.train()
        if ask:
            QUESTIONS[question](model, batch)
            assert versions == [tensor._version for tensor in (*model.parameters(), *model.buffers())]
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


def test_a_model_that_writes_its_weights() -> None:
    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layer.weight.mul_(3)
            return self.layer(x)

        def read(self, x: Tensor) -> Tensor:
            return self.layer(x)

    model: Any = fxprec.convert(Grown(), methods=("read",))[0]
    x, weight = torch.randn(2, 4), model.layer.weight
    model(x), model.read(x)
    loss = (weight * weight).sum()
    before, version = weight.detach().clone(), weight._version
    with kept(model):
        model(x)
        model.read(x)  # of a low copy
        assert not torch.equal(weight, before)
    assert torch.equal(weight, before) and weight._version == version
    loss.backward()
    with torch.no_grad():
        weight.mul_(0.5)  # the version that this copy is of, and another value
        torch.testing.assert_close(model.read(x), F.linear(x, weight, model.layer.bias), rtol=0.02, atol=0.02)
