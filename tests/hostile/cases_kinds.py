"""Values that are equal and that a program can tell apart, one after the other in the same place.

Members of a ``(str, Enum)`` and their strings, subclasses of numbers, zeros and their signs, frozen dataclasses with
fields that do not compare, ranges and slices. The place: an argument, an attribute, an attribute of a class.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import math
from typing import Any

import numpy
import torch

from tests.hostile.harness import Cases, Run
from tests.hostile.models import net

CASES = case = Cases("kinds")


class Mode(str, enum.Enum):  # noqa: UP042
    A = "a"


class Other(enum.StrEnum):
    A = "a"


class Text(str):
    __slots__ = ()


class Count(enum.IntEnum):
    ONE = 1
    ZERO = 0


class Number(enum.IntEnum):
    ONE = 1


class Ratio(float, enum.Enum):
    ONE = 1.0


class Whole(int):
    pass


class Real(float):
    pass


Pair = collections.namedtuple("Pair", "a b")
Couple = collections.namedtuple("Couple", "x y")


@dataclasses.dataclass(frozen=True)
class Options:
    width: float
    depth: float = dataclasses.field(default=0.0, compare=False)


STRINGS = (Mode.A, "a", Other.A, Text("a"), numpy.str_("a"))
ONES = (True, 1, 1.0, Count.ONE, Number.ONE, Ratio.ONE, Whole(1), Real(1), numpy.float64(1), numpy.int64(1), 1 + 0j)
ZEROS = (0, 0.0, -0.0, False, 0j, complex(0.0, -0.0), complex(-0.0, 0.0), Count.ZERO)
TUPLES = ((1, 2), Pair(1, 2), Couple(1, 2), torch.Size([1, 2]), (1.0, 2.0), (True, 2), (Count.ONE, 2))
NESTED = ((0.0, "a"), (-0.0, "a"), (0.0, Mode.A), (0, "a"))
DICTS = ({"a": 1}, {"a": 1.0}, {Mode.A: 1}, {"a": True}, {"a": 0.0}, {"a": -0.0})
LISTS = ([1], [1.0], [True], [Count.ONE], [0.0], [-0.0], ["a"], [Mode.A])
SETS = (frozenset(["a"]), frozenset([Mode.A]), frozenset([1]), frozenset([1.0]), {"a"}, {Mode.A})
OBJECTS = (Options(1.0, 2.0), Options(1.0, 3.0))
SPANS = (slice(0, 1), slice(False, 1), slice(0.0, 1), range(0, 1), range(0, 1, 5))
NONES = (None, 0, False, "", ...)
KINDS = (
    *(str, bool, int, float, complex, Mode, Other, Text, Count, Number, Ratio, Whole, Real, Pair, Couple, tuple),
    *(numpy.str_, numpy.float64, numpy.int64, torch.Size, dict, list, frozenset, set, slice, range, Options),
)


def code(value: Any) -> float:
    """Return a number for what a program can tell of a value."""
    found = next((1.0 + place for place, kind in enumerate(KINDS) if type(value) is kind), 50.0)
    if isinstance(value, float | int) and type(value) in (float, int, bool):
        return found + value / 4 + math.copysign(1, value) / 8
    if type(value) is complex:
        return found + math.copysign(1, value.imag) / 8 + math.copysign(1, value.real) / 4
    if isinstance(value, dict):
        return found + sum(code(each) for pair in value.items() for each in pair) / 64
    if isinstance(value, list | frozenset | set) or type(value) is tuple:
        return found + sum(code(each) for each in value) / 64
    if isinstance(value, slice):
        return found + (code(value.start) + code(value.stop)) / 64
    if isinstance(value, range):
        return found + value.step / 64
    return found + value.depth / 64 if isinstance(value, Options) else found


class Holder:
    value: Any = None


def in_place(name: str, values: tuple[Any, ...], place: str) -> None:
    """Add the case of these values in this place."""

    def run(t: Run) -> None:
        t.patch(Holder, "value", values[0])
        forward = {
            "argument": lambda s, x, value: (s.l(x), code(value)),
            "attribute": lambda s, x: (s.l(x), code(s.value)),
            "class": lambda s, x: (s.l(x), code(Holder.value)),
        }[place]
        m, x = t.convert(net(forward, value=values[0])), t.randn(4, 8)
        for value in (*values, *reversed(values)):
            m.value = Holder.value = value
            t(m, x, **({"value": value} if place == "argument" else {}))

    run.__name__ = f"{name}_as_{place}"
    case(run)


GROUPS = {
    **{"strings": STRINGS, "ones": ONES, "zeros": ZEROS, "tuples": TUPLES, "nested": NESTED, "dicts": DICTS},
    **{"lists": LISTS, "sets": SETS, "objects": OBJECTS, "spans": SPANS, "nones": NONES},
}
for kind, where in itertools.product(GROUPS, ("argument", "attribute", "class")):
    in_place(kind, GROUPS[kind], where)


@case
def new_zero_after_other_floats(t: Run):
    """From its second value on, dynamo makes a symbol of a float, which does not know the sign of a zero."""
    m = t.convert(net(lambda s, x, k: s.l(x) * (2.0 if math.copysign(1, k) < 0 else 3.0)))
    x = t.randn(4, 8)
    for k in (1.0, 2.0, -0.0, 0.0, 3.0, -0.0):
        t(m, x, k)


@case
def type_of_a_numpy_scalar(t: Run):
    def forward(s, x, v):
        a = s.l(x) * (2.0 if isinstance(v, float) else 3.0)
        b = s.l(x) * (2.0 if type(v) is numpy.float64 else 3.0)
        match v:
            case float():
                return a, b, s.l(x) * 2.0
            case _:
                return a, b, s.l(x) * v

    m, x = t.convert(net(forward)), t.randn(4, 8)
    for v in (numpy.float64(0.5), 0.5, numpy.float32(0.5)):
        t(m, x, v)


@case
def methods_of_a_numpy_scalar(t: Run):
    m = t.convert(net(lambda s, x, v: s.l(x) * (2.0 if hasattr(v, "is_integer") and v.is_integer() else 3.0)))
    for v in (numpy.float64(2), numpy.float64(0.5), 2.0):
        t(m, t.randn(4, 8), v)


@case
def texts_of_errors(t: Run):
    class Named(KeyError):
        def __str__(self):
            return "mine"

    def forward(s, x, kind):
        try:
            raise kind("two")
        except LookupError as error:
            return s.l(x) * len(str(error)), str(error), f"{error}"

    m, x = t.convert(net(forward)), t.randn(4, 8)
    for kind in (KeyError, IndexError, Named):
        t(m, x, kind)


@case
def asks_whether_it_is_compiled(t: Run):
    def forward(s, x):
        asked = (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch._utils.is_compiling)
        return s.l(x) * (2.0 if any(ask() for ask in asked) else 3.0), torch.compiler.is_compiling()

    t(t.convert(net(forward)), t.randn(4, 8))


@case
def asks_directly_whether_it_is_compiled(t: Run):
    t(t.convert(net(lambda s, x: s.l(x) * (2.0 if torch.compiler.is_compiling() else 3.0))), t.randn(4, 8))
