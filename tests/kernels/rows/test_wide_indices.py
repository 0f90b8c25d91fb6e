"""More than 2**31 elements, rows or columns: no index of a generated kernel is computed in 32 bits that do not hold it.

Plans are made of shapes alone, nothing is allocated. In each kernel's Triton IR intervals of all integers follow from
the grid and the arguments, through every operation; what a 32-bit operation gives must lie within 32 bits.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kernel_tools
import region_tools as tools
from fxprec.kernels.rows.program.layout import Spec
from fxprec.kernels.rows.run.derive import make_plan
from integer_intervals import integers

MANY = 2**32 + 8


def spec(*shape: int, strides: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> Spec:
    dense = [1]
    for size in reversed(shape[1:]):
        dense.insert(0, dense[0] * size)
    return Spec(shape, strides or tuple(dense), dtype, dtype.is_floating_point)


CASES: dict[str, tuple[Any, list[Spec], str]] = {
    "flat": (lambda x, y: F.silu(x) * y, [spec(MANY), spec(MANY)], "flat"),
    "flat dropout": (lambda x: F.dropout(x, 0.5, True) * 2, [spec(MANY)], "flat"),
    "strided": (lambda x, y: x * F.silu(y), [spec(4, 2**31, strides=(1, 4)), spec(4, 2**31)], "tile"),
    "columns": (lambda x, b: F.silu(x) * b, [spec(4, MANY), spec(MANY)], "blocks"),
    "some rows": (lambda x, b: F.silu(x) * b, [spec(3, 4, MANY), spec(3, 1, MANY)], "blocks"),
    "long rows": (lambda x, b: F.layer_norm(x, (MANY,), b), [spec(4, MANY), spec(MANY)], "loop"),
    "rows": (lambda x, b: F.silu(x) * b, [spec(2**33, 16), spec(16)], "tile"),
    "softmax": (lambda x, m: F.softmax(x * 2 + m, -1), [spec(2**9, 2**13, 2**13), spec(2**9, 1, 2**13)], "tile"),
    "nearly 2**31 rows": (lambda x, b: F.silu(x) * b, [spec(2**31 - 1, 16), spec(16)], "tile"),
    "nearly 2**31 columns": (lambda x, b: F.silu(x) * b, [spec(4, 2**31 - 1), spec(2**31 - 1)], "blocks"),
    "dropout of long rows": (lambda x: F.dropout(F.softmax(x, -1), 0.5, True), [spec(4, MANY)], "loop"),
}


@kernel_tools.compiles
@pytest.mark.parametrize("case", CASES)
def test_no_index_leaves_its_type(case: str) -> None:
    function, specs, kind = CASES[case]
    plan = make_plan("fused", tools.graph_of(function), specs, tools.CPU, {})
    for launch, dtypes in plan.launches():
        assert launch.tiling.kind == kind and launch.grid[0] < 2**31
        ir = kernel_tools.compiled_launch(launch, dtypes, 90).ttir
        names = re.findall(r"(%\w+): (?:i64|i32)", next(line for line in ir.splitlines() if "tt.func public" in line))
        numbers = [number for number in launch.numbers if number != 1]
        arguments = [name.removeprefix("%") for name in names if name != "%seed"]
        found = integers(ir, dict(zip(arguments, numbers, strict=True)) | {"seed": 0}, launch.grid)
        assert not found.wrong and not found.unknown, found
        assert found.largest >= 2**30  # the analysis has followed the indices to where they are used


def test_the_analysis_sees_an_overflow() -> None:
    ir = "%0 = tt.get_program_id x : i32\n%c = arith.constant 1024 : i32\n%1 = arith.muli %0, %c : i32\n"
    assert not integers(ir, {}, (2**21, 1, 1)).wrong
    assert len(integers(ir, {}, (2**21 + 2, 1, 1)).wrong) == 1
