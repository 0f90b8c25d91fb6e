"""Writes through ``out=`` and in-place ops, as a user sees them. (The graphs themselves: test_canonicalize.)"""

from __future__ import annotations

import pytest
import torch

import fxprec

CAPTURES = ["symbolic", "dynamo"]


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("read", [lambda r: r.values, lambda r: r[0]], ids=["name", "position"])
def test_a_result_of_out_is_what_was_written(capture, read):
    def function(x, values, indices):
        result = torch.max(x, 1, out=(values, indices))
        read(result).add_(1.0)
        return values, indices

    x = torch.tensor([[0.0, 1.0], [3.0, 2.0]])
    arguments = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    converted, _ = fxprec.convert(function, capture=capture)
    values, indices = converted(x, *arguments)
    assert values.tolist() == [2.0, 4.0] and indices.tolist() == [1, 0]
    assert arguments[0].tolist() == [2.0, 4.0]


@pytest.mark.parametrize("capture", CAPTURES)
def test_several_results_of_out_are_returned_as_written(capture):
    def function(x, values, indices):
        return torch.max(x, 1, out=(values, indices))

    converted, _ = fxprec.convert(function, capture=capture)
    arguments = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    results = converted(torch.tensor([[0.0, 1.0], [3.0, 2.0]]), *arguments)
    assert [result.tolist() for result in results] == [[1.0, 3.0], [1, 0]]
    assert [argument.tolist() for argument in arguments] == [[1.0, 3.0], [1, 0]]


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_out_takes_the_shape_of_the_result(level):
    def function(x):
        out = x.new_empty(0)
        torch.exp(x, out=out)
        return out

    converted, _ = fxprec.convert(function, level=level)
    x = torch.randn(2, 3)
    assert torch.equal(converted(x), x.exp())


def test_a_policy_for_an_op_that_only_writes_is_refused():
    policy = fxprec.Policy.preset("O1").override(ops={"zero": "full"})

    def function(x):
        y = x * 2.0
        y.zero_()
        return y

    with pytest.raises(fxprec.PolicyError, match="'zero', which writes in place"):
        fxprec.convert(function, policy=policy)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_two_copies_for_the_caller_stay_two(level):
    def function(x):
        y = x * 2.0
        return y.half(), y.half(), y, y.double()

    for examples in (None, (torch.ones(2),)):
        results = fxprec.convert(function, examples, level=level)[0](torch.ones(2))
        results[0].zero_()
        assert [result.tolist() for result in results] == [[0.0, 0.0]] + 3 * [[2.0, 2.0]]
