"""What a class holds that cannot be guarded ends the trace, in whatever order code, names and classes are met."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from fxprec.capture.capturing import CaptureDeclined
from fxprec.capture.symbolic.trace import trace_static


class Draws:
    rng = random.Random(0)

    @classmethod
    def drawn(cls, x):
        return drawn_of(x, cls)


class Holds:
    rng = random.Random(0)


class Inherits(Draws):
    pass


class Leads:
    """The first class that leads back to itself, with something opaque behind the way back."""

    rng = random.Random(0)


class LeadsBack:
    there = Leads


class LeadsByCode:
    rng = random.Random(0)

    @staticmethod
    def code(x):
        return drawn_through(x, CodeLeadsBack)


class CodeLeadsBack:
    there = LeadsByCode


Leads.back = LeadsBack


def drawn_of(x, cls):
    return x * cls.rng.random()


def drawn_again_of(x, cls):
    return x * cls.rng.random()


def drawn_through(x, cls):
    return x * cls.there.rng.random()


def classmethod_of_it(self, x):
    names = drawn_of
    return Draws.drawn(x) if names else x


def inherited(self, x):
    draw = drawn_of
    if self.never:
        return Draws
    return draw(x, Inherits)


def name_comes_later(self, x):
    cls = Holds
    if self.never:
        return drawn_of(x, cls)
    return drawn_again_of(x, cls)


def circle(self, x):
    draw = drawn_through
    if self.never:
        return Leads
    return draw(x, LeadsBack)


code = LeadsByCode.code


def circle_by_code(self, x):
    draw = drawn_through
    if self.never:
        return draw, LeadsByCode
    return code(x)


@pytest.mark.parametrize(
    "forward",
    [classmethod_of_it, inherited, name_comes_later, circle, circle_by_code],
    ids=lambda forward: forward.__name__,
)
def test_a_number_drawn_through_a_class_is_not_built_in(forward) -> None:
    module = type("Net", (nn.Module,), {"forward": forward, "never": False})()
    with pytest.raises(CaptureDeclined, match=r"rng: an object \(Random\) that may change inside"):
        trace_static(module, ["x"], {})


def test_a_class_that_holds_such_an_object_may_be_used_without_it() -> None:
    class Settings:
        rng = random.Random(0)
        scale = 2.0

        @classmethod
        def scaled(cls, x):
            return x * cls.scale

    def forward(self, x):
        return Settings.scaled(x) + Settings.scale

    module = type("Net", (nn.Module,), {"forward": forward})()
    capture = trace_static(module, ["x"], {})
    assert torch.equal(capture.gm(torch.ones(2)), torch.full((2,), 4.0))
    Settings.scale = 3.0
    assert capture.guards.failing() == f"{Settings.__qualname__}.scale changed from 2.0 to 3.0"
