"""Models of one class stay of one class, as what compares classes wants it: torch.func.stack_module_state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import fxprec


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def encode(self, x):
        return torch.tanh(self.a(x))

    def forward(self, x):
        return self.b(self.encode(x))


def converted(**options) -> nn.Module:
    return fxprec.convert(Net(), dtype=torch.bfloat16, **options)[0]


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_an_ensemble(capture):
    models, x = [Net() for _ in range(3)], torch.randn(5, 4)
    want = torch.stack([model(x) for model in models])
    ours = [fxprec.convert(model, dtype=torch.bfloat16, capture=capture)[0] for model in models]
    parameters, buffers = stack_module_state(ours)
    base = ours[0]
    got = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    torch.testing.assert_close(torch.stack([model(x) for model in ours]), want, rtol=0.02, atol=0.02)


def test_a_class_for_what_is_converted_alike(monkeypatch):
    first, second, other = converted(), converted(level="O2"), converted(methods=("encode",))
    assert type(first) is type(second) is type(copy.deepcopy(first)) is type(pickle.loads(pickle.dumps(first)))
    assert type(other) is not type(first) and isinstance(other, Net)
    assert type(fxprec.convert(nn.Linear(2, 2))[0]) is not type(first)
    monkeypatch.setattr(Net, "forward", lambda self, x: self.encode(x))
    patched = converted()
    assert type(patched) is not type(first) and patched(torch.ones(1, 4)).shape == (1, 8)


def test_each_has_its_own_conversion():
    first, second = converted(), converted(level="O0")
    x = torch.randn(2, 4)
    exact = second(x)
    fxprec.revert(first)
    assert type(first) is Net and torch.equal(second(x), exact)
    assert fxprec.report(second).headline.settings.startswith("O0")
    del second
    assert converted()(x).dtype is torch.float32


def test_one_in_the_other_is_seen_through():
    """A capture of the one sees the user's functions in the places of the other's methods, too."""
    outer = nn.Sequential(Net(), nn.Linear(3, 2))
    inner = fxprec.convert(outer[0], dtype=torch.bfloat16)[0]
    alone = converted()
    x = torch.randn(2, 4)
    assert alone(x).shape == (2, 3) and inner(x).shape == (2, 3)
    assert fxprec.graph_module(alone) is not fxprec.graph_module(inner)
