"""Numbers that low arithmetic loses are risks in the report, with their line; each sentence is held against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxprec

BF16, F16 = torch.bfloat16, torch.float16


class Between(nn.Module):
    """An op between two products: what it computes is low."""

    def __init__(self, op: Callable[[Tensor], Tensor]):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.op(self.before(x)))


def risks(op: Callable[[Tensor], Tensor], low: torch.dtype, **options: str) -> list[str]:
    """The risks that the report names because of numbers."""
    model, _ = fxprec.convert(Between(op), dtype=low, level="O1", scaler=False, **options)
    model(torch.randn(2, 4))
    return [risk for risk in fxprec.report(model).headline.risks if " with " in risk]


#: Of every op and number whether bfloat16 and float16 lose something, and what is said of it.
CASES = {
    "a small number added": (lambda y: y + 1e-3, (BF16,), "add with 0.001 in bfloat16 gives back what it was added to"),
    "subtracted": (lambda y: y - 1e-4, (BF16, F16), "sub with 0.0001 in"),
    "added in place": (lambda y: y.add_(1e-3), (BF16,), "with 0.001 in bfloat16 gives back"),
    "a factor near one": (lambda y: y * 0.999, (BF16,), "mul with 0.999 in bfloat16 gives back what it multiplies"),
    "divided by nearly one": (lambda y: y / 0.9999, (BF16, F16), "div with 0.9999 in"),
    "half": (lambda y: (y + 0.5) * 0.5, (), ""),
    "a bound that is kept": (lambda y: y.clamp(-0.75, 0.1), (), ""),
    "a factor of the other operand": (lambda y: torch.add(y, y, alpha=1e-3), (), ""),
    "one": (lambda y: (y + 1.0) * 1.0, (), ""),
}


#: Bounds that low precision takes for an integer: FP32, unless torch.autocast's placement is asked for.
BOUNDS = {
    "a bound": (lambda y: y.clamp(max=1 - 1e-4), (BF16, F16), "takes 1 for it"),
    "a bound, by position": (lambda y: torch.clamp(y, -0.9999, 4.0), (BF16, F16), "takes -1 for it"),
    "a number that is filled in": (lambda y: y.masked_fill(y > 0, 0.9999), (BF16, F16), "takes 1 for it"),
    "compared": (lambda y: y * (y < 0.9999), (BF16, F16), "lt with 0.9999 in"),
}


@pytest.mark.filterwarnings("ignore::fxprec.errors.SlowDtypeWarning")
@pytest.mark.parametrize("low", [BF16, F16], ids=str)
@pytest.mark.parametrize("case", BOUNDS.values(), ids=BOUNDS)
def test_a_bound_is_lost_where_autocast_loses_it(case: tuple, low: torch.dtype):
    op, _, text = case
    (risk,) = risks(op, low, placement="autocast")
    assert text in risk and "test_constants.py:" in risk
    assert not risks(op, low)


@pytest.mark.filterwarnings("ignore::fxprec.errors.SlowDtypeWarning")
@pytest.mark.parametrize("low", [BF16, F16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_number_that_is_lost_is_a_risk(case: tuple, low: torch.dtype):
    op, lost_in, text = case
    found = risks(op, low)
    assert len(found) == (low in lost_in)
    assert all(text in risk and "test_constants.py:" in risk for risk in found)


@pytest.mark.parametrize("low", [BF16, F16], ids=str)
def test_the_sentences_are_true(low: torch.dtype):
    """Of all low values: beyond the bound an added number is lost, and a factor so near to one gives each back."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(low)
    values = values[values.isfinite() & (values.abs() > torch.finfo(low).tiny * 4)]
    for number in (1e-3, 3e-4, 1e-4):
        (risk,) = risks(lambda y, number=number: y + number, low) or [""]
        if risk:
            beyond = values[values.abs() > float(risk.split("beyond ")[1].split(":")[0])]
            assert beyond.numel() > 1000
            assert torch.equal(beyond + number, beyond)
        if risks(lambda y, number=number: y * (1 - number), low):
            assert torch.equal(values * (1 - number), values)


def test_equal_lines_are_told_once():
    (risk,) = risks(lambda y: ((y + 1e-3) * 0.5 + 1e-3) * 0.5, BF16)
    assert risk.count("test_constants.py:") == 1


def test_dynamo_graphs_tell_them_too():
    assert len(risks(lambda y: y * 0.999, BF16, capture="dynamo")) == 1


def test_what_stays_fp32_loses_nothing():
    policy = fxprec.Policy.preset("O1").override(ops={"mul": "full"})
    model, _ = fxprec.convert(Between(lambda y: y * 0.999), dtype=BF16, policy=policy)
    model(torch.randn(2, 4))
    assert not fxprec.report(model).headline.risks
