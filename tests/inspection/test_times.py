"""What the report says each node takes: the prices of the costs that the conversion goes by, made by hand here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprec
from fxprec.inspection.prices import UNKNOWN
from made_costs import device


def seconds(model, *inputs, **options):
    converted, _ = fxprec.convert(model, inputs or None, **options)
    return {row.node: row.seconds for row in fxprec.report(converted).graphs[0].rows}


COSTS = device(full=100.0, low=10.0, cast=3.0, pointwise=(8.0, 4.0))


def test_products_casts_and_what_streams():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Flatten(), nn.Linear(8, 8)).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        found = seconds(model, torch.randn(4, 8), lower=COSTS)
    assert next(iter(found.values())) == 0.0, "the input"
    assert found["linear"] == found["linear_1"] == pytest.approx(10e-6, rel=1e-3)
    assert found["gelu"] == pytest.approx(4e-6, rel=1e-3) and found["flatten"] == 0.0
    casts = [value for name, value in found.items() if name.endswith(("_bf16", "_f32")) and value]
    assert casts == [pytest.approx(3e-6, rel=1e-3)] * 2  # of the input, and of the output


def test_what_stays_fp32_takes_the_time_of_fp32():
    policy = fxprec.Policy.preset("O1").override(ops={"linear": torch.float32, "gelu": torch.float32})
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval().requires_grad_(False)
    with torch.no_grad():
        found = seconds(model, torch.randn(4, 8), lower=COSTS, policy=policy)
    assert found["linear"] == pytest.approx(100e-6, rel=1e-3) and found["gelu"] == pytest.approx(8e-6, rel=1e-3)


def test_the_backward_counts_where_there_is_one():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    found = seconds(model, torch.randn(4, 8), lower=COSTS)
    assert found["linear"] == pytest.approx(20e-6, rel=0.01)  # there and for the weight; the input wants no gradient
    assert found["gelu"] == pytest.approx(8e-6, rel=0.01) and found["linear_1"] == pytest.approx(30e-6, rel=0.01)


def test_unknown_sizes_are_unknown():
    found = seconds(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    assert found["linear"] == found["gelu"] == UNKNOWN


class InDouble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        exact = torch.sin(x.double())
        return self.layer(x).half() @ x.half().mT, exact @ exact.mT


def test_a_dtype_without_costs_is_unknown():
    found = seconds(InDouble(), torch.randn(4, 8), lower=COSTS)
    assert found["sin"] == found["matmul_1"] == UNKNOWN and found["matmul"] > 0
