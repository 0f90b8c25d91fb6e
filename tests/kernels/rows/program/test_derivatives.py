"""Derivatives of row programs against torch's, primitive by primitive, and along what a gradient varies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxprec.kernels.rows.program.backward import _RULES, gradients
from fxprec.kernels.rows.program.layout import Layout
from fxprec.kernels.rows.program.row_program import Port, RowProgram, Store
from fxprec.kernels.rows.program.values import BOOLEAN, Builder, Operand, Value
from fxprec.kernels.rows.run.evaluate import evaluate

FP32, FP64 = torch.float32, torch.float64
LAYOUT = Layout((3, 4), (0,), (1,))
X = torch.tensor([[0.3, 1.0, 2.0, 0.7], [1.5, 0.2, 0.9, 0.9], [3.0, 0.1, 0.4, 0.5]], dtype=FP64)
SHAPES = {"full": (3, 4), "columns": (1, 4), "rows": (3, 1), "scalar": (1, 1)}


def run(b: Builder, results: list[Operand], loads: list[tuple[Value, Tensor]]) -> list[Tensor]:
    """What the results are, in float64."""
    ports = tuple((value, Port(FP32, value.rows, value.columns)) for value, _ in loads)
    program = RowProgram(ports, tuple(Store(r, FP32, True, True) for r in results), 0, 4)
    return evaluate(program, LAYOUT, [tensor for _, tensor in loads], None, 0, FP64)


def make(b: Builder, op: str, a: Value, c: Value) -> Operand:
    if op in ("sum", "max", "min"):
        return b.reduce(op, b("mul", a, c))
    if op == "where":
        return b("where", b("gt", a, 0.6), a, c)
    if op == "round":
        return b.round(b("mul", a, c), torch.bfloat16)
    arity = 2 if op in ("add", "sub", "mul", "div", "maximum", "minimum") else 1
    return b(op, *(a, c)[:arity])


@pytest.mark.parametrize("second", SHAPES)
@pytest.mark.parametrize("first", SHAPES)
@pytest.mark.parametrize("op", _RULES)
def test_every_primitive(op: str, first: str, second: str) -> None:
    b = Builder(4)
    shapes = [SHAPES[first], SHAPES[second]]
    values = [b.load(n, FP32, shape[0] > 1, shape[1] > 1) for n, shape in enumerate(shapes)]
    given = b.load(2, FP32, True, True)
    tensors = [X[: s[0], : s[1]].clone().requires_grad_() for s in shapes]
    cotangent = torch.linspace(-1, 2, 12, dtype=FP64).reshape(3, 4)
    output = b("mul", make(b, op, *values), 2.0)
    found = gradients(b, [output], [given], values)
    loads = [*zip(values, tensors, strict=True), (given, cotangent)]
    (exact,) = run(b, [output], loads)
    if op == "round":  # which evaluate differentiates as the identity too
        assert exact.requires_grad
    right = torch.autograd.grad(exact, tensors, cotangent, allow_unused=True)
    for value, own, other, tensor in zip(values, found, right, tensors, strict=True):
        if own is None:
            assert other is None
            continue
        assert value.columns or not isinstance(own, Value) or not own.columns
        (result,) = run(b, [own], loads)
        result = result if value.rows else result.sum(0, keepdim=True)  # which the kernel's second stage does
        result = result[:, :1] if not value.columns else result
        assert torch.allclose(result.expand(tensor.shape), torch.zeros_like(tensor) if other is None else other)


def test_a_gradient_that_no_column_changes_counts_once_for_each() -> None:
    b = Builder(4)
    x, c = b.load(0, FP32, True, True), b.load(1, FP32, True, False)
    given = b.load(2, FP32, True, False)  # of a sum over columns
    (found,) = gradients(b, [b.reduce("sum", b("add", x, c))], [given], [c])
    (result,) = run(b, [found], [(x, X), (c, X[:, :1]), (given, X[:, 1:2])])  # type: ignore[list-item]
    assert torch.equal(result, (4 * X[:, 1:2]).expand(3, 4))


def test_no_gradient_goes_through_what_is_stopped_or_flat() -> None:
    b = Builder(4)
    x, given = b.load(0, FP32, True, True), b.load(1, FP32, True, True)
    for op in ("floor", "ceil", "trunc", "sign"):
        assert gradients(b, [b(op, x)], [given], [x]) == [None]
    assert gradients(b, [b.stop(x)], [given], [x]) == [None]
    assert gradients(b, [b("mul", b.stop(x), x)], [given], [x]) == [b("mul", given, b.stop(x))]
    assert gradients(b, [x], [None], [x]) == [None]
    assert gradients(b, [x, x], [given, given], [x]) == [b("add", given, given)]


def test_all_that_has_no_rule_has_no_derivative() -> None:
    from fxprec.kernels.rows.emit.source import _EXPRESSIONS

    assert {*_EXPRESSIONS} - {*_RULES} - BOOLEAN == {"floor", "ceil", "trunc", "sign", "float"}
