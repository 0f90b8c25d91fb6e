"""What a forward returns is made once a call, with the constructor's effects, whoever serves; statically only where
making it has none."""

from __future__ import annotations

import collections
import copy
import dataclasses
import typing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fxprec
from fxprec.model.conversion import conversion_of

LOW = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::fxprec.ServiceWarning")


@dataclasses.dataclass
class Plain:
    a: Tensor
    notes: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class PlainFrozen:
    a: Tensor


@dataclasses.dataclass(slots=True)
class PlainSlots:
    a: Tensor


Pair = collections.namedtuple("Pair", "a b", defaults=(2,))


class PairWithMethod(Pair):
    def double(self):
        return self.a * 2


class Typed(typing.NamedTuple):
    a: Tensor
    b: int = 3


@dataclasses.dataclass
class HalvesAfter:
    a: Tensor

    def __post_init__(self):
        self.a = self.a / 2


@dataclasses.dataclass(frozen=True)
class HalvesFrozen:
    a: Tensor

    def __post_init__(self):
        object.__setattr__(self, "a", self.a / 2)


@dataclasses.dataclass
class HalvesAtFirst:
    a: Tensor

    def __init__(self, a):
        self.a = a / 2


@dataclasses.dataclass
class HalvesWhenSet:
    a: Tensor

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value / 2)


@dataclasses.dataclass
class Scales:
    a: Tensor
    factor: dataclasses.InitVar[float] = 0.5

    def __post_init__(self, factor):
        self.a = self.a * factor


@dataclasses.dataclass
class SetsAField:
    a: Tensor
    b: float = dataclasses.field(init=False, default=3.0)


class HalvesPair(Pair):
    def __new__(cls, a, b=2):
        return super().__new__(cls, a / 2, b)


class Doubling(type):
    def __call__(cls, a):
        return super().__call__(a * 2)


@dataclasses.dataclass
class MadeByMeta(metaclass=Doubling):
    a: Tensor


class HalvesDict(collections.OrderedDict):
    def __init__(self, a=(), **more):
        super().__init__(a=a / 2 if isinstance(a, Tensor) else a, **more)


class HalvesItems(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value / 2)


class HalvesObject:
    def __init__(self, a):
        self.a = a / 2


def _marked(made):
    made.mark = 7
    return made


def _twice(a):
    made = HalvesAfter(a)
    return [made, {"same": made}]


def _set_items(a):
    made = HalvesItems()
    made["a"] = a
    return made


STATIC = [Plain, PlainFrozen, PlainSlots, Pair, PairWithMethod, Typed, lambda a: (a, torch.Size([1, 2]))]
DYNAMIC = [
    HalvesAfter,
    HalvesFrozen,
    HalvesAtFirst,
    HalvesWhenSet,
    Scales,
    SetsAField,
    HalvesPair,
    MadeByMeta,
    HalvesDict,
    HalvesObject,
    _set_items,
    _twice,
    lambda a: _marked(Plain(a)),
    lambda a: _marked(PairWithMethod(a)),
    lambda a: {"within": [HalvesAfter(a)]},
]


class Makes(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.make = make

    def forward(self, x):
        return self.make(self.l(x))


def parts(value: Any) -> Any:
    """All that one can see of an output: classes, items, attributes, and which objects are one."""
    if isinstance(value, Tensor | int | float | str | None):
        return value
    attributes = {name: parts(getattr(value, name)) for name in ("a", "b", "mark", "notes") if _has(value, name)}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [type(value), list(value) if isinstance(value, dict) else None, attributes, [parts(item) for item in items]]


def _has(value: Any, name: str) -> bool:
    return name in getattr(value, "__dict__", {}) or name in getattr(type(value), "__slots__", ())


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        return ours.dtype is theirs.dtype and torch.allclose(ours, theirs, atol=0.05)
    if isinstance(theirs, list | dict):
        keys = theirs if isinstance(theirs, dict) else range(len(theirs))
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(same(ours[k], theirs[k]) for k in keys)
    return type(ours) is type(theirs) and ours == theirs


@pytest.mark.parametrize("by", ["auto", "dynamo", "net"])
@pytest.mark.parametrize("make", [*STATIC, *DYNAMIC], ids=lambda make: make.__name__)
def test_objects_are_made_once(make, by):
    torch._dynamo.reset()
    model = Makes(make)
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture="auto" if by == "auto" else "dynamo").module
    for _ in range(2):
        x = torch.randn(4, 8)
        expected = model(x)
        if by == "net":
            with FlopCounterMode(display=False):
                output = converted(x)
        else:
            output = converted(x)
        assert same(parts(output), parts(expected))
        if make is _twice:
            assert output[0] is output[1]["same"]
    if by == "auto":
        assert bool(conversion_of(converted).methods["forward"].static.allowed) == (make in STATIC)
