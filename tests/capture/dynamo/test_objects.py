"""What code asks of objects that dynamo guards by their types alone: it is told from what another object answers."""

from __future__ import annotations

import copy
import decimal
import fractions
import inspect
import itertools
import math
import types
import weakref

import numpy
import pytest
import torch
from torch import nn

import fxprec
from fxprec.model.conversion import conversion_of

LOW = torch.bfloat16


class Mode:
    def method(self):
        pass


FAST, SLOW = Mode(), Mode()
TABLE = {FAST: False, SLOW: True}
LIST, DICT = [1.0], {"a": 1.0}


def _made():
    return lambda: None


SAME_CODE = _made()
CHILD = nn.Linear(4, 4)


class Asks(nn.Module):
    """Its forward branches on what ``ask`` gives for ``held``; ``held`` is for tests to set."""

    def __init__(self, ask, held=None):
        super().__init__()
        self.fc, self.ask, self.held, self.other = nn.Linear(4, 4), ask, held, held

    def forward(self, x, given=None):
        y = self.fc(x)
        return y * 10 if self.ask(self, given) else y


def _converted(model):
    torch._dynamo.reset()
    return fxprec.convert(copy.deepcopy(model), dtype=LOW, capture="dynamo").module


def _default(given, mode=FAST):
    return mode is given


def _is_missing(given):
    return given is None or given is SLOW


def _nested(given):
    return {"a": given}["a"] is SLOW


#: What a forward asks of an argument, and two arguments that answer otherwise.
ARGUMENTS = {
    "is": (lambda _, mode: mode is SLOW, FAST, SLOW),
    "is not": (lambda _, mode: mode is not SLOW, FAST, SLOW),
    "none or": (lambda _, mode: _is_missing(mode), FAST, SLOW),
    "in a dict of the code's": (lambda _, mode: _nested(mode), FAST, SLOW),
    "default": (lambda _, mode: _default(mode), FAST, SLOW),
    "==": (lambda _, mode: mode == SLOW, FAST, SLOW),
    "!=": (lambda _, mode: mode != SLOW, FAST, SLOW),
    "__ne__": (lambda _, mode: mode.__ne__(SLOW) is False, FAST, SLOW),
    "in a list": (lambda _, mode: mode in [SLOW], FAST, SLOW),
    "in a tuple": (lambda _, mode: mode in (None, SLOW), FAST, SLOW),
    "in a set": (lambda _, mode: mode in {SLOW}, FAST, SLOW),
    "in a dict": (lambda _, mode: mode in {SLOW: 1}, FAST, SLOW),
    "element": (lambda _, mode: TABLE[mode], FAST, SLOW),
    "get": (lambda _, mode: TABLE.get(mode), FAST, SLOW),
    "hash": (lambda _, mode: hash(mode) == hash(SLOW), FAST, SLOW),
    "list": (lambda _, held: held is LIST, [1.0], LIST),
    "dict": (lambda _, held: held is DICT, {"a": 1.0}, DICT),
    "functions of the same code": (lambda _, held: held is SAME_CODE, _made(), SAME_CODE),
    "module": (lambda _, child: child is CHILD, nn.Linear(4, 4), CHILD),
    "elements": (lambda _, mode: [mode] == [SLOW] and (1, mode) == (1, SLOW), FAST, SLOW),
    "key of an argument": (lambda _, held: SLOW in held, {FAST: 1}, {SLOW: 1}),
    "bound to": (lambda _, method: method.__self__ is SLOW, FAST.method, SLOW.method),
    "weak": (lambda _, reference: reference() is SLOW, weakref.ref(FAST), weakref.ref(SLOW)),
    "zero of numpy": (lambda _, value: math.copysign(1, value) < 0, numpy.float64(0.0), numpy.float64(-0.0)),
    "zero of numpy as a float": (
        lambda _, value: math.copysign(1, float(value)) < 0,
        numpy.float64(0.0),
        numpy.float64(-0.0),
    ),
    "buffer": (lambda _, value: isinstance(value, nn.Buffer), torch.ones(1), nn.Buffer(torch.ones(1))),
    "one of two": (
        lambda _, value: isinstance(value, (nn.Buffer, nn.Parameter)),
        torch.ones(1),
        nn.Buffer(torch.ones(1)),
    ),
    "decimal": (lambda _, value: value > 1, decimal.Decimal(1), decimal.Decimal(2)),
    "equal decimal": (lambda _, value: value == decimal.Decimal("0.5"), decimal.Decimal("0.7"), decimal.Decimal("0.5")),
    "decimal and fraction": (
        lambda _, value: value == fractions.Fraction(1, 2),
        decimal.Decimal("0.7"),
        decimal.Decimal("0.5"),
    ),
    "signature": (
        lambda _, signature: len(signature.parameters) == 2,
        inspect.signature(lambda a: 1),
        inspect.signature(lambda a, b: 1),
    ),
}


@pytest.mark.parametrize(("name", "first"), zip(ARGUMENTS, itertools.cycle((0, 1)), strict=False))
def test_another_argument_of_the_same_type(name, first):
    ask, *arguments = ARGUMENTS[name]
    assert bool(ask(None, arguments[0])) != bool(ask(None, arguments[1]))
    model = Asks(ask)
    converted = _converted(model)
    x = torch.randn(2, 4)
    for number in (first, 1 - first, first, 1 - first):
        given = arguments[number]
        torch.testing.assert_close(converted(x, given), model(x, given), rtol=0.1, atol=0.1)


def _set_held(model, value):
    model.held = value


def _set_mode(_, value):
    globals()["MODE"] = value


MODE = FAST
#: What a forward asks of what it finds, how that is set, and values that answer otherwise.
FOUND = {
    "attribute": (lambda self, _: self.held is SLOW, _set_held, (FAST, SLOW)),
    "equal attribute": (lambda self, _: self.held == SLOW, _set_held, (FAST, SLOW)),
    "global": (lambda *_: MODE is SLOW, _set_mode, (FAST, SLOW)),
    "two attributes": (lambda self, _: self.held is self.other, _set_held, (FAST, SLOW)),
    "lists": (lambda self, _: self.held is LIST, _set_held, ([1.0], LIST)),
    "the other is set": (lambda self, mode: self.held is (mode or SLOW), _set_held, (SLOW, FAST)),
    "looked up": (lambda self, _: TABLE.get(self.held), _set_held, (FAST, SLOW)),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("first", (0, 1))
def test_another_object_where_it_was_found(name, first):
    ask, put, values = FOUND[name]
    model = Asks(ask)
    converted = _converted(model)
    x = torch.randn(2, 4)
    for number in (first, 1 - first, first, 1 - first):
        for each in (model, converted):
            put(each, values[number])
        torch.testing.assert_close(converted(x), model(x), rtol=0.1, atol=0.1)


def test_an_argument_that_is_a_global_is_told_from_one_that_is_not():
    """dynamo reads the second of the two by way of the first."""
    model = Asks(lambda _, mode: mode is not SLOW and MODE is SLOW)
    converted = _converted(model)
    x = torch.randn(2, 4)
    for value in (FAST, SLOW, FAST, SLOW):
        _set_mode(None, value)
        torch.testing.assert_close(converted(x, FAST), model(x, FAST), rtol=0.1, atol=0.1)
    _set_mode(None, FAST)


def test_a_new_object_each_time_is_another_one_in_the_same_graph():
    model = Asks(lambda _, mode: mode is SLOW or mode == FAST or mode in [FAST, SLOW])
    converted = _converted(model)
    x = torch.randn(2, 4)
    for _ in range(4):
        torch.testing.assert_close(converted(x, Mode()), model.fc(x), rtol=0.1, atol=0.1)
    assert conversion_of(converted).captures == 1


def test_a_new_object_that_is_looked_up_runs_in_the_net_at_last():
    model = Asks(lambda _, mode: mode in {SLOW})
    converted = _converted(model)
    x = torch.randn(2, 4)
    for number in range(80):
        given = SLOW if number % 10 == 9 else Mode()
        torch.testing.assert_close(converted(x, given), model(x, given), rtol=0.1, atol=0.1)
    assert any("limit of 64 captures" in why for why in conversion_of(converted).net.values())


class Settings:
    pass


class Slots:
    __slots__ = ("scale",)


class Defaults:
    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return 1.0


def _tried(settings):
    try:
        return settings.scale
    except AttributeError:
        return 1.0


#: How a forward reads what an object may not have.
OPTIONAL = {
    "try": _tried,
    "getattr": lambda settings: getattr(settings, "scale", 1.0),
    "hasattr": lambda settings: settings.scale if hasattr(settings, "scale") else 1.0,
    "vars": lambda settings: vars(settings).get("scale", 1.0),
    "__dict__": lambda settings: settings.__dict__.get("scale", 1.0),
    "in": lambda settings: 8.0 if "scale" in settings.__dict__ else 1.0,
    "length": lambda settings: 8.0 if len(vars(settings)) else 1.0,
    "all": lambda settings: sum(vars(settings).values()) or 1.0,
    "default": lambda settings: settings.scale,
}
KINDS = {"simple": types.SimpleNamespace, "class": Settings, "slots": Slots, "__getattr__": Defaults}
HOLDERS = {
    "attribute": lambda read: lambda self, _: read(self.held),
    "attribute of an attribute": lambda read: lambda self, _: read(self.held.inner),
    "in a list": lambda read: lambda self, _: read(self.held.several[0]),
    "argument": lambda read: lambda _, given: read(given),
}


def _cases():
    """Each read of each kind of object in two of the holders, the next read in the next two."""
    holders = itertools.cycle(HOLDERS)
    for kind, cls in KINDS.items():
        for name in OPTIONAL:
            if (cls is Slots and name not in ("try", "getattr", "hasattr")) or (cls is not Defaults) < (
                name == "hasattr"
            ):
                continue
            if name == "default" and cls is not Defaults:
                continue
            for holder in (next(holders), next(holders)):
                yield pytest.param(cls, name, holder, id=f"{kind} {name} {holder}")
            next(holders)


@pytest.mark.parametrize(("cls", "name", "holder"), _cases())
def test_an_attribute_that_comes_and_goes(cls, name, holder):
    class Scales(Asks):
        def forward(self, x, given=None):
            return self.fc(x) * self.ask(self, given)

    settings = cls()
    held = settings if holder == "attribute" else types.SimpleNamespace(inner=settings, several=[settings])
    model = Scales(HOLDERS[holder](OPTIONAL[name]), held)
    converted = _converted(model)
    converted.held = model.held
    x = torch.randn(2, 4)
    for there in (False, True, False, True):
        if there:
            settings.scale = 8.0
        elif "scale" in getattr(settings, "__dict__", ("scale",)) and hasattr(settings, "scale"):
            del settings.scale
        torch.testing.assert_close(converted(x, settings), model(x, settings), rtol=0.1, atol=0.1)
    assert fxprec.graphs(converted)
    # dynamo reads no whole __dict__ before torch 2.13: the interpreter does
    assert not conversion_of(converted).net or (name in ("length", "all") and torch.__version__ < "2.13")
