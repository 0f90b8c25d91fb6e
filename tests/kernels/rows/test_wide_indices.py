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
from fxprec.kernels.rows.program.spec import Spec
from fxprec.kernels.rows.run.derive import make_plan

Interval = tuple[int, int]
MANY = 2**32 + 8
_LINE = re.compile(r"^\s*(%[\w:#]+) = ([\w.]+) (.*)$")
_TYPE = re.compile(r"i(\d+)>?$")


def spec(*shape: int, strides: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> Spec:
    dense = [1]
    for size in reversed(shape[1:]):
        dense.insert(0, dense[0] * size)
    return Spec(shape, strides or tuple(dense), dtype, dtype.is_floating_point)


def intervals(ttir: str, arguments: dict[str, int], programs: int) -> tuple[dict[str, Interval], list[str]]:
    """(interval of each integer that has one, lines whose result may leave its type).

    Numbers from memory, and what Philox makes of indices (after ``trunci``), have none.
    """
    known: dict[str, Interval] = {f"%{name}": (value, value) for name, value in arguments.items()}
    wrong: list[str] = []
    for line in ttir.splitlines():
        line = re.sub(r"\s*loc\(.*\)$", "", line)
        loop = re.match(r"\s*(?:%[\w:]+ = )?scf\.for (%\w+) = (%\w+) to (%\w+) step (%\w+)", line)
        if loop:
            variable, first, last, step = loop.groups()
            known[variable] = (known[first][0], known[last][1] - 1)
            bits = int(re.findall(r": i(\d+) ", line)[-1])
            if known[last][1] + known[step][1] >= 2 ** (bits - 1):  # the last step leaves the loop
                wrong.append(line)
            continue
        match = _LINE.match(line)
        if not match:
            continue
        name, op, rest = match.groups()
        found = _interval(op, rest, [known.get(used) for used in re.findall(r"%\w+", rest)], programs)
        if found is None:
            continue
        known[name] = found
        bits = _TYPE.search(rest.replace(" ", ""))
        if bits and not -(2 ** (int(bits[1]) - 1)) <= found[0] <= found[1] < 2 ** (int(bits[1]) - 1):
            wrong.append(line)
    return known, wrong


def _interval(op: str, rest: str, given: list[Interval | None], programs: int) -> Interval | None:
    if op == "tt.get_program_id":
        return 0, programs - 1
    if op == "tt.get_num_programs":
        return programs, programs
    if op == "arith.constant":
        number = re.match(r"(?:dense<)?(-?\d+)>? : (?:tensor<[\dx]+x?)?i\d+", rest)
        return (int(number[1]), int(number[1])) if number else None
    if op == "tt.make_range":
        end, start = (int(re.search(rf"{word} = (\d+)", rest)[1]) for word in ("end", "start"))  # type: ignore[index]
        return start, end - 1
    if op in ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "arith.extsi"):
        return given[0]
    if op in ("arith.addi", "arith.subi", "arith.muli", "arith.divsi", "arith.remsi") and len(given) == 2:
        a, b = given
        if a is None or b is None:
            return None
        if op == "arith.remsi":
            return 0, max(abs(b[1]) - 1, 0)
        function = {
            "addi": lambda x, y: x + y, "subi": lambda x, y: x - y, "muli": lambda x, y: x * y,
            "divsi": lambda x, y: int(x / y) if abs(x) < 2**52 else x // y,
        }[op.removeprefix("arith.")]  # fmt: skip
        ends = [function(x, y) for x in a for y in b]
        return min(ends), max(ends)
    return None


def offsets(ttir: str, known: dict[str, Interval]) -> int:
    """The largest offset that is added to a pointer."""
    found = re.findall(r"tt\.addptr %\w+, (%\w+)", ttir)
    assert found and all(name in known for name in found), [name for name in found if name not in known]
    return max(known[name][1] for name in found)


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
        assert launch.form.kind == kind and launch.grid[0] < 2**31
        ir = kernel_tools.compiled_launch(launch, dtypes, 90).ttir
        names = re.findall(r"(%\w+): (?:i64|i32)", next(line for line in ir.splitlines() if "tt.func public" in line))
        numbers = [number for number in launch.numbers if number != 1]
        arguments = [name.removeprefix("%") for name in names if name != "%seed"]
        known, wrong = intervals(ir, dict(zip(arguments, numbers, strict=True)) | {"seed": 0}, launch.grid[0])
        assert not wrong, wrong
        assert offsets(ir, known) >= 2**30  # the analysis has followed the indices to where they are used


def test_the_analysis_sees_an_overflow() -> None:
    ir = "%0 = tt.get_program_id x : i32\n%c = arith.constant 1024 : i32\n%1 = arith.muli %0, %c : i32\n"
    assert not intervals(ir, {}, 2**21)[1]
    assert len(intervals(ir, {}, 2**21 + 2)[1]) == 1
