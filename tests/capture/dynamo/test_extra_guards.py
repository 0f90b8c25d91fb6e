"""What dynamo takes for granted without a guard is asked at each call: what changes is seen, and captured anew."""

from __future__ import annotations

import abc
import copy
import gc
import math
import os
import time
import types
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.capture.dynamo.extra_guards import ExtraGuards
from fxprec.model.conversion import conversion_of

LOW = torch.bfloat16
#: Stands for a module that somebody else wrote.
HELPER = types.ModuleType("helper")
HELPER.scale = lambda x: x * getattr(HELPER, "factor", 2.0)  # type: ignore[attr-defined]
KEY = "FXPREC_TEST_GRANTED"


class Shape(abc.ABC):
    """An abstract class of which others can be said to be."""

    @abc.abstractmethod
    def area(self): ...


class Square:
    pass


class Tool:
    """An object that is no module."""

    k = 2.0

    def __call__(self, x):
        return x * self.k

    def __mul__(self, x):
        return x * self.k

    @property
    def twice(self):
        return self.k * 2


class Base(nn.Module):
    factor = 2.0

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def scale(self, x):
        return x * 2

    def forward(self, x):
        return self.fc(x) * 2


class Between(Base):
    pass


class Child(Between):
    def forward(self, x):
        return super().forward(x) + 1

    @property
    def weight(self):
        return 2.0

    @staticmethod
    def halved(x):
        return x / 2

    @classmethod
    def shifted(cls, x):
        return x + 1

    def optional(self, x, *, by=2.0):
        return x * by


class Model(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.child, self.tool, self.compute = Child(), Tool(), compute
        self.shape = Square()

    def forward(self, x):
        return self.compute(self, self.child.fc(x))


def _times(owner, name):
    """Replace a function by three times itself."""

    def change(monkeypatch):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: plain(*args) * 3)

    return change


def _set(owner, name, value):
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value, raising=False)


def _of_class(owner, name, make):
    """Set what ``make`` gives, raw: a property, a static or a class method."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make())


def _own_key(self, x):
    return x * self.child.__dict__.get("later", 2.0)


def _own_vars(self, x):
    return x * (3.0 if "later" in vars(self.child) else 2.0)


def _shadowed(self, x):
    return x * max(2.0, 1.0)


def _of_tensors(self, x):
    return x.abs() + F.relu(x)


CHANGES = {
    "method": (lambda s, x: s.child.scale(x), _times(Base, "scale")),
    "inherited": (lambda s, x: s.child.scale(x), _set(Between, "scale", lambda s, x: x * 5)),
    "forward": (lambda s, x: s.child(x), _set(Child, "forward", lambda s, x: x * 5)),
    "called by super": (lambda s, x: s.child(x), _times(Base, "forward")),
    "comes before super": (lambda s, x: s.child(x), _set(Between, "forward", lambda s, x: x * 5)),
    "module of torch": (lambda s, x: s.child(x), _times(nn.Linear, "forward")),
    "property": (lambda s, x: x * s.child.weight, _of_class(Child, "weight", lambda: property(lambda s: 5.0))),
    "static method": (
        lambda s, x: s.child.halved(x),
        _of_class(Child, "halved", lambda: staticmethod(lambda x: x * 3)),
    ),
    "class method": (
        lambda s, x: s.child.shifted(x),
        _of_class(Child, "shifted", lambda: classmethod(lambda c, x: x * 3)),
    ),
    "class attribute": (lambda s, x: x * s.child.factor, _set(Base, "factor", 0.5)),
    "class attribute by type": (lambda s, x: x * type(s.child).factor, _set(Base, "factor", 0.5)),
    "attribute of the class that comes before": (lambda s, x: x * s.child.factor, _set(Child, "factor", 0.5)),
    "option": (lambda s, x: s.child.optional(x), _set(Child.optional, "__kwdefaults__", {"by": 5.0})),
    "code": (lambda s, x: s.child.scale(x), _set(Base.scale, "__code__", (lambda self, x: x * 5).__code__)),
    "call of an object": (lambda s, x: s.tool(x), _times(Tool, "__call__")),
    "operator": (lambda s, x: s.tool * x, _times(Tool, "__mul__")),
    "property of an object": (lambda s, x: x * s.tool.twice, _of_class(Tool, "twice", lambda: property(lambda s: 5.0))),
    "class attribute of an object": (lambda s, x: x * s.tool.k, _set(Tool, "k", 0.5)),
    "function of torch": (lambda s, x: F.relu(x), _times(F, "relu")),
    "function of torch by its path": (lambda s, x: torch.nn.functional.relu(x), _times(F, "relu")),
    "function of torch within torch": (lambda s, x: s.child.fc(x), _times(F, "linear")),
    "method of tensors": (_of_tensors, _times(torch.Tensor, "abs")),
    "function of the library": (lambda s, x: x * math.sqrt(4.0), _set(math, "sqrt", lambda value: value * 3)),
    "clock": (lambda s, x: x * time.time(), _set(time, "time", lambda: 3.0)),
    "builtin": (_shadowed, lambda monkeypatch: monkeypatch.setitem(globals(), "max", lambda *values: 5.0)),
    "attribute that appears": (lambda s, x: HELPER.scale(x), _set(HELPER, "factor", 5.0)),
    "environment": (
        lambda s, x: x * float(os.environ.get(KEY, "2")),
        lambda monkeypatch: monkeypatch.setenv(KEY, "5"),
    ),
    "getenv": (lambda s, x: x * float(os.getenv(KEY) or 2), lambda monkeypatch: monkeypatch.setenv(KEY, "5")),
    "abstract class": (lambda s, x: x * (3.0 if isinstance(s.shape, Shape) else 2.0), lambda _: Shape.register(Square)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_seen(name, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(time, "time", lambda: 2.0)
    compute, change = CHANGES[name]
    model = Model(compute)
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture="dynamo").module
    x = torch.randn(4, 8)
    before = converted(x)
    assert torch.allclose(before, model(x), rtol=0.1, atol=0.1)
    change(monkeypatch)
    after = converted(x)
    assert torch.allclose(after, model(x), rtol=0.1, atol=0.1)
    assert not torch.allclose(after, before, rtol=0.1, atol=0.1)
    assert fxprec.graphs(converted) and not any("whole" in where for where in conversion_of(converted).net)


@pytest.mark.parametrize("compute", (_own_key, _own_vars))
def test_a_name_that_appears_in_a_module_s_own_dict(compute):
    model = Model(compute)
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture="dynamo").module
    x = torch.randn(4, 8)
    for _ in range(2):
        assert torch.allclose(converted(x), model(x), rtol=0.1, atol=0.1)
        for each in (model, converted):
            each.child.later = 3.0


SETTINGS = types.SimpleNamespace()


def _optional_setting():
    try:
        return SETTINGS.later
    except AttributeError:
        return 2.0


@pytest.mark.parametrize(
    "ask",
    (lambda: vars(SETTINGS).get("later", 2.0), lambda: SETTINGS.__dict__.get("later", 2.0), _optional_setting),
    ids=["vars", "__dict__", "try"],
)
def test_a_name_that_comes_and_goes(ask):
    """Where it is gone, dynamo compiles once more under what it was granted before, and takes that for granted, too."""
    torch._dynamo.reset()
    vars(SETTINGS).clear()
    model = Model(lambda s, x: x * ask())
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture="dynamo").module
    x = torch.randn(4, 8)
    for there in (False, True) * 3:
        vars(SETTINGS).clear()
        vars(SETTINGS).update({"later": 8.0} if there else {})
        assert torch.allclose(converted(x), model(x), rtol=0.1, atol=0.1)


@pytest.mark.slow
def test_what_keeps_changing_runs_in_the_net_at_last():
    def count(self, x):
        os.environ[KEY] = str(int(os.environ.get(KEY, "0")) + 1)
        return x * int(os.environ[KEY])

    os.environ.pop(KEY, None)
    model = Model(count)
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture="dynamo").module
    x = torch.randn(4, 8)
    for number in range(1, 14):
        assert torch.allclose(converted(x), model.child.fc(x) * number, rtol=0.1, atol=0.2)
    assert "environment changed" in conversion_of(converted).net["the whole forward"]
    del os.environ[KEY]


class Found:
    """An object that gets its attributes one after the other, and asks for them before."""

    def __init__(self, value=None):
        if value is not None:
            self.keep(value)

    def keep(self, value):
        self.times = getattr(self, "times", 0) + 1
        self.value = value


class Output(OrderedDict):
    """As the outputs of transformers are: a dict whose items are attributes, too."""

    def __init__(self, value):
        super().__init__(value=value)
        self.value = value

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


class Keeps(nn.Module):
    """Its forward writes to an object that it is given."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, found):
        found.keep(self.fc(x))
        return found.value * found.times


def _break_between(self, x):
    found = Found()
    torch._dynamo.graph_break()
    found.keep(x)
    return found.value


@pytest.mark.parametrize(
    ("make", "given", "graphs"),
    [
        (lambda: Model(_of_tensors), tuple, 1),
        (Child, tuple, 1),
        (lambda: Model(lambda s, x: Found(x).value), tuple, 1),
        (lambda: Model(lambda s, x: Output(x)), tuple, 1),
        (Keeps, lambda: (Found(),), 1),
        (lambda: Model(_break_between), tuple, 1),
    ],
    ids=["tensors", "super", "an object that it makes", "an output", "an argument", "an object from before a break"],
)
def test_nothing_changed_costs_no_capture(make, given, graphs):
    model = fxprec.convert(make(), dtype=LOW, capture="dynamo").module
    x = torch.randn(4, 8)
    for _ in range(3):
        model(x, *given())
    conversion = conversion_of(model)
    assert conversion.captures == graphs and conversion.methods["forward"].restarts == 0


class Factor:
    def of(self):
        try:
            return self.factor
        except AttributeError:
            return 2.0


def test_each_object_that_lacks_an_attribute_is_asked():
    """Not the first alone that a method runs on."""
    model = Model(lambda s, x: x * s.first.of() + s.second.of())
    model.first, model.second = Factor(), Factor()
    converted = fxprec.convert(model, dtype=LOW, capture="dynamo").module
    x = torch.randn(4, 8)
    for each in (model.first, model.second):
        before = converted(x)
        each.factor = 8.0
        assert not torch.allclose(converted(x), before, rtol=0.1)


@pytest.mark.slow
def test_a_model_that_is_dropped_is_not_kept_by_what_it_was_granted():
    model = fxprec.convert(Model(_own_vars), dtype=LOW, capture="dynamo").module
    model(torch.randn(4, 8))
    weight = weakref.ref(model.child.fc.weight)
    del model
    gc.collect()
    assert weight() is None


def test_a_super_call_asks_each_class_that_could_come_before():
    extra = ExtraGuards()
    extra.inlined(Base.forward, Base.forward.__code__, globals(), None, [Child], False)
    assert extra.failing() is None
    for owner in (Child, Between, Base):
        had, plain = "forward" in vars(owner), owner.forward
        owner.forward = lambda self, x: x
        assert "was replaced" in (extra.failing() or "")
        owner.forward = plain
        if not had:
            del owner.forward
    assert extra.failing() is None


def test_functions_are_inlined_whatever_their_first_argument():
    def compute(self, x):
        first, *rest = x.unbind(0)
        return first + sum(rest) + _total([first, x[1]]) + _total({"a": first}.values())

    model = Model(compute)
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture="dynamo").module
    x = torch.randn(4, 8)
    assert torch.allclose(converted(x), model(x), rtol=0.1, atol=0.1)
    assert len(fxprec.graphs(converted)) == 1 and not conversion_of(converted).net


def _total(values):
    return sum(values)
