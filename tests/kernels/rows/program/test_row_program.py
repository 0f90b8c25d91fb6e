"""Row programs of regions: what a forward stores, and what a backward starts from, keeps and gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import region_tools as tools
from fxprec.kernels.rows.program.row_program import Port, Store
from fxprec.kernels.rows.program.values import Builder

BF16, FP32 = torch.bfloat16, torch.float32


def leaf(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def backward(function: Any, *inputs: Tensor) -> Any:
    return tools.plan_of(function, *inputs).backward_program


def test_ports_and_stores() -> None:
    assert [Port(BF16, rows, columns).size(3, 5) for rows in (True, False) for columns in (True, False)] == [
        30,
        6,
        10,
        2,
    ]
    b = Builder(4)
    x = b.load(0, BF16, True, True)
    assert Store(x, BF16, True, True).port == Port(BF16, True, True)
    assert not Store(b("exp", x), BF16, True, True).exact and Store(b.round(x, BF16), BF16, True, True).exact
    assert Store(b("exp", x), FP32, True, True).exact and not Store(1.0, FP32, True, True).exact


def test_a_program_lists_its_values_and_its_reductions() -> None:
    program = tools.plan_of(lambda x, w: F.rms_norm(x, (8,), w), leaf(4, 8), leaf(8)).derived.forward
    assert program.reduces and [v.op for v in program.values][:2] == ["load", "load"]
    assert not tools.plan_of(lambda x, w: x * w, leaf(4, 8), leaf(8)).derived.forward.reduces


def tripled(x):
    y = x * 3
    return y, torch.exp(y)


def test_what_is_returned_is_rounded_where_it_is_used_again() -> None:
    program = tools.plan_of(tripled, leaf(4, 8, dtype=BF16)).derived.forward
    assert [v.op for v in program.values] == ["load", "mul", "round", "exp", "round"]
    assert program.values[3].args == (program.values[2],)
    program = tools.plan_of(lambda x: torch.exp(x * 3), leaf(4, 8, dtype=BF16)).derived.forward
    assert [v.op for v in program.values] == ["load", "mul", "exp", "round"]


def test_a_backward_of_bias_and_activation_reads_no_statistics() -> None:
    bw = backward(lambda x, b: F.gelu(x + b), leaf(4, 8, dtype=BF16), leaf(8))
    assert bw.saved == (("input", 0), ("input", 1)) and not bw.statistics
    assert [s.partial for s in bw.program.stores] == [False, True] and bw.owners == (0, 1)


def test_an_output_is_read_where_that_is_less() -> None:
    bw = backward(lambda x, y: torch.sigmoid(x + y), leaf(4, 8), leaf(4, 8))
    assert bw.saved == (("output", 0),)
    bw = backward(lambda s, y: (s + y, torch.sigmoid(s + y)), leaf(4, 8), leaf(4, 8))
    assert bw.saved == (("output", 1),)


def test_equal_gradients_are_stored_once_where_the_inputs_lie_alike() -> None:
    bw = backward(lambda x, y: torch.tanh(x + y), leaf(4, 8), leaf(4, 8))
    assert len(bw.program.stores) == 1 and bw.stored_in == (0, 0)
    bw = backward(lambda x, y: torch.tanh(x + y), leaf(4, 8), leaf(4, 8, dtype=BF16))
    assert len(bw.program.stores) == 2
    turned = torch.zeros(3, 4, 8).transpose(0, 1).requires_grad_()
    assert len(backward(lambda x, y: torch.tanh(x + y), leaf(4, 3, 8), turned).program.stores) == 2


def test_gradients_that_are_summed_over_some_rows_are_fp32() -> None:
    bw = backward(lambda x, y: x * y, leaf(2, 3, 8, dtype=BF16), leaf(2, 1, 8, dtype=BF16))
    assert [s.dtype for s in bw.program.stores] == [BF16, FP32] and not any(s.partial for s in bw.program.stores)


def test_statistics_are_kept_and_what_they_come_from_only_for_second_derivatives() -> None:
    bw = backward(lambda x: torch.sigmoid(x.sum(-1)) * 2, leaf(4, 8))
    assert bw.saved == (("statistic", 0),) and [source for _, source in bw.double_backward_sources] == [("input", 0)]
    bw = backward(lambda x, w: F.layer_norm(x, (8,), w), leaf(4, 8), leaf(8))
    assert [kind for kind, _ in bw.saved].count("statistic") == 2 and not bw.double_backward_sources


def test_only_what_is_wanted_is_stored() -> None:
    bw = backward(lambda x, w: x * w, torch.zeros(4, 8), leaf(8))
    assert bw.wanted == (1,) and len(bw.program.stores) == 1 and bw.saved == (("input", 0),)
    assert tools.plan_of(lambda x, w: x > w, leaf(4, 8), leaf(8)).derived.backward is None
    assert tools.plan_of(lambda x, w: x * w, torch.zeros(4, 8), torch.zeros(8)).derived.backward is None


def test_reductions_of_a_loop_are_found_by_level() -> None:
    program = tools.plan_of(lambda x: F.layer_norm(x, (8,)) + x.amax(-1, keepdim=True), leaf(4, 8)).derived.forward
    assert [[v.op for v in level] for level in program.levels] == [["sum", "max"], ["sum"]]


@pytest.mark.parametrize(
    ("function", "shapes", "kind", "rows", "block"),
    [
        (lambda x: torch.exp(x), [(100, 8)], "flat", 1, 1024),
        (lambda x, b: x * b, [(100, 8), (8,)], "tile", 64, 16),
        (lambda x, b: x * b, [(1, 8), (1, 1)], "tile", 1, 16),
        (lambda x, b: x * b, [(100, 768), (768,)], "tile", 1, 1024),
        (lambda x, b: x * b, [(100, 3072), (3072,)], "blocks", 4, 512),
        (lambda x, b: x * b, [(100, 1500), (1500,)], "blocks", 4, 1024),
        (lambda x: F.softmax(x, -1), [(100, 16384)], "tile", 1, 16384),
        (lambda x: F.softmax(x, -1), [(100, 16385)], "loop", 1, 4096),
    ],
)
def test_tiles_without_partials(function: Any, shapes: list[tuple[int, ...]], kind: str, rows: int, block: int) -> None:
    plan = tools.plan_of(function, torch.zeros(shapes[0]), *[leaf(*shape) for shape in shapes[1:]])
    form, columns = plan.inference_launch.tiling, plan.layout.columns
    assert (form.kind, form.rows, form.block) == (kind, rows, block)
    assert plan.inference_launch.grid == (form.down(plan.layout.rows, columns, 99) * form.across(columns), 1, 1)
    tiles = plan.inference_launch.grid[0] * form.rows * form.block
    assert tiles >= plan.layout.rows * columns or form.kind == "loop"
    assert not form.persistent and form.stages == 1


@pytest.mark.parametrize(
    ("columns", "kind", "rows", "block", "warps", "stages"),
    [
        (64, "tile", 16, 64, 1, 3), (768, "tile", 1, 1024, 1, 3), (2048, "tile", 1, 2048, 4, 1),
        (8192, "tile", 1, 8192, 16, 1), (8193, "loop", 1, 4096, 8, 1),
    ],
)  # fmt: skip
def test_tiles_of_a_norm_with_partials(columns: int, kind: str, rows: int, block: int, warps: int, stages: int) -> None:
    plan = tools.plan_of(lambda x, w: F.layer_norm(x, (columns,), w), leaf(9000, columns), leaf(columns))
    form = plan.backward_launch.tiling
    assert (form.kind, form.rows, form.block, form.warps, form.stages) == (kind, rows, block, warps, stages)
    assert form.persistent and ("num_stages=3" in plan.backward_launch.source) is (stages == 3)


@pytest.mark.parametrize(
    ("columns", "block", "warps"), [(3072, 1024, 4), (1536, 512, 2), (1500, 1024, 4), (5000, 1024, 4)]
)
def test_blocks_with_partials_are_one_row_of_many_programs(columns: int, block: int, warps: int) -> None:
    plan = tools.plan_of(lambda x, b: F.silu(x + b), leaf(9000, columns), leaf(columns))
    form = plan.backward_launch.tiling
    assert (form.kind, form.rows, form.block, form.warps, form.stages) == ("blocks", 1, block, warps, 3)
