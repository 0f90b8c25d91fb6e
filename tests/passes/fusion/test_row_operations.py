"""is_row_operation: which calls a row program can compute, as far as the graph tells."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxprec.kernels.launch.graph_call import graph_call, stands_for
from fxprec.passes.fusion.row_operations import drops, is_row_operation, reduced_dimensions

X, INTS = torch.randn(2, 3, 4), torch.randint(0, 9, (2, 3, 4))


def last(tools, function, *inputs, known=True):
    """The last call of the function's graph."""
    gm = tools.rewritten(tools.traced(function, *(inputs if known else ())), tools.context("O0"), until="decide")
    return [node for node in gm.graph.nodes if node.op.startswith("call")][-1]


YES = {
    "add": lambda x: x + 1,
    "alpha": lambda x: torch.add(x, x, alpha=2),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": lambda x: F.relu(x, inplace=False),
    "pow": lambda x: x**2,
    "root": lambda x: x**-0.5,
    "softmax": lambda x: x.softmax(-1),
    "softmax_2": lambda x: F.softmax(x, 2, dtype=torch.float32),
    "sum": lambda x: x.sum((-1, -2), keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "var": lambda x: x.var(-1, unbiased=False),
    "cast": lambda x: x.half(),
    "cast_to": lambda x: x.to(torch.bfloat16),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "dropout": lambda x: F.dropout(x, 0.1),
    "clamp": lambda x: x.clamp(min=0.0),
    "compare": lambda x: x > 0,
    "div": lambda x: torch.div(x, 2, rounding_mode=None),
}
NO = {
    "matmul": lambda x: x @ x.transpose(1, 2),
    "in_place": lambda x: (x * 1).add_(1),
    "softmax_1": lambda x: x.softmax(1),
    "sum_all": lambda x: x.sum(),
    "sum_first": lambda x: x.sum(0),
    "double": lambda x: x.double(),
    "integers": lambda x: x.long(),
    "like": lambda x: x.type_as(x * 2),
    "moved": lambda x: x.to("cpu", torch.float16),
    "channels_last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "odd_power": lambda x: x**2.7,
    "power_of_tensor": lambda x: x.abs() ** x,
    "base": lambda x: 2**x,
    "rounded": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "argmax": lambda x: x.argmax(-1),
    "where": lambda x: torch.where(x > 0)[0],
    "view": lambda x: x.view(-1),
    "sum_of_masks": lambda x: (x > 0) + (x > 1),
    "out": lambda x: torch.add(x, 1, out=x),
    "shape": lambda x: x.size(0),
}


@pytest.mark.parametrize("function", YES.values(), ids=YES.keys())
def test_row_operations(tools, function):
    assert is_row_operation(last(tools, function, X))


@pytest.mark.parametrize("function", NO.values(), ids=NO.keys())
def test_others(tools, function):
    assert not is_row_operation(last(tools, function, X))


@pytest.mark.parametrize(
    ("function", "inputs", "yes"),
    [
        (lambda i: i == 3, (INTS,), True),
        (lambda i: i == 2**24 + 1, (INTS,), False),  # FP32 takes it for 2 ** 24
        (lambda i: i == 3.5, (INTS,), True),
        (lambda i, j: i == j, (INTS, INTS), False),
        (lambda i, j: i == j, (INTS, INTS.to(torch.int16)), True),
        (lambda i, j: i < j, (INTS.to(torch.uint8), INTS.to(torch.int16)), True),
        (lambda i, x: i < x, (INTS, X), True),
        (lambda i: i + 1, (INTS,), False),
        (lambda i: i * 0.5, (INTS,), True),
        (lambda i, x: x * i, (INTS, X), True),
        (lambda x: x + x, (X.double(),), False),
        (lambda x: x * x, (X.to(torch.complex64),), False),
        (lambda m, x: x.masked_fill(m, 0), (X > 0, X), True),
        (lambda m, n: torch.logical_and(m, n), (X > 0, X > 1), True),
        (lambda m, n: torch.logical_and(m, n), (INTS, INTS), False),  # of numbers, not of bits
        (lambda x: torch.logical_not(x), (X,), False),
    ],
)
def test_dtypes(tools, function, inputs, yes):
    assert is_row_operation(last(tools, function, *inputs)) is yes


def test_what_nobody_knows_may_be_one(tools):
    assert is_row_operation(last(tools, lambda x: x + 1, X, known=False))
    assert not is_row_operation(last(tools, lambda x: x.size(0) + 1, X, known=False))


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: x.sum(-1), 1),
        (lambda x: x.mean((1, 2)), 2),
        (lambda x: x.mean((2, 1, 0)), 3),
        (lambda x: x.mean((0, 2)), -1),
        (lambda x: x.mean(), -1),
        (lambda x: x.amax(2), 1),
        (lambda x: F.normalize(x), -1),  # dimension 1
        (lambda x: F.normalize(x, dim=-1), 1),
        (lambda x: F.layer_norm(x, [3, 4]), 2),
        (lambda x: F.layer_norm(x, normalized_shape=(4,)), 1),
        (lambda x: x.softmax(dim=-1), 1),
        (lambda x: x + 1, 0),
    ],
)
def test_reduced_dimensions(tools, function, count):
    assert reduced_dimensions(last(tools, function, X)) == count


def test_without_shapes_only_negative_dimensions_are_certain(tools):
    assert reduced_dimensions(last(tools, lambda x: x.sum(-1), X, known=False)) == 1
    assert reduced_dimensions(last(tools, lambda x: x.sum(2), X, known=False)) == -1


@pytest.mark.parametrize(
    ("function", "yes"),
    [
        (lambda x: F.dropout(x), True),
        (lambda x: F.dropout(x, 0.1, True), True),
        (lambda x: F.dropout(x, p=0.1, training=False), False),
        (lambda x: F.dropout(x, 0), False),
        (lambda x: F.dropout(x, 1.0), False),
        (lambda x: x + 1, False),
    ],
)
def test_dropouts_that_drop(tools, function, yes):
    assert drops(last(tools, function, X)) is yes


def test_a_graph_call_is_the_op_only_where_it_stands_for_it(tools):
    """It may hold more than the op whose name its node has: a region would compute that op alone."""

    @graph_call
    def more(x):
        return F.relu(x) * 2

    node = last(tools, lambda x: F.relu(x), X)
    assert is_row_operation(node)
    node.target = more
    assert not is_row_operation(node)
    node.target = stands_for(F.relu)(more)
    assert is_row_operation(node)
