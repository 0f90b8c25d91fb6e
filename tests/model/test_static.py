"""The set of static graphs: which one serves, when another is traced, and when dynamo takes over."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.model.conversion import conversion_of
from fxprec.model.static import _MOST_BEFORE_DYNAMO, _MOST_SYMBOLIC

LOW = torch.bfloat16


class Scheduled(nn.Module):
    """Scales by numbers that change from call to call: an argument and an attribute."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.step = 0

    def forward(self, x, scale=1, mode="a"):
        return self.fc(x) * scale + self.step


def _expected(model, x, scale=1):
    return F.linear(x, model.fc.weight, model.fc.bias) * scale + model.step


def test_a_number_that_changes_with_every_call_goes_to_dynamo(tools):
    model, _ = fxprec.convert(Scheduled())
    x = torch.randn(2, 8)
    for scale in range(100):
        torch.testing.assert_close(model(x, scale), _expected(model, x, scale), atol=0.01 * (1 + scale), rtol=0.05)
    conversion = conversion_of(model)
    assert "another value of the argument 'scale'" in conversion.declined[-1]
    assert len(conversion.captured) < 4  # the static ones are gone, and dynamo needs few
    assert conversion.net == {}
    assert tools.matmul_dtypes(model, x, 1000) == {LOW: 1}
    assert len(conversion.captured) < 4


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_an_attribute_that_counts_calls(tools, capture):
    model, _ = fxprec.convert(Scheduled(), capture=capture)
    x = torch.randn(2, 8)
    for step in range(100):
        model.step = step
        torch.testing.assert_close(model(x), _expected(model, x), atol=0.05, rtol=0.05)
    conversion = conversion_of(model)
    if capture == "auto":
        assert f"step changed from {_MOST_BEFORE_DYNAMO - 1} to {_MOST_BEFORE_DYNAMO}" in conversion.declined[-1]
    assert len(conversion.captured) < 4
    assert conversion.net == {}
    assert tools.matmul_dtypes(model, x) == {LOW: 1}


def test_few_values_stay_static():
    model, _ = fxprec.convert(Scheduled())
    x = torch.randn(2, 8)
    for _ in range(3):
        for mode in "abc":
            for training in (True, False):
                model.train(training)(x, mode=mode)
    assert conversion_of(model).declined == []
    assert len(fxprec.graphs(model)) <= 6


@pytest.mark.slow
def test_a_symbolic_capture_keeps_the_newest(tools):
    model, _ = fxprec.convert(Scheduled(), capture="symbolic")
    x = torch.randn(2, 8)
    for scale in range(_MOST_SYMBOLIC + 3):
        model(x, scale)
    assert len(fxprec.graphs(model)) == _MOST_SYMBOLIC
    assert torch.equal(model(x, 0), model(x, 0))
    assert tools.matmul_dtypes(model, x, 1) == {LOW: 1}


def test_a_trace_is_not_seen_by_the_users_dispatch_mode(tools):
    model, _ = fxprec.convert(nn.Linear(8, 8))
    assert tools.matmul_dtypes(model, torch.randn(2, 8, dtype=LOW)) == {LOW: 1}  # traced again for the dtype
    assert len(fxprec.graphs(model)) == 2


@pytest.mark.slow
def test_calls_from_other_threads_during_a_trace_are_lowered(tools):
    """Each dtype of the input makes a trace; meanwhile the other threads must find the module converted."""
    counts: dict[torch.dtype, int] = {}
    failures: list[BaseException] = []
    for _ in range(6):
        model, _ = fxprec.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
        start = threading.Barrier(4)

        def work(model=model, start=start):
            try:
                start.wait()
                for dtype in (LOW, torch.float16, torch.float32):
                    for kind, number in tools.matmul_dtypes(model, torch.randn(2, 8).to(dtype)).items():
                        counts[kind] = counts.get(kind, 0) + number
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures
    assert counts.keys() == {LOW}


def test_constants_in_place_of_tensors_are_told_apart():
    model, _ = fxprec.convert(lambda x, y=None: x if y is None else x + y)
    x = torch.randn(3)
    assert torch.equal(model(x), x)
    assert torch.equal(model(x, 1), x + 1)
    assert torch.equal(model(x, 1.5), x + 1.5)
    assert torch.equal(model(x, True), x + True)
    assert torch.equal(model(x, x), x + x)


TWOS = {
    "float64": torch.tensor(2.0).double(),
    "float64 of a dimension": torch.tensor([2.0]).double(),
    "float32": torch.tensor(2.0),
    "float32 of a dimension": torch.tensor([2.0]),
}


class Minus(nn.Module):
    """A product, and a number that is subtracted: an argument, or else a buffer."""

    def __init__(self, y=None):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(2, 2)
        self.register_buffer("y", y)

    def forward(self, x, y=None):
        return self.a(x) * 1000.3 - (self.y if y is None else y)


@pytest.mark.parametrize("then", TWOS.values(), ids=TWOS)
@pytest.mark.parametrize("first", TWOS.values(), ids=TWOS)
@pytest.mark.parametrize("as_argument", [True, False], ids=["argument", "buffer"])
def test_a_tensor_of_no_dimension_is_told_from_one_of_some(as_argument, first, then):
    """Promotion tells them apart, and so does the dtype of the result."""
    model = fxprec.convert(Minus(None if as_argument else first), dtype=torch.bfloat16).module
    x = torch.ones(1, 2)
    for y in (first, then):
        if not as_argument:
            model.y = y
        got, expected = model(x, y if as_argument else None), Minus()(x, y)
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=0)
    assert not fxprec.report(model).headline.not_static
