"""What is equal but not the same is told apart under dynamo: constants by type and sign, dicts by order and keys."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from torch import nn

import fxprec
from fxprec.capture.dynamo.guards import is_ambiguous
from fxprec.capture.guard_values import same, snapshot

LOW = torch.bfloat16


def test_the_same_is_told_from_what_is_equal():
    groups = [
        [0.0],
        [-0.0],
        [0, int("0")],
        [False],
        [2, 1 + 1],
        [2.0],
        [complex(1, 0.0)],
        [complex(1, -0.0)],
        [(2,)],
        [(2.0,)],
        [(True,)],
        [((2,), "a"), ((1 + 1,), "a")],
        [((2.0,), "a")],
        [[2]],
        [{1, 2}, {2, 1}],
        [{1.0, 2}],
        [{0.0}],
        [{-0.0}],
        [{(1,)}],
        [{(1.0,)}],
        [frozenset({1})],
    ]
    for number, group in enumerate(groups):
        for value in group:
            assert same(value, snapshot(value)) and same(value, snapshot(group[0]))
            assert not any(same(value, other[0]) for other in groups[:number] + groups[number + 1 :]), value


def test_only_what_has_an_equal_of_its_type_costs_a_check():
    for value in (0.0, -0.0, complex(0, 1), (1,), [True], {2}, {"a"}, ((), ("a", (1,)))):
        assert is_ambiguous(value)
    for value in (1, 1.5, True, "a", None, (), ("a", None), torch.float32, {None}):
        assert not is_ambiguous(value)


class Reads(nn.Module):
    """``forward`` computes with ``self.value``; the branch is for dynamo."""

    def __init__(self, compute, value):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.compute, self.value = compute, value

    def forward(self, x):
        return self.compute(self.fc(x), self.value)


def _times_first(x, value):
    return x.long() * next(iter(value))


def _weighted(x, value):
    return x * sum(part * (place + 1) for place, part in enumerate(value.values()))


CHANGES = {
    "zero": (lambda x, value: x / value, 0.0, -0.0),
    "zero in a tuple": (lambda x, value: x / value[0][0], ((0.0,),), ((-0.0,),)),
    "complex": (lambda x, value: (x / value).imag, complex(0.0, 0.0), complex(0.0, -0.0)),
    "number": (lambda x, value: x.long() * value, 2, 2.0),
    "bool": (lambda x, value: torch.full((2,), value) + 0 * x.sum().long(), True, 1),
    "tuple": (_times_first, (2,), (2.0,)),
    "set": (_times_first, {2}, {2.0}),
    "frozen set": (_times_first, frozenset({2}), frozenset({2.0})),
    "keys": (_times_first, {2: "a"}, {2.0: "a"}),
    "order": (_weighted, {"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}),
    "order of an OrderedDict": (
        _weighted,
        collections.OrderedDict(a=1.0, b=2.0),
        collections.OrderedDict(b=2.0, a=1.0),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_to_an_equal_value_is_seen(name):
    torch._dynamo.reset()
    compute, first, second = CHANGES[name]
    assert first == second or name.startswith("order of")
    model = Reads(compute, first)
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture="dynamo").module
    x = torch.randn(4, 8) * 20
    for value in (first, second, first):
        for each in (model, converted):
            each.value = copy.deepcopy(value)
        expected, output = model(x), converted(x)
        assert output.dtype is expected.dtype
        assert torch.allclose(output.float(), expected.float(), rtol=0.1, atol=4, equal_nan=True)
    assert len(fxprec.graphs(converted)) == 2  # the first serves again


def test_an_ordered_dict_whose_entries_move():
    model = Reads(_weighted, collections.OrderedDict(a=1.0, b=2.0))
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture="dynamo").module
    x = torch.randn(4, 8)
    for _ in range(3):
        assert torch.allclose(converted(x), model(x), atol=0.1)
        for each in (model, converted):
            each.value.move_to_end("a")


def scaled_by(factor):
    def scale(x):
        return x * factor

    def put(value):
        nonlocal factor
        factor = value

    return scale, put


def test_a_function_that_two_modules_hold_is_told_from_another_of_the_same_code():
    """dynamo asks for the closure by way of one of the two."""

    class Part(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def forward(self, x):
            return self.scale(x)

    torch._dynamo.reset()
    scale, put = scaled_by(0.5)
    model = nn.Sequential(Part(scale), nn.Linear(4, 4), Part(scale))
    x = torch.randn(2, 4)
    fxprec.convert(model, dtype=LOW, capture="dynamo")
    model(x)
    put(0.25)
    model[0].scale = scaled_by(0.5)[0]
    for _ in range(2):
        torch.testing.assert_close(model(x), model[1](x / 2) / 4, atol=0.01, rtol=0.02)
