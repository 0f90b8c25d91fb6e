"""What a class may have as its forward beside a function of self."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import fxprec

LOW = torch.bfloat16
WEIGHT = nn.Parameter(torch.randn(8, 8))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.scale = nn.Linear(8, 8), 1.0

    def once(self, x):
        return self.l(x) * self.scale

    def often(self, x, k=2.0):
        return self.l(x) * k


class Product:
    def __call__(self, x):
        return x @ WEIGHT


class Descriptor:
    def __get__(self, module, owner):
        return self if module is None else module.once


class Decorated:
    def __init__(self, function):
        self.function = function

    def __get__(self, module, owner):
        return self if module is None else functools.partial(self.function, module)

    def __call__(self, module, x):
        return self.function(module, x)


def chosen(self):
    return self.once if self.scale < 2 else self.often


KINDS = {
    "property": property(chosen),
    "staticmethod": staticmethod(lambda x: x @ WEIGHT),
    "classmethod": classmethod(lambda cls, x: x @ WEIGHT),
    "builtin": torch.relu,
    "callable": Product(),
    "partial": functools.partial(torch.matmul, WEIGHT.detach()),
    "partialmethod": functools.partialmethod(Base.often, k=3.0),
    "descriptor": Descriptor(),
    "decorated": Decorated(Base.once),
    "no_grad": torch.no_grad()(Base.once),
}


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_forward_is_captured(kind, capture, tools):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = type("M", (Base,), {"forward": KINDS[kind]})()
    model = fxprec.convert(copy.deepcopy(plain), dtype=LOW, capture=capture).module
    x = torch.randn(8, 8)
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x), atol=0.1, rtol=0.1)
        torch.testing.assert_close(model.forward(x), plain(x), atol=0.1, rtol=0.1)
    assert tools.matmul_dtypes(model, x) == ({} if kind == "builtin" else {LOW: 1})
    headline = fxprec.report(model).headline
    assert (headline.graphs, headline.captures) == (1, 1) and not headline.net
    with fxprec.original(model):
        assert torch.equal(model(x), plain(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(fxprec.revert(model)(x), plain(x))


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_a_property_is_asked_at_each_call(capture):
    torch._dynamo.reset()
    model = fxprec.convert(type("M", (Base,), {"forward": property(chosen)})(), dtype=LOW, capture=capture).module
    x = torch.randn(8, 8)
    once = model(x)
    model.scale = 2.0
    torch.testing.assert_close(model(x), once * 2)
    model.scale = 0.5
    torch.testing.assert_close(model(x), once * 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_child(kind):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), type("M", (Base,), {"forward": KINDS[kind]})())
    model = fxprec.convert(copy.deepcopy(plain), dtype=LOW).module
    x = torch.randn(8, 8)
    torch.testing.assert_close(model(x), plain(x), atol=0.1, rtol=0.1)
    assert not fxprec.report(model).headline.net
