"""Metaclasses of the user's: our subclasses are of them, and unknown to them."""

from __future__ import annotations

import abc
import copy
import pickle
from typing import Generic, Protocol, TypeVar

import pytest
import torch
from torch import nn

import fxprec

X = torch.randn(4, 8)
KNOWN: list[str] = []


class ByInit(type):
    def __init__(cls, name, bases, namespace):
        super().__init__(name, bases, namespace)
        KNOWN.append(name)


class ByNew(abc.ABCMeta):
    def __new__(meta, name, bases, namespace, **options):
        KNOWN.append(name)
        return super().__new__(meta, name, bases, namespace)


class WithArguments(type):
    def __new__(meta, name, bases, namespace, *, key):
        KNOWN.append(key)
        return super().__new__(meta, name, bases, namespace)

    def __init__(cls, name, bases, namespace, *, key):
        super().__init__(name, bases, namespace)


class ByCall(type):
    made = 0

    def __call__(cls, *args, **kwargs):
        ByCall.made += 1
        return super().__call__(*args, **kwargs)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x):
        return self.l(x)

    def encode(self, x):
        return self.l(x)


class Init(Net, metaclass=ByInit): ...


class New(Net, metaclass=ByNew): ...


class Arguments(Net, metaclass=WithArguments, key="a"): ...


class Call(Net, metaclass=ByCall): ...


T = TypeVar("T")


class Scaled(Protocol):
    def encode(self, x): ...


class Abstract(Net, Scaled, abc.ABC, Generic[T]): ...


@pytest.mark.parametrize("kind", [Init, New, Arguments, Call, Abstract, Abstract[int]])
def test_a_metaclass_hears_of_no_class_of_ours(kind):
    model, host = kind(), nn.Sequential(kind())
    cls, made, known = type(model), ByCall.made, [*KNOWN]
    expected = model(X)
    model = fxprec.convert(model, dtype=torch.bfloat16).module
    host = fxprec.convert(host, dtype=torch.bfloat16, methods=("0.encode",)).module
    for each in (model, host[0], copy.deepcopy(model)):
        assert type(type(each)) is type(cls) and isinstance(each, cls) and cls in type(each).__mro__
        assert each is host[0] or torch.allclose(each(X), expected, atol=0.05)
    assert pickle.loads(pickle.dumps(model))(X).shape == expected.shape
    assert [*KNOWN] == known and ByCall.made == made
    assert type(fxprec.revert(model)) is cls and torch.equal(model(X), expected)


def test_what_abstract_base_classes_know_stays_theirs():
    """Without a cache of its own, what is no object of our class would be taken for none of the user's."""
    model, other = Abstract(), Abstract()
    cls = type(fxprec.convert(model, dtype=torch.bfloat16).module)
    assert not isinstance(other, cls) and isinstance(other, Abstract) and isinstance(model, cls)

    class Virtual: ...

    cls.register(Virtual)
    assert not issubclass(int, cls) and issubclass(Virtual, Abstract)
