"""Decisions that flip: which rounding does it alone, as a float64 run by hand has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from as_it_was import unchanged
from fxprec.numerics import audit
from fxprec.numerics.ledger import Route

BF16 = torch.bfloat16
BOUNDS = torch.linspace(-2, 2, 65)


class Net(nn.Module):
    """A layer, a decision, and what is made of both."""

    def __init__(self, decides: Callable[[Tensor], Tensor], before: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)
        self.decides, self.before = decides, before

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(self.first(x))
        return self.last(h + self.decides(h).reshape(len(h), -1)[:, :1])


DECISIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "topk": ("topk", lambda h: h.topk(2, -1).indices),
    "argmax": ("argmax", lambda h: h.argmax(-1)),
    "argmin": ("argmin", lambda h: h.argmin(-1)),
    "argsort": ("argsort", lambda h: h.argsort(-1)),
    "sort": ("sort", lambda h: h.sort(-1, descending=True).indices),
    "max": ("max", lambda h: h.max(-1).indices),
    "bucketize": ("bucketize", lambda h: torch.bucketize(h, BOUNDS.to(h.dtype))),
    "a comparison": ("gt", lambda h: h > 0.25),
    "of two": ("lt", lambda h: h < h.flip(-1)),
    "rounded": ("long", lambda h: (h * 8).long()),
}


def made(*parts: Any) -> nn.Module:
    torch.manual_seed(0)
    return fxprec.convert(Net(*parts), dtype=BF16)[0]


def batch(seed: int = 1, size: int = 512) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator).to(BF16).float(), torch.randint(4, (size,), generator=generator)


def routed(model: nn.Module, *batches: Any) -> tuple[Route, ...]:
    with unchanged(model):
        return audit(model, batches, F.cross_entropy, routes=True).routes


@pytest.mark.parametrize("name", DECISIONS)
def test_each_rounding_flips_what_it_flips_in_a_run_by_hand(name: str) -> None:
    op, decides = DECISIONS[name]
    model, (x, y) = made(decides), batch()
    with torch.no_grad():
        weight, bias = (p.detach().double() for p in (model.first.weight, model.first.bias))
        low_weight, low_bias = weight.to(BF16).double(), bias.to(BF16).double()
        low = F.linear(x.to(BF16), low_weight.to(BF16), low_bias.to(BF16))
        own = low.double() - F.linear(x.double(), low_weight, low_bias)
        exact = F.linear(x.double(), weight, bias)
        expected = decides(exact)
        flipped = decides(low) != expected
        ways = {
            "first.weight": F.linear(x.double(), low_weight, bias),
            "first.bias": F.linear(x.double(), weight, low_bias),
            "linear": exact + own,
        }
        alone = {key: (decides(way) == decides(low)) & flipped for key, way in ways.items()}
    route = next(each for each in routed(model, (x, y)) if each.node.startswith(op))
    assert route.flipped == int(flipped.sum()) > 0 and route.count == flipped.numel()
    names = {"h": "linear"}  # dynamo names a node by the variable
    found = {names.get(cause.node, cause.node): cause.flipped for cause in route.causes}
    assert found == {key: int(each.sum()) for key, each in alone.items() if bool(each.any())}
    assert [cause.flipped for cause in route.causes] == sorted(found.values(), reverse=True)
    assert route.by_none == int((flipped & ~torch.stack([*alone.values()]).any(0)).sum())
    assert "test_routes.py:" in route.source


def test_batches_are_added_up_and_told() -> None:
    model = made(DECISIONS["topk"][1])
    single = [routed(model, batch(seed))[0] for seed in (1, 2)]
    ledger = audit(model, [batch(1), batch(2)], F.cross_entropy, routes=True)
    (route,) = ledger.routes
    assert route.flipped == sum(each.flipped for each in single) and route.count == 2 * single[0].count
    assert f"Route: topk ({route.source}) decides {route.flipped} of {route.count} elements otherwise" in str(ledger)
    assert f"alone flip: {route.causes[0].node} {route.causes[0].flipped}" in str(ledger)
    data = json.loads(json.dumps(ledger.to_dict()))["routes"]
    assert data[0]["node"] == "topk" and data[0]["causes"][0]["flipped"] == route.causes[0].flipped
    assert ledger.folded().routes == ledger.routes
    assert not audit(model, [batch(1)], F.cross_entropy).routes


BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda h: (h * 2).relu_().add_(h[:, :1].clone()),
    "a slice in place": lambda h: _written(h * 1),
    "dropout": lambda h: F.dropout(h, 0.3),
    "a draw in place": lambda h: h + torch.empty_like(h).normal_().mul_(0.1),
    "complex": lambda h: torch.fft.irfft(torch.fft.rfft(h.float()) * (1 + 0.1j), n=6),
    "chunks": lambda h: torch.cat([each * 2 for each in h.chunk(2, -1)], -1),
    "a mask": lambda h: h.masked_fill(h > 1, -1e9),
    "a norm": lambda h: F.layer_norm(h, (6,)),
}


def _written(h: Tensor) -> Tensor:
    h[:, 1:3] *= 1.5
    return h


@pytest.mark.parametrize("name", BEFORE)
def test_a_replay_is_the_reference_whatever_ran_before(name: str) -> None:
    """Where no rounding flips anything alone, or all are put in, nothing else could."""
    model = made(DECISIONS["argsort"][1], BEFORE[name]).train()
    x, y = batch()
    torch.manual_seed(3)
    routes = routed(model, (x, y))
    route = next(each for each in routes if each.node.startswith("argsort"))
    assert 0 < route.flipped < 0.2 * route.count
    assert 0 <= route.by_none < route.flipped and route.causes
    assert {cause.node for cause in route.causes} >= {"first.weight"}


def test_a_model_that_decides_as_the_reference_has_no_routes() -> None:
    assert routed(made(lambda h: h > 100), batch()) == ()
    assert routed(made(torch.tanh), batch()) == ()


def test_what_lies_behind_a_shape_that_depends_on_a_route_is_run_in_the_references_shape() -> None:
    def chosen(h: Tensor) -> Tensor:
        rows, columns = torch.where(h > 0)
        some = h[rows, columns]
        made = F.linear(h[rows], torch.eye(6) * 1.1) * some[:, None]
        return torch.zeros_like(h).index_add(0, rows, made.to(h.dtype)).argmax(-1)

    ledger = audit(made(chosen), [batch()], F.cross_entropy, routes=True)
    gt, argmax = ledger.routes
    assert (gt.node, argmax.node) == ("gt", "argmax") and gt.causes and argmax.causes
    (remark,) = (each for each in ledger.remarks if each.startswith("not known what the roundings of "))
    assert "linear" in remark, "its rounding has the shape of the run"


def test_what_does_not_run_in_another_shape_is_not_known() -> None:
    def chosen(h: Tensor) -> Tensor:
        some = h.flatten()[(h.flatten() > 0).nonzero()[:, 0]]
        return (h + (some * torch.arange(len(some))).mean()).argmax(-1)

    ledger = audit(made(chosen), [batch()], F.cross_entropy, routes=True)
    assert any(each.startswith("routes behind mul are not known") for each in ledger.remarks)
    assert [route.node for route in ledger.routes] == ["gt"]


def test_a_router_of_experts() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.last = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x).tanh()
            weights, chosen = self.gate(h).softmax(-1).topk(2, -1)
            shares = (F.one_hot(chosen, 4) * weights[..., None]).sum(1)
            return self.last(sum(shares[:, n : n + 1] * expert(h) for n, expert in enumerate(self.experts)))

    torch.manual_seed(0)
    (route,) = routed(fxprec.convert(Experts(), dtype=BF16)[0], batch(size=2048))
    assert route.node == "topk" and route.op == "aten::topk" and route.flipped > 0
    names = {cause.node for cause in route.causes}
    assert names and not any(name.startswith(("experts", "last")) for name in names), "what comes behind flips nothing"
