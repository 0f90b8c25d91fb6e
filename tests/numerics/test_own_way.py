"""Numbers that Python reads between graphs: the reference of an audit goes its own way by its own numbers."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from as_it_was import unchanged
from fxprec.numerics import audit, locate

Between = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two layers, and between them what reads numbers; ``at`` lies between those of the run and of the reference."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first, self.other, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.between, self.at = between, 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)))


def branch(net: Net, h: Tensor) -> Tensor:
    return h * 2 if h.sum() > net.at else net.other(h).tanh()


def of_a_number(net: Net, h: Tensor) -> Tensor:
    return h * 2 if h.sum().item() > net.at else h.tanh()


def scaled(net: Net, h: Tensor) -> Tensor:
    return h * h.sum().item()


def several(net: Net, h: Tensor) -> Tensor:
    h = h / float(h.abs().amax())
    return h.relu() if bool(h.mean() * 64 > 0) else h * float(h.std())


def turns(net: Net, h: Tensor) -> Tensor:
    for _ in range(int((h.sum() > net.at).sum()) + 1):
        h = net.other(h).tanh()
    return h


WAYS: dict[str, Between] = {
    "branch": branch, "of a number": of_a_number, "scaled": scaled, "several": several, "turns": turns,
}  # fmt: skip


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)), torch.tensor([0, 1, 2, 3])


def made(between: Between) -> tuple[nn.Module, nn.Module]:
    """A converted model, and the same in float64."""
    torch.manual_seed(0)
    net = Net(between)
    x, _ = batch()
    double = copy.deepcopy(net).double()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        low = net.first(x).sum().item()
    net.at = double.at = (low + double.first(x.double()).sum().item()) / 2  # type: ignore[assignment]
    return fxprec.convert(net, dtype=torch.bfloat16)[0], double


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_the_error_is_that_of_the_reference_of_its_own_way(name: str, gradients: bool) -> None:
    model, double = made(WAYS[name])
    x, y = batch()
    expected = F.cross_entropy(double(x.double()), y)
    low = F.cross_entropy(model(x), y).item()
    with unchanged(model):
        ledger = audit(model, [(x, y)], F.cross_entropy, gradients=gradients)
    (sample,) = ledger.samples
    assert (sample.low, sample.reference) == (low, pytest.approx(expected.item(), rel=1e-6))
    assert ledger.explained == pytest.approx(ledger.measured, rel=1e-9)
    assert ledger.decisions and all("test_own_way.py:" in each.source for each in ledger.decisions)
    assert any(str(each) in ledger.remarks for each in ledger.decisions)
    (row,) = (row for row in ledger.rows if row.node == "read by Python")
    assert row.kind == "outside" and row.source.startswith(ledger.decisions[0].source) and row.bend == row.contribution
    if not gradients:
        assert ledger.measured == pytest.approx(low - expected.item(), rel=1e-3)
        return
    expected.backward()
    for path, parameter in double.named_parameters():
        norm = 0.0 if parameter.grad is None else parameter.grad.norm().item()
        if path in ledger.parameters:
            assert ledger.parameters[path].norm == pytest.approx(norm, rel=1e-5, abs=1e-9)


@pytest.mark.slow
def test_a_branch_that_goes_the_other_way_is_told_with_its_line() -> None:
    model, _ = made(branch)
    ledger = audit(model, [batch()], F.cross_entropy)
    (decision,) = ledger.decisions
    assert decision.low is not decision.reference and isinstance(decision.low, bool)
    assert ledger.rows[0].node == "read by Python"
    said, way = ledger.remarks
    assert said == f"Python read {decision.low} at {decision.source}, and {decision.reference} in the reference"
    assert way.startswith("the reference goes another way than the run from ") and "test_own_way.py:" in way
    assert said in str(ledger)
    data = json.loads(json.dumps(ledger.to_dict()))
    assert data["decisions"] == [{"source": decision.source, "low": decision.low, "reference": decision.reference}]


def test_outputs_are_compared_with_those_of_the_other_way() -> None:
    model, double = made(branch)
    x, _ = batch()
    with torch.no_grad():
        error = (model(x).double() - double(x.double())).norm().item()
        ledger = audit(model, [(x,)])
    assert ledger.measured == pytest.approx(error, rel=1e-5) and ledger.explained == pytest.approx(error, rel=1e-5)


def test_outputs_of_another_shape_are_not_comparable() -> None:
    model, _ = made(lambda net, h: h[:2] if h.sum() > net.at else h)
    remark = audit(model, [batch()[:1]]).remarks[0]
    assert remark.startswith("not comparable with the reference, which gives other shapes: Python read ")


@pytest.mark.parametrize("between", [lambda net, h: h * 2 if h.sum() > 1e6 else h, lambda net, h: h.tanh()])
def test_what_nothing_comes_of_is_not_told(between: Between) -> None:
    """The same way, and a loss that reads a number, to print it."""
    model, _ = made(between)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = F.cross_entropy(output, target)
        assert math.isfinite(found.item())
        return found

    ledger = audit(model, [batch()], loss)
    assert not ledger.remarks and not ledger.decisions
    assert all(row.node != "read by Python" for row in ledger.rows)


def test_locate_tells_what_python_read_otherwise() -> None:
    model, _ = made(lambda net, h: (h * 0).log() if h.sum().item() > net.at - 1 else h)
    with unchanged(model):
        found = locate(model, batch(), F.cross_entropy)
    assert found is not None and found.op == "log"
    (decision,) = found.decisions
    assert str(decision) in str(found) and "test_own_way.py:" in decision.source
    assert json.loads(json.dumps(found.to_dict()))["decisions"] == [decision.to_dict()]
