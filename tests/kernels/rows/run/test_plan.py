"""Plans: what is allocated, how gradients are finished, what calls share, and the bytes that are counted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_tools
import region_tools as tools
from fxprec.kernels.rows.program.layout import Spec, spec_of
from fxprec.kernels.rows.run.derive import make_plan
from fxprec.kernels.rows.run.evaluate import eager_backward
from fxprec.kernels.rows.run.plan import Finish, bytes_moved, count_kernels

BF16, FP32 = torch.bfloat16, torch.float32


def leaf(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def norm(x, w, b):
    return F.layer_norm(x, (8,), w, b)


def test_a_spec_is_a_tensor_without_its_numbers() -> None:
    x = torch.zeros(2, 3, 4, dtype=BF16).transpose(0, 1).requires_grad_()
    spec = spec_of(x)
    assert spec == Spec((3, 2, 4), (4, 12, 1), BF16, True) and spec.bytes == 48
    assert spec_of(spec.empty(tools.CPU)) == Spec((3, 2, 4), (4, 12, 1), BF16)


def test_what_is_allocated() -> None:
    plan = tools.plan_of(norm, leaf(5, 3, 8, dtype=BF16), leaf(8), leaf(8))
    made = plan.empty_results(True)
    assert [(tuple(t.shape), t.dtype) for t in made] == [((5, 3, 8), BF16)] + [((5, 3, 1), FP32)] * 2
    assert len(plan.empty_results(False)) == 1
    gradients = plan.empty_gradients()
    assert [(tuple(t.shape), t.dtype) for t in gradients] == [((5, 3, 8), BF16), ((1, 16), FP32)]
    there = [*range(3), "out", "sum", "square"]
    assert [there[place] for place in plan.saved_positions] == [0, 1, "sum", "square"]


def test_outputs_and_gradients_lie_as_eager_ones_do() -> None:
    x = leaf(2, 8, 3, 5).detach().to(memory_format=torch.channels_last).requires_grad_()
    plan = tools.plan_of(lambda x, b: F.gelu(x + b), x, leaf(8, 1, 1))
    assert plan.outputs[0].strides == x.stride() == plan.empty_gradients()[0].stride()
    strided = leaf(5, 12).detach()[:, ::2].requires_grad_()
    plan = tools.plan_of(lambda x: (x.to(FP32), x * 2), strided)
    assert [spec.strides for spec in plan.outputs] == [(6, 1)] * 2 and plan.gradients[0] == Spec((5, 6), (6, 1), FP32)


def test_gradients_are_finished() -> None:
    plan = tools.plan_of(lambda x, w, s, c: x * w * s * c, leaf(4, 3, 8), leaf(8), leaf(), leaf(4, 1, 1))
    assert [(f.partial, f.stored, f.plain) for f in plan.finishes] == [
        (False, 0, True), (True, 0, True), (True, 1, False), (False, 1, False),
    ]  # fmt: skip
    assert plan.partial_widths == (8, 1) and plan.finishes[3].summed == (1,)
    made = [torch.ones_like(t) for t in plan.empty_gradients()]
    plan.backward_launch.partials = (3, 9)
    made[-1] = torch.arange(9.0).repeat(3, 1)
    found = plan.finished(made)
    assert [tuple(g.shape) for g in found] == [(4, 3, 8), (8,), (), (4, 1, 1)]
    assert torch.equal(found[1], 3 * torch.arange(8.0)) and float(found[2]) == 24.0  # three programs' sums
    assert torch.equal(found[3], torch.full((4, 1, 1), 3.0))


def test_columns_in_another_order_are_turned_back() -> None:
    x = torch.randn(4, 3, 2).permute(2, 1, 0)[None].expand(5, 2, 3, 4).contiguous(memory_format=torch.contiguous_format)
    x = x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1).requires_grad_()
    w = torch.randn(4, 3, 2).permute(2, 1, 0).requires_grad_()
    plan = tools.plan_of(lambda x, w: x * w, x, w)
    finish = plan.finishes[1]
    assert finish == Finish(spec_of(w), True, 0, False, (4, 3, 2), (2, 1, 0))
    made = plan.empty_gradients()
    made[-1].zero_()[0] = torch.arange(24.0)
    assert torch.equal(plan.finished(made)[1], torch.arange(24.0).reshape(4, 3, 2).permute(2, 1, 0))


def test_cotangents_are_laid_out_as_the_outputs() -> None:
    plan = tools.plan_of(lambda x: (x > 0, x * 2), leaf(4, 6))
    given = torch.randn(4, 6)
    (same,) = plan.laid_out([torch.zeros(()), given])
    assert same is given
    (copied,) = plan.laid_out([torch.zeros(()), torch.randn(6, 4).t()])
    assert copied.stride() == (6, 1)
    (copied,) = plan.laid_out([torch.zeros(()), torch.ones(()).expand(4, 6)])
    assert torch.equal(copied, torch.ones(4, 6)) and copied.stride() == (6, 1)


def test_the_eager_backward_gives_the_dtypes_of_the_inputs() -> None:
    inputs = [leaf(4, 8, dtype=BF16), leaf(8), leaf(8)]
    plan = tools.plan_of(norm, *inputs)
    out = norm(inputs[0].float(), *inputs[1:])
    saved = [{"input": inputs, "output": [out]}.get(kind, [out] * 2)[n] for kind, n in plan.saved_sources]
    cotangent = torch.randn(4, 8)
    found = eager_backward(plan, saved, [cotangent], None, 0)
    assert [g.dtype for g in found] == [BF16, FP32, FP32]
    exact = torch.autograd.grad(out, inputs, cotangent)
    assert all(torch.allclose(own, other, atol=1e-2) for own, other in zip(found, exact, strict=True))


def test_row_programs_are_shared_by_what_they_depend_on() -> None:
    known: dict[Any, Any] = {}
    graph = tools.graph_of(norm)

    def derived(*inputs: Tensor) -> Any:
        return make_plan("fused", graph, [spec_of(x) for x in inputs], tools.CPU, known).derived

    w, b = leaf(8), leaf(8)
    first = derived(leaf(5, 3, 8), w, b)
    assert derived(leaf(50, 2, 8), w, b) is first
    for other in (leaf(5, 1, 8), leaf(15, 8), leaf(5, 3, 8, dtype=BF16), leaf(5, 3, 8).detach()):
        assert derived(other, w, b) is not first
    assert derived(leaf(5, 3, 8), w.detach(), b) is not first
    flat: dict[Any, Any] = {}
    gm = tools.graph_of(lambda x: F.silu(x) * 2)
    plans = [make_plan("fused", gm, [spec_of(leaf(n))], tools.CPU, flat) for n in (5, 5000)]
    assert plans[0].derived is plans[1].derived
    assert [plan.inference_launch.numbers for plan in plans] == [(5,), (5000,)]


@pytest.mark.parametrize(
    ("function", "inputs", "kernels", "above"),
    [
        (lambda x: F.silu(x) * 2, [leaf(4, 8)], 2, 0),
        (lambda x, b: F.gelu(x + b), [leaf(4, 8), leaf(8)], 2, 4 * 8),  # the partials of one program, and no stage
        (lambda x, b: F.gelu(x + b), [leaf(600, 8), leaf(8)], 3, 2 * 4 * 8 * 3 - 4 * 8),
        (norm, [leaf(64, 8), leaf(8), leaf(8)], 2, 4 * 16 + 2 * 2 * 4 * 64),  # two statistics written and read
        (lambda x, y: x * y, [leaf(2, 3, 8), leaf(2, 1, 8)], 3, 2 * 4 * 48 - 4 * 16),  # of y in full, and summed
        (lambda x: F.softmax(x, -1), [torch.randn(4, 8)], 1, 0),
    ],
)
def test_kernels_and_bytes(function: Any, inputs: list[Tensor], kernels: int, above: int) -> None:
    plan = tools.plan_of(function, *inputs)
    moved, bound = bytes_moved(plan)
    assert count_kernels(plan) == kernels and moved - bound == above
    assert bound >= sum(spec.bytes for spec in (*plan.inputs, *plan.outputs))


@pytest.mark.skipif(not kernel_tools.HAS_TRITON, reason="wants Triton")
def test_launches_go_with_their_plans() -> None:
    derived = None
    for rows in range(3, 9):
        plan = tools.plan_of(lambda x: F.layer_norm(x, (8,)) * 2, torch.randn(rows, 8), device=torch.device("cuda"))
        derived = plan.derived
        assert plan.inference_launch in derived.launches.values()
        del plan
    gc.collect()
    assert derived is not None and not derived.launches
