"""Forwards that ask for their class find the user's, in graphs, between them and in the net."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import fxprec
from fxprec.capture.originals import original_class
from fxprec.model.conversion import conversion_of
from fxprec.model.method import asks_for_class, twin_of

LOW = torch.bfloat16


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x)


class BySuper(Base):
    def forward(self, x):
        return super(type(self), self).forward(x) * 2


class ByDunder(Base):
    def forward(self, x):
        return super(self.__class__, self).forward(x) * 2


class ByIdentity(Base):
    def forward(self, x):
        return super().forward(x) * (3 if type(self) is ByIdentity else 5)


class Breaking(Base):
    """The class is asked for in a piece between graphs, and after it."""

    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        seen = [type(self)]
        torch._dynamo.graph_break()
        return x * (3 if seen == [Breaking] and type(self) is Breaking else 5)


def _scale(module):
    return 3 if type(module) is ByHelper else 5


class ByHelper(Base):
    def forward(self, x):
        return super().forward(x) * _scale(self)


class Counting(Base):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        self.last = x
        return super().forward(x) * type(self).calls


class Encoding(Base):
    def encode(self, x):
        return super(type(self), self).forward(x) * (3 if type(self) is Encoding else 5)


@contextlib.contextmanager
def in_the_net(model):
    """As a debugger of somebody's would have it: dynamo runs no compiled code under such modes."""

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        yield


AROUND = {"graphs": lambda _: contextlib.nullcontext(), "net": in_the_net, "original": fxprec.original}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("make", [BySuper, ByDunder, ByIdentity, Breaking, ByHelper, Counting])
def test_the_class_is_the_user_s(make, capture, around):
    torch._dynamo.reset()
    model, plain, x = make(), make(), torch.randn(4, 8)
    plain.load_state_dict(model.state_dict())
    model = fxprec.convert(model, dtype=LOW, capture=capture).module
    for _ in range(3):
        Counting.calls = before = Counting.calls + 1
        expected, after = plain(x), Counting.calls
        Counting.calls = before
        with around(model):
            output = model(x)
        assert torch.allclose(output, expected, rtol=0.1, atol=0.1)
        assert Counting.calls == after
    assert type(model) is not make and original_class(model) is make


def test_what_it_writes_is_the_model_s():
    model = fxprec.convert(Counting(), dtype=LOW, capture="dynamo").module
    x = torch.randn(4, 8)
    model(x)
    assert model.last is x and vars(model)["last"] is x
    model.fc = nn.Linear(8, 8)
    other = model.fc
    model(x).sum().backward()
    assert other.weight.grad is not None
    assert fxprec.report(model).headline.computes["bfloat16"]


def test_methods_of_the_model_and_of_a_part_of_it():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Encoding()

        def forward(self, x):
            return self.part(x)

    whole, x = Whole(), torch.randn(4, 8)
    model = fxprec.convert(whole, dtype=LOW, capture="dynamo", methods=("part.encode",)).module
    expected = model.part.fc(x) * 3
    for _ in range(2):
        assert torch.allclose(model.part.encode(x), expected, rtol=0.1, atol=0.1)
    assert any(captured.method == "part.encode" for captured in conversion_of(model).captured)


def test_only_code_that_asks_gets_a_twin():
    assert [asks_for_class(each) for each in (Base, BySuper, ByDunder, ByHelper, nn.Linear)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    model = fxprec.convert(Base(), dtype=LOW, capture="dynamo").module
    entry = conversion_of(model).methods["forward"]
    assert entry.stand_in(model) is model
    asking = fxprec.convert(BySuper(), dtype=LOW, capture="dynamo").module
    entry = conversion_of(asking).methods["forward"]
    twin = entry.stand_in(asking)
    assert type(twin) is BySuper and twin.__dict__ is asking.__dict__
    assert entry.stand_in(asking) is twin is entry.stand_in(twin)
    assert twin_of(asking) is not twin


def test_the_twin_does_not_capture_again():
    model = fxprec.convert(BySuper(), dtype=LOW, capture="dynamo").module
    for _ in range(3):
        model(torch.randn(4, 8))
    assert conversion_of(model).captures == 1 and not conversion_of(model).net
