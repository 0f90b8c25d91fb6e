"""Sums of many values that are written to one place: as exact as those of torch.sum, whatever the level."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprec

PLACES = torch.zeros(2000, dtype=torch.long)
SUMS = {
    "index_put": lambda y: y.new_zeros(2, 4).index_put((PLACES,), y, accumulate=True),
    "index_put_": lambda y: y.new_zeros(2, 4).index_put_((PLACES,), y, accumulate=True) * 1,
    "put": lambda y: y.new_zeros(2).put(PLACES, y[:, 0], accumulate=True),
    "index_add": lambda y: torch.zeros(2).index_add(0, PLACES, y[:, 0]),
    "index_add_": lambda y: y.new_zeros(2).index_add_(0, PLACES, y[:, 0]) * 1,
    "index_reduce": lambda y: y.new_zeros(2, 4).index_reduce(0, PLACES, y, "mean", include_self=False),
    "scatter_reduce": lambda y: y.new_zeros(2).scatter_reduce(0, PLACES, y[:, 0], "sum"),
    "scatter": lambda y: y.new_zeros(2).scatter(0, PLACES, y[:, 0], reduce="add"),
    "scatter_add": lambda y: y.new_zeros(2, 4).scatter_add(0, PLACES[:, None].expand(-1, 4), y),
}


class Sums(nn.Module):
    def __init__(self, of):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.of = of

    def forward(self, x):
        return self.of(self.layer(x).abs() + 0.5)


@pytest.mark.parametrize("settings", [{}, {"level": "O2"}, {"level": "O2", "capture": "dynamo"}], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_in_one_place_does_not_stall(name, settings):
    model, x = Sums(SUMS[name]), torch.randn(2000, 4)
    expected = model(x)
    found = fxprec.convert(Sums(SUMS[name]), dtype=torch.bfloat16, **settings).module(x)
    assert (found - expected).norm() <= 0.01 * expected.norm()
