"""Putting a model and the random number generators back."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fxprec.capture.untouched import ModelState, RandomState


class Pair(NamedTuple):
    number: int
    values: list[int]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.number, self.values = 1, {"list": [1], "deque": deque([1])}
        self.list, self.set, self.ordered, self.deque = [1, 2], {1}, OrderedDict(a=1, b=2), deque([1, 2])
        self.pair = Pair(1, [1])
        self.empty_list, self.empty_dict, self.empty_set = [], {}, set()


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda m: None, None),
        (lambda m: setattr(m, "number", m.number), None),
        (lambda m: setattr(m, "number", 2), "number"),
        (lambda m: setattr(m, "number", True), "number"),
        (lambda m: setattr(m.fc, "in_features", 3), "fc.in_features"),
        (lambda m: setattr(m.fc, "bias", None), "fc.bias"),
        (lambda m: setattr(m, "fc", nn.Linear(2, 2)), "fc"),
        (lambda m: setattr(m, "new", 1), "new"),
        (lambda m: delattr(m, "number"), "number"),
        (lambda m: m.list.append(3), "the contents of list"),
        (lambda m: m.list.reverse(), "the contents of list"),
        (lambda m: m.set.add(2), "the contents of set"),
        (lambda m: m.ordered.move_to_end("a"), "the contents of ordered"),
        (lambda m: m.deque.popleft(), "the contents of deque"),
        (lambda m: m.pair.values.append(2), "the contents of pair"),
        (lambda m: m.empty_list.append(1), "the contents of empty_list"),
        (lambda m: m.empty_dict.update(a=1), "the contents of empty_dict"),
        (lambda m: m.empty_set.add(1), "the contents of empty_set"),
        (lambda m: m.fc.register_buffer("b", torch.ones(1)), "fc.b"),
    ],
)
def test_model(write: Any, expected: str | None) -> None:
    model = Model()
    before = shallow(model)
    state = ModelState(model)
    write(model)
    assert state.restore() == expected
    assert shallow(model) == before
    assert state.restore() is None


def shallow(model: nn.Module) -> list[Any]:
    found: list[Any] = []
    for _, module in model.named_modules():
        for name, value in vars(module).items():
            found.append((name, id(value), type(value), str(value)))
    return found


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: None, None),
        (lambda: torch.rand(1), "torch"),
        (lambda: torch.manual_seed(1), "torch"),
        (lambda: random.random(), "random"),
        (lambda: random.gauss(0, 1), "random"),
        (lambda: np.random.rand(), "numpy.random"),
        (lambda: np.random.randn(), "numpy.random"),
    ],
)
def test_random_numbers(draw: Any, expected: str | None) -> None:
    state = RandomState()
    expectations = torch.rand(2), random.random(), np.random.randn()
    state.restore()
    draw()
    assert state.restore() == expected
    again = torch.rand(2), random.random(), np.random.randn()
    assert torch.equal(again[0], expectations[0]) and again[1:] == expectations[1:]


def test_random_numbers_that_are_expected_to_move_hide_no_others() -> None:
    state = RandomState()
    torch.rand(1)
    random.random()
    assert state.restore(expected={"torch"}) == "random"
    torch.rand(1)
    assert state.restore(expected={"torch"}) is None and state.restore() is None
