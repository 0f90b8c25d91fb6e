"""Weights that are tied, or untied, after a capture: a forward may ask which parameters are one tensor."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import fxprec
from fxprec.capture.facts import CapturedFacts, Fact, Ties, slots_of
from fxprec.capture.symbolic.trace import trace_static

X = torch.randn(4, 8)

ASKS = {
    "parameters": lambda s: sum(1 for _ in s.parameters()),
    "named_parameters": lambda s: len(dict(s.named_parameters())),
    "is": lambda s: 3 if s.a.weight is s.b.weight else 5,
    "in_a_list": lambda s: 3 if any(s.a.weight is p for p in [s.b.weight]) else 5,
    "set": lambda s: len({s.a.weight, s.b.weight}),
    "buffers": lambda s: len(list(s.buffers())),
    "modules": lambda s: len(list(s.modules())),
}


def net(ask):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("p", torch.ones(8))
            self.register_buffer("q", torch.ones(8))
            self.register_buffer("none", None)

        def forward(self, x):
            return self.a(self.b(x)) * ask(self)

    return Net()


def tie(model):
    model.b.weight, model.q = model.a.weight, model.p


def untie(model):
    model.b.weight, model.q = nn.Parameter(model.a.weight.detach() + 1), model.p + 1


def tie_modules(model):
    model.b = model.a


def tied_anew(model):
    model.b = nn.Linear(8, 8)
    model.b.weight = model.a.weight


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("changes", [(tie, untie), (tie_modules, tied_anew)])
def test_a_graph_serves_the_ties_it_was_made_for(ask, changes, capture):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fxprec.convert(net(ASKS[ask]), dtype=torch.bfloat16, capture=capture).module
    for change in (lambda _: None, *changes, *changes):
        change(model)
        for _ in range(2):
            got = model(X)
            with fxprec.original(model):
                torch.testing.assert_close(got, model(X), atol=0.3, rtol=0.05)
    assert fxprec.report(model).headline.graphs and not fxprec.report(model).headline.net


def test_other_tensors_with_the_same_ties_are_no_change():
    model = net(ASKS["parameters"])
    guards = trace_static(model, ["x"], {}).guards
    for _ in range(2):
        model.b.weight = nn.Parameter(torch.randn(8, 8))
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        assert guards.failing() is None
    tie(model)
    assert guards.failing() == "q and p became one"
    guards = trace_static(model, ["x"], {}).guards
    assert guards.failing() is None
    untie(model)
    assert guards.failing() == "q and p are no longer one"


def test_a_functional_call_is_no_change():
    model = fxprec.convert(net(ASKS["parameters"]), dtype=torch.bfloat16).module
    for expected in (2, 2):  # one for parameters, one for plain tensors
        model(X)
        torch.func.functional_call(model, {k: v.detach() * 2 for k, v in model.named_parameters()}, (X,))
        assert fxprec.report(model).headline.captures == expected


def test_one_more_and_one_less():
    for change, what in (
        (lambda m: m.register_buffer("more", torch.ones(1)), "a parameter or buffer was added or deleted"),
        (lambda m: delattr(m, "q"), "a parameter or buffer was added or deleted"),
        (lambda m: setattr(m, "none", torch.ones(1)), "none changed from NoneType to Tensor"),
    ):
        model = net(ASKS["buffers"])
        guards = trace_static(model, ["x"], {}).guards
        change(model)
        assert guards.failing() == what


def test_slots_that_hold_nothing_are_not_tied():
    model = net(ASKS["is"])
    model.register_buffer("other", None)
    ties = Ties(slots_of(model))
    model.none = torch.ones(2)
    assert ties.hold() and ties.change() is None
    model.other = model.none
    assert not ties.hold() and ties.change() == "other and none became one"


def test_a_model_that_is_dropped_is_freed():
    for capture in ("auto", "dynamo"):
        model = fxprec.convert(net(ASKS["is"]), dtype=torch.bfloat16, capture=capture).module
        model(X)
        left = weakref.ref(model)
        del model
        gc.collect()
        assert left() is None


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("place", [vars, type], ids=["object", "class"])
def test_an_attribute_that_hides_a_parameter_takes_the_place_of_another(place, capture):
    class Scale(nn.Module):
        other = 1

        def __init__(self):
            super().__init__()
            self.factor, self.scratch = nn.Parameter(torch.ones(8)), 1

        def forward(self, x):
            return x * self.factor

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale = nn.Linear(8, 8), Scale()

        def forward(self, x):
            return self.scale(self.fc(x))

    model = fxprec.convert(Net(), dtype=torch.bfloat16, capture=capture).module
    assert model(X).abs().max() > 0
    # As many attributes as before.
    if place is vars:
        del model.scale.scratch
        vars(model.scale)["factor"] = torch.zeros(8)
    else:
        del Scale.other
        Scale.factor = torch.zeros(8)
    assert model(X).abs().max() == 0


def test_a_label_of_a_fact_whose_question_fails_is_told():
    held = {"a": 1}
    facts = CapturedFacts([Fact(held.__getitem__, "a", 1, "the entry")])
    assert facts.failing() is None
    del held["a"]
    assert facts.failing() == "the entry changed from 1 to None"
