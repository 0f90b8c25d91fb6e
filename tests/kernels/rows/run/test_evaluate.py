"""Row programs in plain torch: every primitive in every dtype, scalars on their device, and rounding's derivative."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxprec.kernels.launch.philox import keep_mask
from fxprec.kernels.rows.program.layout import Layout
from fxprec.kernels.rows.program.row_program import Port, RowProgram, Store
from fxprec.kernels.rows.program.values import Builder, Operand, Value
from fxprec.kernels.rows.run.evaluate import evaluate

FP32, FP64 = torch.float32, torch.float64
LAYOUT = Layout((2, 3), (0,), (1,))
X = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, -1.0]])


def run(b: Builder, stores: list[Store], loads: list[tuple[Value, Tensor]], dtype: torch.dtype = FP32) -> list[Tensor]:
    ports = tuple((value, Port(tensor.dtype, value.rows, value.columns)) for value, tensor in loads)
    seeds = torch.tensor([5, 6, 7])
    return evaluate(RowProgram(ports, tuple(stores), 1, 3), LAYOUT, [t for _, t in loads], seeds, 1, dtype)


def full(value: Operand) -> Store:
    return Store(value, FP32, True, True)


def test_shapes_of_what_is_stored() -> None:
    b = Builder(3)
    x, w = b.load(0, FP32, True, True), b.load(1, FP32, False, True)
    total = b.reduce("sum", x)
    stores = [full(b("mul", x, w)), Store(total, FP32, True, False), Store(x, FP32, False, True, partial=True),
              Store(total, FP32, False, False, partial=True), full(w), full(2.0)]  # fmt: skip
    weight = torch.tensor([1.0, 2.0, 3.0])
    found = run(b, stores, [(x, X), (w, weight)])
    exact = [X * weight, X.sum(1, keepdim=True), X.sum(0, keepdim=True), X.sum().reshape(1, 1), weight.expand(2, 3)]
    for own, other in zip(found, [*exact, torch.full((2, 3), 2.0)], strict=True):
        assert torch.equal(own, other)


def test_numbers_stand_on_either_side() -> None:
    b = Builder(3)
    x = b.load(0, FP32, True, True)
    ops = ["add", "sub", "mul", "div", "maximum", "minimum"]
    found = run(b, [full(b(op, *args)) for op in ops for args in ((x, 2.0), (2.0, x))], [(x, X)])
    two = torch.tensor(2.0)
    functions = [torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum]
    exact = [result for f in functions for result in (f(X, two), f(two, X))]
    assert all(map(torch.equal, found, exact))
    (chosen, both) = run(
        b, [full(b("where", b("gt", x, 0.0), 1.0, x)), full(b("where", b("gt", x, 0.0), 1.0, 2.0))], [(x, X)]
    )
    assert torch.equal(chosen, torch.where(X > 0, 1.0, X)) and torch.equal(both, torch.where(X > 0, 1.0, 2.0))


def test_integers_are_compared_exactly() -> None:
    b = Builder(3)
    i = b.load(0, torch.int64, True, True)
    ids = torch.tensor([[16777216, 16777217, 0], [-1, 16777217, 5]])
    (found, half) = run(b, [full(b("eq", i, 16777217.0)), full(b("gt", i, 0.5))], [(i, ids)])
    assert torch.equal(found, ids == 16777217) and torch.equal(half, ids > 0.5)


def test_dropout_is_philoxs() -> None:
    b = Builder(3)
    x = b.load(0, FP32, True, True)
    (found,) = run(b, [full(b("mul", x, b.float(b.keep(1, 0.5))))], [(x, X)])
    assert torch.equal(found, X * keep_mask(torch.tensor(7), 2, 3, 0.5))


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_rounding_rounds_and_has_the_identitys_derivative(dtype: torch.dtype) -> None:
    b = Builder(3)
    x = b.load(0, FP32, True, True)
    tensor = (X / 3).requires_grad_()
    (found,) = run(b, [full(b.round(x, torch.float16))], [(x, tensor)], dtype)
    assert found.dtype is dtype and torch.equal(found, tensor.to(torch.float16).to(dtype))
    (gradient,) = torch.autograd.grad(found.sum(), tensor)
    assert torch.equal(gradient, torch.ones_like(X))


def test_reductions_of_what_does_not_vary_and_stops() -> None:
    b = Builder(3)
    x, c = b.load(0, FP32, True, True), b.load(1, FP32, True, False)
    column = X[:, :1].clone().requires_grad_()
    found = run(b, [full(b.mean(c)), full(b.reduce("min", x)), full(b.stop(c))], [(x, X), (c, column)])
    assert torch.allclose(found[0], column.expand(2, 3)) and torch.equal(found[1], X.amin(1, True).expand(2, 3))
    assert found[0].requires_grad and not found[2].requires_grad
    assert math.isnan(float(run(b, [full(b.reduce("max", x))], [(x, X * math.nan)])[0][0, 0]))
