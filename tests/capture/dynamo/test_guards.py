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


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}


def _ordered(keys):
    total = 0.0
    for key in keys:
        total = total * 3 + WEIGHTS[key]
    return total


def _first(a, *_):
    return a


def _named(**entries):
    return entries


#: Ways of a forward to read all keys of a dict in their order.
ORDERS = {
    "for": lambda d: [key for key in d],
    "list": list,
    "tuple": tuple,
    "star": lambda d: [*d],
    "extend": lambda d: ["a", *d, *d],
    "unpacked": lambda d: _first(*d),
    "assigned": lambda d: (lambda a, b, c: [a, b])(*d),
    "keys": lambda d: d.keys(),
    "items": lambda d: [key for key, _ in d.items()],
    "reversed": lambda d: [*reversed(d)],
    "copy": lambda d: d.copy(),
    "merged": lambda d: d | {},
    "double star": lambda d: {**d},
    "named": lambda d: _named(**d),
    "updated": lambda d: _updated({}, d),
    "joined": lambda d: "".join(d),
    "popitem": lambda d: [d.popitem()[0]],
    "after pop": lambda d: (d.pop("b"), [*d])[1],
}


def _updated(dictionary, other):
    dictionary.update(other)
    return dictionary


class Batch(nn.Module):
    def __init__(self, keys):
        super().__init__()
        self.fc, self.keys = nn.Linear(4, 4), keys

    def forward(self, batch):
        return self.fc(batch["a"]) * _ordered(self.keys(batch))


@pytest.mark.parametrize("kind", [dict, lambda entries: collections.defaultdict(int, entries)], ids=["dict", "default"])
@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_a_dict_counts_where_code_reads_all_keys(name, kind):
    if name == "merged" and kind is not dict and torch.__version__ < "2.11":
        pytest.skip("torch 2.10's dynamo fails on defaultdict | dict")
    torch._dynamo.reset()
    model = Batch(ORDERS[name])
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture="dynamo").module
    x = torch.randn(2, 4)
    for order in ("abc", "cba", "bca", "abc", "cba", "bca"):
        expected, output = (each(kind((key, x) for key in order)) for each in (model, converted))
        torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05 * float(expected.detach().abs().max()))
    assert len(fxprec.graphs(converted)) == 3  # in an order that was met before nothing is captured


def test_the_order_of_a_dict_does_not_count_where_keys_are_looked_up():
    converted = fxprec.convert(Batch(lambda batch: "a" if "b" in batch else ""), dtype=LOW, capture="dynamo").module
    for order in ("abc", "cba", "bca"):
        converted({key: torch.ones(2, 4) for key in order})
    assert len(fxprec.graphs(converted)) == 1


def _constant():
    return torch.ones(3, 4)


def _leaf():
    return torch.ones(3, 4, requires_grad=True)


def _result():
    return _leaf() * 1


def _retaining():
    value = _result()
    value.retain_grad()
    return value


def _hooked():
    value = _leaf()
    value.register_hook(lambda gradient: gradient)
    return value


def _part():
    return torch.ones(2, 3, 4).unbind(0)[1]


#: What a forward may ask of a tensor that autograd knows, and the dtype and sizes do not tell.
FACTS = {
    "is_leaf": lambda x: x.is_leaf,
    "grad_fn": lambda x: x.grad_fn is None,
    "getattr": lambda x: getattr(x, "grad_fn") is None,  # noqa: B009
    "an op that gives its argument": lambda x: x.contiguous().is_leaf,
    "of a result": lambda x: torch.relu(x).is_leaf,
    "retains_grad": lambda x: x.retains_grad,
    "_base": lambda x: x._base is None,
    "output_nr": lambda x: x.output_nr == 0,
    "_backward_hooks": lambda x: not x._backward_hooks,
}


class Asks(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.fc, self.ask = nn.Linear(4, 4), ask

    def forward(self, held):
        y = self.fc(held["x"])
        return y if self.ask(held["x"]) else y * 2


@pytest.mark.parametrize("name", FACTS)
def test_what_autograd_knows_of_an_argument_counts_where_code_asks(name):
    torch._dynamo.reset()
    model = Asks(FACTS[name])
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture="dynamo").module
    kinds = (_leaf, _hooked, _constant, _result, _retaining, _part)
    for order in (kinds, kinds[::-1]):
        for make in order:
            torch.testing.assert_close(converted({"x": make()}), model({"x": make()}), rtol=0.05, atol=0.05)


def test_a_leaf_and_a_result_share_a_graph_where_no_code_asks():
    converted = fxprec.convert(Asks(lambda x: x.requires_grad), dtype=LOW, capture="dynamo").module
    for make in (_leaf, _result, _retaining, _leaf):
        converted({"x": make()})
    assert len(fxprec.graphs(converted)) == 1
