"""Where autograd records, and casts that must not end a gradient: under no_grad, enable_grad and inference_mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import fxprec
from fxprec.passes.graph.grad_mode import grad_mode_at_nodes
from fxprec.passes.torch_internals import enter_inference_mode, exit_inference_mode, set_grad_enabled

BF16 = torch.bfloat16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class SharedInput(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = self.layer(x)
        return self.layer(x) + a


class OnlyInput(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = self.layer(x)
        return x + a


class Nested(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = self.layer(x)
            with torch.enable_grad():
                b = self.layer(x)
            c = self.layer(x)
        return a + b + c


class Inference(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            a = self.layer(x)
        return self.layer(x) + a.sum() * 0.5


class Decorated(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.target(x)

    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        return self.layer(x).softmax(-1)


class TargetFirst(Decorated):
    def forward(self, x: Tensor) -> Tensor:
        return -(self.target(x) * self.layer(x).log_softmax(-1)).sum(-1)


class IdleCasts(Model):
    """In FP32 they return their input, gradient and all."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.layer(x))
        with torch.no_grad():
            a, b = h.float(), h.type_as(x)
        return a + b


class RealCasts(Model):
    """These make a copy, which has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        low = h.bfloat16()
        with torch.no_grad():
            a, b = low.float(), h.to(torch.float32, copy=True)
        return torch.relu(a) + torch.relu(b) + h


class CastsToLow(Model):
    """To the dtype that a product has in the rewritten graph: they make copies still."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        with torch.no_grad():
            a, b, c = h.bfloat16(), h.to(torch.bfloat16), torch.relu(h).type(torch.bfloat16)
        return a.float() + b.float() + c.float() + self.layer(h)


class RoundTrips(Model):
    """One half of each is under ``no_grad``: what comes back from it has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.layer(x))
        with torch.no_grad():
            a = h.double()
        b = a.bfloat16()
        return self.layer(b.float()) + self.layer(h)


MODELS = [
    SharedInput, OnlyInput, Nested, Inference, Decorated, TargetFirst, IdleCasts, RealCasts, CastsToLow, RoundTrips,
]  # fmt: skip


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_the_original(model: type[Model], level: str) -> None:
    torch.manual_seed(1)
    eager = model()
    converted = fxprec.convert(copy.deepcopy(eager), level=level, dtype=BF16).module
    (y, x_grad), (expected, expected_grad) = gradients(converted), gradients(eager)
    assert y.requires_grad and expected.requires_grad
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(x_grad, expected_grad, rtol=0.05, atol=0.05)
    for (name, p), q in zip(converted.named_parameters(), eager.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.1)


def gradients(model: Model) -> tuple[Tensor, Tensor | None]:
    x = (torch.arange(12).view(3, 4) / 8 - 0.5).requires_grad_()
    y = model(x * 1.0)
    (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
    return y, x.grad


@pytest.mark.parametrize("model", [model for model in MODELS if model is not Inference])  # which breaks the graph
def test_without_gradients_nothing_is_cast_twice(model: type[Model]) -> None:
    with torch.no_grad():
        converted = fxprec.convert(model(), dtype=BF16, example_inputs=(torch.ones(2, 4),)).module
    for gm in fxprec.graphs(converted):
        casts = [(n.args[0], n.args[1]) for n in gm.graph.nodes if n.meta.get("inserted") and len(n.args) == 2]
        assert len(casts) == len({*casts}) or model is Nested  # whose enable_grad records within


def test_where_autograd_records() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(set_grad_enabled, (False,))
    off = graph.call_function(torch.relu, (x,))
    mode = graph.call_function(enter_inference_mode, (True,))
    graph.call_function(set_grad_enabled, (True,))
    graph.call_function(exit_inference_mode, (mode,))
    still_off = graph.call_function(torch.relu, (off,))
    mode = graph.call_function(enter_inference_mode, (False,))
    within = graph.call_function(torch.relu, (off,))  # inference_mode(False) turns gradients on, as torch has it
    graph.call_function(exit_inference_mode, (mode,))
    off_again = graph.call_function(torch.relu, (off,))
    graph.call_function(set_grad_enabled, (True,))
    on = graph.call_function(torch.relu, (off,))
    graph.output((still_off, within, off_again, on))
    with torch.no_grad(), torch.inference_mode(False):
        assert torch.is_grad_enabled()
    found = grad_mode_at_nodes(graph, True)
    assert [found[node] for node in (x, off, still_off)] == [True, False, False]
    assert [found[node] for node in (within, off_again, on)] == [True, False, True]
    assert not grad_mode_at_nodes(graph, False)[x] and grad_mode_at_nodes(graph, False)[on]
