"""Weights written through ``.data``, and an attribute that says so: what PEFT's merge_adapter does to a layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxprec


class Adapted(nn.Module):
    """A layer with an adapter beside it, or merged into its weight, unseen."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(16, 16), nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.merged = False

    def forward(self, x):
        return self.base(x) if self.merged else self.base(x) + self.up(self.down(x))

    def merge(self, merged):
        delta = self.up.weight.data @ self.down.weight.data
        self.base.weight.data += delta if merged else -delta
        self.merged = merged


class Several(Adapted):
    """With a graph break in it."""

    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize("cls", [Adapted, Several])
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_graph_that_another_state_of_the_model_wants_reads_the_weights_anew(cls, capture):
    if cls is Several and capture == "symbolic":
        cls = Adapted  # the break is dynamo's
    torch.manual_seed(0)
    model = cls().eval()
    for layer in (model.down, model.up):
        nn.init.normal_(layer.weight)
    exact = copy.deepcopy(model).double()
    x = torch.randn(4, 16)
    converted, _ = fxprec.convert(model, capture=capture)
    with torch.no_grad():
        expected = exact(x.double())
        for merged in (False, False, True, True, False, True):
            if merged is not model.merged:
                model.merge(merged)
            refreshes = converted._fxprec.store.refreshes
            error = (converted(x) - expected).abs().max() / expected.abs().max()
            assert error < 0.02, merged
            again = converted._fxprec.store.refreshes
            converted(x)
            assert converted._fxprec.store.refreshes == again <= refreshes + 2  # the same graphs: nothing is read anew


def test_shapes_that_alternate_in_a_static_graph_refresh_nothing():
    model, _ = fxprec.convert(nn.Linear(16, 16))
    with torch.no_grad():
        model(torch.randn(4, 16))
        refreshes = model._fxprec.store.refreshes
        for size in (3, 4, 3, 4):
            model(torch.randn(size, 16))
    assert model._fxprec.store.refreshes == refreshes
