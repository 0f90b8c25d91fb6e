"""Values: each made once, simplified only where that is exact, and varying along what their arguments do."""

from __future__ import annotations

import math

import pytest
import torch

from fxprec.kernels.rows.program.values import Builder, Value, walk

FP32, FP16 = torch.float32, torch.float16


def builder() -> tuple[Builder, Value, Value, Value]:
    b = Builder(8)
    return b, b.load(0, FP32, True, True), b.load(1, FP32, False, True), b.load(2, FP32, True, False)


def test_equal_operations_are_one_value() -> None:
    b, x, w, _ = builder()
    assert b("mul", x, w) is b("mul", x, w) and b("mul", x, 2.0) is b("mul", x, 2.0)
    assert b("mul", x, w) is not b("mul", w, x)
    assert b("mul", x, 0.0) is not b("mul", x, -0.0)  # which differ
    assert b("mul", x, math.nan) is b("mul", x, math.nan)
    assert b.keep(0, 0.5) is not b.keep(1, 0.5) and b.keep(0, 0.5) is b.keep(0, 0.5)
    made = b.made
    b("exp", x)
    b("exp", x)
    assert b.made == made + 1


def test_values_vary_along_what_their_arguments_do() -> None:
    b, x, w, c = builder()
    assert [(v.rows, v.columns) for v in (b("add", w, 1.0), b("add", c, 1.0), b("add", w, c), b("exp", x))] == [
        (False, True), (True, False), (True, True), (True, True),
    ]  # fmt: skip
    total = b.reduce("sum", x)
    assert isinstance(total, Value) and (total.rows, total.columns) == (True, False)
    assert isinstance(b.reduce("max", w), Value) and not b.reduce("max", w).rows  # type: ignore[union-attr]


def test_a_row_of_equal_numbers_is_reduced_without_a_loop() -> None:
    b, _, _, c = builder()
    assert repr(b.reduce("sum", c)) == f"%{b.made - 1} = mul(%2, 8)"
    assert b.reduce("max", c) is c
    assert b.mean(c) is c


def test_only_what_is_exact_is_simplified() -> None:
    b, x, w, _ = builder()
    assert b("mul", x, 1.0) is x and b("mul", 1.0, x) is x and b("div", x, 1.0) is x and b("neg", b("neg", x)) is x
    assert b("add", x, 0.0) is not x  # -0.0 + 0.0 is 0.0
    assert b("mul", x, 0.0).op == "mul"  # of NaN that is NaN
    assert b("div", 1.0, x).op == "div" and b("mul", w, w).op == "mul"


def test_rounding_twice_is_rounding_once() -> None:
    b, x, _, _ = builder()
    rounded = b.round(x, FP16)
    assert rounded.op == "round" and b.round(rounded, FP16) is rounded and b.round(x, FP32) is x
    assert b.round(rounded, torch.bfloat16) is not rounded


def test_kinds() -> None:
    b, x, _, _ = builder()
    i, m = b.load(3, torch.int64, True, True), b.load(4, torch.bool, True, True)
    assert (x.kind, i.kind, m.kind) == ("float", "integer", "bool")
    assert b.float(x) is x and b.float(3.0) == 3.0 and b.float(i).kind == "float"  # type: ignore[union-attr]
    assert b("add", i, m).kind == "float" and b("gt", x, 0.0).kind == "bool"
    assert b.truth(m) is m and repr(b.truth(x)).endswith("ne(%0, 0)")
    assert all(a.kind == "bool" for a in b("and", x, i).args)  # type: ignore[union-attr]
    assert b("where", x, 1.0, m).args[0].kind == "bool"  # type: ignore[union-attr]


@pytest.mark.parametrize(("number", "whole"), [(3.0, True), (0.5, False), (2.0**31, False), (-(2.0**31) + 1, True)])
def test_integers_are_compared_as_such_where_32_bits_hold_the_number(number: float, whole: bool) -> None:
    b, _, _, _ = builder()
    i = b.load(3, torch.int64, True, True)
    assert (b("eq", i, number).args[0] is i) is whole


def test_walk_gives_arguments_first_and_stops() -> None:
    b, x, w, c = builder()
    inner = b("mul", x, w)
    outer = b("add", inner, c)
    assert walk([outer]) == [x, w, c, inner, outer]
    assert walk([outer], lambda value: value is inner) == [c, inner, outer]
    assert walk([]) == []
