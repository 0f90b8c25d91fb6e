"""Fused regions run as kernels: values and gradients against float64, every layout and edge, every way to be called.

Of a region whose ops run in low precision one by one the error against float64 is measured beside: the kernel may have
twice of it at most.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernel_tools
import region_tools as tools
from fxprec.kernels.launch.philox import draw_seeds, keep_mask
from fxprec.kernels.rows.run.plan import count_kernels
from fxprec.kernels.rows.run.region import FusedRegion

on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter divides what a mask hides
#: The interpreter cuts to bfloat16 where a GPU rounds.
LOW = [torch.float16, torch.bfloat16]


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(device, dtype).requires_grad_()


def check(function: Any, *inputs: Tensor, factor: float = 2.0, low: torch.dtype | None = None) -> FusedRegion:
    """Kernel against float64: at most ``factor`` times the error of the same ops one by one."""
    region = tools.region_of(function)
    torch.manual_seed(1)
    found, exact = tools.run_both(function, inputs, region)
    assert region.path == "triton", region.reason
    torch.manual_seed(1)
    eager, _ = tools.run_both(function, inputs, lambda *given: tools.region_of(function).graph_module(*given))
    for number, (own, other, right) in enumerate(zip(found, eager, exact, strict=True)):
        assert own.dtype == other.dtype and own.shape == other.shape
        assert number or own.stride() == other.stride()
        slack = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}.get(own.dtype, 1e-6)
        if kernel_tools.INTERPRETING and low is torch.bfloat16:
            slack *= 2  # which cuts where a GPU rounds
        assert tools.error(own, right) <= max(factor * tools.error(other, right), slack), f"result {number}"
    return region


def dropout_add_norm(h, x, w, b, bias):
    s = x + F.silu(h + bias)
    return s, F.layer_norm(s, (40,), w, b)


# -- values and gradients ----------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 5), (2, 1, 9)], ids=str)
def test_a_residual_and_its_norm(device: str, low: torch.dtype, rows: tuple[int, ...]) -> None:
    inputs = [leaf(*rows, 40, dtype=low), leaf(*rows, 40), leaf(40), leaf(40), leaf(40)]
    region = check(dropout_add_norm, *[x.detach().to(device).requires_grad_() for x in inputs], low=low)
    plan = region.plans[-1]
    assert plan.derived.backward is not None
    assert ("output", 0) in plan.saved_sources and (
        "input",
        0,
    ) in plan.saved_sources  # of the residual only the sum is read again
    assert ("input", 1) not in plan.saved_sources


@on_devices
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("columns", [1, 2, 7, 16, 33, 1000, 3000])
def test_bias_and_activation(device: str, low: torch.dtype, columns: int) -> None:
    check(lambda x, b: F.gelu(x + b), leaf(5, columns, dtype=low, device=device), leaf(columns, device=device), low=low)


@on_devices
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("columns", [1, 5, 64, 100])
def test_softmax_with_scale_and_mask(device: str, low: torch.dtype, columns: int) -> None:
    mask = torch.zeros(2, 1, 1, columns, device=device)
    mask[0, ..., columns // 2 :] = -1e9
    check(lambda x, m: F.softmax(x / 8 + m, -1), leaf(2, 3, 4, columns, dtype=low, device=device), mask, low=low)


@on_devices
def test_rows_longer_than_a_tile(device: str) -> None:
    columns = 20000
    weights = [leaf(columns, device=device), leaf(columns, device=device)]
    region = check(lambda x, w, b: F.layer_norm(x, (20000,), w, b), leaf(4, columns, device=device), *weights)
    assert region.plans[-1].backward_launch.tiling.kind == "loop"
    check(lambda x: F.softmax(x * 2, -1), leaf(2, columns, dtype=torch.float16, device=device))
    check(lambda x: x - x.amax(-1, keepdim=True), leaf(2, 17001, device=device))
    check(lambda x, s: (x * s).sum(-1), leaf(2, 17001, device=device), leaf(device=device))


def mixed_over_its_maximum(p: Tensor, q: Tensor) -> Tensor:
    z = p.float() * 1.3 + q.float() * 0.7 + (p * q).float() * 0.1  # which products become FMAs is the compiler's choice
    return z / z.amax(-1, keepdim=True)


@on_devices
def test_the_backward_finds_the_maximum_that_the_forward_found(device: str) -> None:
    check(
        mixed_over_its_maximum,
        *(leaf(200, 33, dtype=torch.bfloat16, device=device) for _ in range(2)),
        low=torch.bfloat16,
    )


@on_devices
def test_131072_columns(device: str) -> None:
    check(lambda x: F.log_softmax(x * 0.5, -1), leaf(1, 131072, device=device))
    check(lambda x, b: F.silu(x + b), leaf(1, 131072, dtype=torch.float16, device=device), leaf(131072, device=device))


@on_devices
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 9), (9, 1), (3, 1, 5), (1023,), (1025,), (7, 11, 13)], ids=str)
def test_shapes(device: str, shape: tuple[int, ...]) -> None:
    check(lambda x, y: F.silu(x) * y + 1, leaf(*shape, device=device), leaf(*shape, device=device))
    if shape:
        check(lambda x: F.softmax(x * 2, -1), leaf(*shape, device=device))


@on_devices
def test_operands_of_every_kind(device: str) -> None:
    x = leaf(4, 6, 10, dtype=torch.float16, device=device)
    for other in [(), (1,), (10,), (6, 1), (6, 10), (4, 1, 1), (1, 6, 1), (4, 1, 10), (1, 1, 1), (4, 6, 10)]:
        region = check(lambda x, y: torch.tanh(x * y) + y, x, leaf(*other, device=device))
        assert count_kernels(region.plans[-1]) <= 4


@on_devices
def test_layouts(device: str) -> None:
    def f(x, y):
        return F.gelu(x * 2) + y

    image = leaf(2, 8, 3, 5, device=device)
    last = image.detach().to(memory_format=torch.channels_last).requires_grad_()
    bias = leaf(8, 1, 1, device=device)
    for given in [(image, bias), (last, bias), (last, last.detach().clone().requires_grad_())]:
        check(f, *given)
    check(f, leaf(5, 7, 6, device=device).transpose(0, 1).detach().requires_grad_(), leaf(6, device=device))
    check(f, leaf(5, 12, device=device)[:, ::2].detach().requires_grad_(), leaf(6, device=device))
    check(f, leaf(5, 12, device=device)[1:, 3:9].detach().requires_grad_(), leaf(6, device=device))
    check(f, leaf(5, 1, device=device).expand(5, 6).detach().requires_grad_(), leaf(5, 6, device=device))
    check(f, leaf(6, device=device).expand(5, 6).detach().requires_grad_(), leaf(5, 6, device=device))
    check(lambda x: F.layer_norm(x * 2, (6,)), leaf(5, 12, device=device)[:, :6].detach().requires_grad_())
    check(lambda x: F.softmax(x * 2, -1), leaf(5, 3, 6, device=device).transpose(0, 1).detach().requires_grad_())
    check(lambda x: F.layer_norm(x * 2, (3, 6)), leaf(5, 3, 6, device=device))


@on_devices
def test_a_layout_that_does_not_serve_is_declined_and_runs(device: str) -> None:
    x = leaf(5, 6, device=device).t().detach().requires_grad_()
    region = tools.region_of(lambda x: F.softmax(x * 2, -1))
    result = region(x)
    assert (region.path, region.reason) == ("aten", "the reduced dimension is not the innermost in memory")
    assert torch.equal(result, F.softmax(x * 2, -1))


@on_devices
def test_aliased_inputs(device: str) -> None:
    x = leaf(4, 6, device=device)
    check(lambda x, y: x * F.silu(y), x, x)
    base = leaf(8, 6, device=device)
    check(lambda x, y: x * F.silu(y), base[:6], base[2:])


@on_devices
def test_nan_and_infinities_propagate_as_in_eager(device: str) -> None:
    odd = torch.tensor(
        [[1.0, math.nan, 2.0], [math.inf, 1.0, 0.0], [-math.inf, 1.0, 3.0], [-math.inf] * 3, [1.0, 2.0, 3.0]]
    )
    odd = odd.to(device)
    for f in [
        lambda x: F.softmax(x * 1.0 + 0, -1), lambda x: F.layer_norm(x + 0, (3,)), lambda x: x.amax(-1) * 2,
        lambda x: x.amin(-1) + 1, lambda x: F.relu(x) + 1, lambda x: x.clamp(-1, 1) + 1,
        lambda x: torch.logsumexp(x, -1) + 1, lambda x: torch.tanh(x) + torch.sigmoid(x), lambda x: F.elu(x) * 2,
        lambda x: F.softplus(x) + F.logsigmoid(x), lambda x: torch.maximum(x, x * 0 + 1), lambda x: F.mish(x) * 1.5,
        lambda x: torch.expm1(x) + torch.log1p(x.abs()), lambda x: torch.sign(x) + torch.trunc(x),
    ]:  # fmt: skip
        region = tools.region_of(f)
        found, exact = region(odd), f(odd)
        assert region.path == "triton"
        assert torch.equal(found.isnan(), exact.isnan()) and torch.allclose(
            found.nan_to_num(), exact.nan_to_num(), 1e-5
        )


@on_devices
def test_integer_and_bool_operands(device: str) -> None:
    ids = torch.tensor([[1, 2, 0], [0, 5, 6]], device=device)
    region = check(lambda x, i: torch.where(i == 0, -1e4, x) * 2 + i, leaf(2, 3, device=device), ids)
    assert region.path == "triton"
    check(lambda x, m: x.masked_fill(m, -1e4) * 2, leaf(2, 3, device=device), ids > 1)
    check(lambda x, i: x * i, leaf(2, 3, device=device), ids.to(torch.uint8))
    region = tools.region_of(lambda x, y: (x * 2, x > y))
    x, y = torch.randn(4, 5, device=device), torch.randn(4, 5, device=device)
    assert torch.equal(region(x, y)[1], x > y) and region.path == "triton"


@on_devices
def test_small_results_keep_their_digits(device: str) -> None:
    x = torch.logspace(-30, 1, 64, device=device)
    for f in (torch.tanh, torch.expm1, torch.log1p):
        region = tools.region_of(_twice(f))
        assert torch.allclose(region(x), f(x) * 2, rtol=2e-6, atol=0) and region.path == "triton"


def _twice(f):
    return lambda x: f(x) * 2


@on_devices
def test_inputs_may_have_any_name(device: str) -> None:
    def f(rows, column, tanh, sum_4, mul_3, tile, partials):
        return torch.tanh(rows * column) * tanh + (sum_4 * mul_3).sum(-1, keepdim=True) * mul_3 + tile * partials

    check(f, *[leaf(40, 6, device=device) for _ in range(6)], leaf(6, device=device))
    region = check(lambda x, x_out: torch.tanh(x) * x_out, leaf(4, 6, device=device), leaf(4, 6, device=device))
    graph = region.graph_module.graph
    next(node for node in graph.nodes if node.name == "tanh").name = "x"  # an output named as the input is
    assert region.source.count("x_out_ptr, ") >= 1


@on_devices
def test_truth_of_numbers(device: str) -> None:
    x = torch.tensor([[0.0, 1.0, -2.0], [math.nan, 0.5, 0.0]], device=device)
    y = torch.tensor([[1.0, 0.0, -1.0], [1.0, math.nan, 0.0]], device=device)
    for f in [
        lambda x, y: torch.where(torch.logical_and(x, y), 1.0, 2.0) * 3,
        lambda x, y: torch.where(torch.logical_or(x, y), 1.0, 2.0) * 3,
        lambda x, y: torch.where(torch.logical_not(x), y, 2.0).isnan(),
        lambda x, y: (x > y) + (x < y),
        lambda x, y: (x > y) * (y > -3),
        lambda x, y: torch.where((x > y) + (x > -3), 1.0, 0.0) * 2,
    ]:
        region = tools.region_of(f)
        assert torch.equal(region(x, y), f(x, y)) and region.path == "triton", region.reason


@on_devices
def test_integers_are_compared_exactly_and_not_computed_with(device: str) -> None:
    x = torch.ones(3, device=device)
    ids = torch.tensor([16777216, 16777217, -1], device=device)
    other = torch.tensor([16777217, 16777217, 7], dtype=torch.int32, device=device)
    for f in [
        lambda x, i, j: torch.where(i == 16777217, x, 0.0), lambda x, i, j: torch.where(i < j, x, 0.0),
        lambda x, i, j: torch.where(i >= 0.5, x, 0.0), lambda x, i, j: torch.where(i != -1, x, 0.0),
    ]:  # fmt: skip
        region = tools.region_of(f)
        assert torch.equal(region(x, ids, other), f(x, ids, other)) and region.path == "triton"
    small = torch.tensor([1, 255, 0], dtype=torch.uint8, device=device)
    region = tools.region_of(lambda x, i: torch.where(i == -1, x, 0.0))
    assert torch.equal(region(x, small), torch.zeros(3, device=device)) and region.path == "triton"
    region = tools.region_of(lambda x, i: x * (i + i))
    assert torch.equal(region(x, small), x * (small + small))  # it wraps
    assert (region.path, region.reason) == ("aten", "add gives torch.uint8")


@on_devices
def test_outputs_without_a_gradient_beside_others(device: str) -> None:
    for f in (lambda x, y: (x * 2, x > y), lambda x, y: (x.sum(-1) > 0, x * y)):
        check(f, leaf(4, 6, device=device), leaf(4, 6, device=device))
    region = tools.region_of(lambda x, y: x > y)
    x, y = leaf(4, 6, device=device), leaf(4, 6, device=device)
    assert torch.equal(region(x, y), x > y) and region.path == "triton"
    assert region.plans[-1].derived.backward is None


@on_devices
def test_what_is_the_same_in_every_column_has_a_gradient_from_each(device: str) -> None:
    check(lambda x: (x + x.mean(-1, keepdim=True)).mean(-1), leaf(4, 6, device=device))
    check(lambda x, c: (x * 0 + c).sum(-1) * 2, leaf(4, 6, device=device), leaf(4, 1, device=device))
    check(lambda x, c: (x + c * c).mean(-1), leaf(2, 20000, device=device), leaf(2, 1, device=device))


@on_devices
def test_one_element(device: str) -> None:
    check(lambda x, w: torch.tanh(x), leaf(1, 1, device=device), leaf(1, device=device))  # of w the gradient is 0
    softened = tools.region_of(lambda x: F.dropout(F.softmax(x, -1), 0.5, True), 1)  # one column
    assert set(softened(leaf(5, 1, device=device), draw_seeds(1, torch.device(device))).flatten().tolist()) <= {
        0.0,
        2.0,
    }
    assert softened.path == "triton"
    for shape in ((), (1,), (1, 1)):
        region, x = tools.region_of(dropped, 1), leaf(*shape, device=device)
        result = region(x, x, draw_seeds(1, x.device))
        assert region.path == "triton" and float(result.detach() / x.detach()) in (1.0, pytest.approx(1 / 0.7 + 1))


@on_devices
def test_outputs_get_memory_of_their_own(device: str) -> None:
    for x in (leaf(6, device=device).expand(4, 6), leaf(4, 12, device=device)[:, ::2]):
        x = x.detach().requires_grad_()
        region = tools.region_of(lambda x: (x.to(torch.float32), x * 2))
        found, exact = tools.run_both(lambda x: (x * 1, x * 2), [x], region)
        assert region.path == "triton" and all(o.is_contiguous() for o in region(x))
        assert all(tools.error(own, right) < 1e-6 for own, right in zip(found, exact, strict=True))


@on_devices
def test_gradients_of_maximum_with_nan_are_torchs(device: str) -> None:
    x = torch.tensor([[1.0, math.nan, 3.0, math.nan]], device=device).requires_grad_()
    y = torch.tensor([[1.0, 1.0, math.nan, math.nan]], device=device).requires_grad_()
    for f in (lambda x, y: torch.maximum(x, y) * 1.5, lambda x, y: torch.minimum(x, y) * 1.5):
        own = torch.autograd.grad(tools.region_of(f)(x, y).sum(), (x, y))
        assert all(map(torch.equal, own, torch.autograd.grad(f(x, y).sum(), (x, y))))
    check(lambda x, s: torch.maximum(s, x) + torch.minimum(s, x * x), leaf(3, 4, device=device), leaf(1, device=device))


@on_devices
def test_constants_that_fp32_does_not_hold(device: str) -> None:
    x = torch.tensor([[1.0, -2.0, 0.5]], device=device)
    for f in (lambda x: x * 1e40, lambda x: x * -1e300, lambda x: torch.where(x > 0, 1e-42, x) + 1):
        region = tools.region_of(f)
        assert torch.equal(region(x), f(x)) and region.path == "triton"
    region = tools.region_of(lambda x: x * 1e40)
    region(x)
    assert 'float("inf")' in region.source


@on_devices
def test_the_variance_of_one_column_beside_many(device: str) -> None:
    region = tools.region_of(lambda x, c: x + c.var(-1, unbiased=False, keepdim=True))
    x, c = torch.randn(3, 5, device=device), torch.randn(3, 1, device=device)
    assert torch.equal(region(x, c), x) and region.path == "triton"
    region = tools.region_of(lambda x, c: x + c.var(-1, keepdim=True))
    assert region(x, c).isnan().all()  # as in torch, whose ops run
    assert "fewer columns" in region.reason


# -- dropout -----------------------------------------------------------------------------------------------------------


def dropped(x, y):
    return F.dropout(x, 0.3, True) + y


@on_devices
@pytest.mark.parametrize("shape", [(1000,), (5, 40), (3, 5, 7), (2, 17000)], ids=str)
def test_dropout_keeps_what_the_mask_says_forward_and_backward(device: str, shape: tuple[int, ...]) -> None:
    region, x, y = tools.region_of(dropped, 1), leaf(*shape, device=device), leaf(*shape, device=device)
    seeds = draw_seeds(1, x.device)
    result = region(x, y, seeds)
    plan = region.plans[-1]
    mask = plan.layout.torch_shaped(keep_mask(seeds[0], plan.layout.rows, plan.layout.columns, 0.3))
    assert torch.allclose(result, x * mask / 0.7 + y, atol=1e-6) and region.path == "triton"
    cotangent = torch.randn_like(x)
    for gradient, exact in zip(
        torch.autograd.grad(result, (x, y), cotangent), (cotangent * mask / 0.7, cotangent), strict=True
    ):
        assert torch.allclose(gradient, exact, atol=1e-6)
    if x.numel() >= 1000:
        assert abs(mask.double().mean() - 0.7) < 0.05


@on_devices
def test_dropout_of_channels_last(device: str) -> None:
    x = torch.ones(2, 8, 5, 5, device=device).to(memory_format=torch.channels_last).requires_grad_()
    region = tools.region_of(lambda x: F.dropout(x, 0.5, True) * 3, 1)
    result = region(x, draw_seeds(1, x.device))
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, result) and set(result.unique().tolist()) == {0.0, 6.0}


@on_devices
def test_two_dropouts_have_seeds_of_their_own(device: str) -> None:
    region = tools.region_of(lambda x: (F.dropout(x, 0.5, True) + 1, F.dropout(x, 0.5, True) + 1), 2)
    x = torch.ones(64, 64, device=device)
    a, b = region(x, draw_seeds(2, x.device))
    assert not torch.equal(a, b)
    again = tools.region_of(lambda x: (F.dropout(x, 0.5, True) + 1, F.dropout(x, 0.5, True) + 1), 2)
    seeds = draw_seeds(2, x.device)
    assert not torch.equal(again(x, seeds)[0], a) and torch.equal(again(x, seeds)[0], region(x, seeds)[0])


@on_devices
def test_dropout_of_nothing_and_of_everything(device: str) -> None:
    x = leaf(4, 6, device=device)
    for p, exact in ((0.0, x + 1), (1.0, torch.ones_like(x))):
        region = tools.region_of(
            {0.0: lambda x: F.dropout(x, 0.0, True) + 1, 1.0: lambda x: F.dropout(x, 1.0, True) + 1}[p]
        )
        assert torch.equal(region(x), exact) and region.path == "triton"
    evaluating = tools.region_of(lambda x: F.dropout(x, 0.5, False) + 1)
    assert torch.equal(evaluating(x), x + 1)


@on_devices
def test_a_checkpoint_draws_the_same_mask_again(device: str) -> None:
    region = tools.region_of(dropped, 1)
    x, y = leaf(8, 64, device=device), leaf(8, 64, device=device)
    masks = []

    def block(x, y):
        result = region(x, y, draw_seeds(1, x.device))
        masks.append((result.detach() - y.detach()).abs() > 1e-6)
        return torch.tanh(result)

    (gradient,) = torch.autograd.grad(checkpoint(block, x, y, use_reentrant=False).sum(), x)
    assert len(masks) == 2 and torch.equal(*masks) and torch.equal(gradient != 0, masks[0])


# -- ways to be called -------------------------------------------------------------------------------------------------


@on_devices
def test_double_backward_is_that_of_the_ops(device: str) -> None:
    inputs = [leaf(3, 40, device=device), leaf(3, 40, device=device), *(leaf(40, device=device) for _ in range(3))]
    cases = [(dropout_add_norm, inputs), (lambda x: x / x.exp().sum(-1, keepdim=True), inputs[:1])]
    cases.append((lambda x: torch.sigmoid(x.sum(-1)) * 2, inputs[:1]))
    for function, given in cases:
        second = []
        for call in (tools.region_of(function), function):
            outputs = call(*given)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            first = torch.autograd.grad([o.square().sum() for o in outputs], given, create_graph=True)
            second.append(torch.autograd.grad(sum(g.square().sum() for g in first), given))
        for own, other in zip(*second, strict=True):
            assert torch.allclose(own, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@on_devices
def test_a_penalty_with_dropout_has_the_same_mask_in_its_second_derivative(device: str) -> None:
    region, x = tools.region_of(lambda x: F.dropout(x, 0.5, True).square(), 1), leaf(6, 40, device=device)
    seeds = draw_seeds(1, x.device)
    (first,) = torch.autograd.grad(region(x, seeds).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, 8.0 * (first != 0).float())


@on_devices
def test_no_gradient_is_recorded_where_none_is_wanted(device: str) -> None:
    region, x = tools.region_of(lambda x, w: F.layer_norm(x + 1, (6,), w)), torch.randn(4, 6, device=device)
    w = leaf(6, device=device)
    assert not region(x, w.detach()).requires_grad
    with torch.no_grad():
        assert not region(x, w).requires_grad
    result = region(x, w)
    (gradient,) = torch.autograd.grad(result.sum(), w)
    assert torch.allclose(gradient, F.layer_norm(x + 1, (6,)).sum(0), atol=1e-5)
    assert [plan.derived.backward is not None for plan in region.plans] == [False, False, True]
    assert region.plans[-1].gradients == (None,)  # x wants none, and no store is made for it


@on_devices
def test_one_output_that_nobody_uses(device: str) -> None:
    x = leaf(4, 6, device=device)
    used, _ = tools.region_of(lambda x: (F.silu(x) + 1, torch.exp(x) + 1))(x)
    (gradient,) = torch.autograd.grad(used.sum(), x)
    (exact,) = torch.autograd.grad(F.silu(x).sum(), x)
    assert torch.allclose(gradient, exact, atol=1e-6)


@on_devices
def test_gradients_that_come_in_another_layout(device: str) -> None:
    x = leaf(4, 6, device=device)
    region = tools.region_of(lambda x: F.silu(x) * 2)
    for cotangent in (torch.ones((), device=device).expand(4, 6), torch.randn(6, 4, device=device).t()):
        (own,) = torch.autograd.grad(region(x), x, cotangent)
        (other,) = torch.autograd.grad(F.silu(x) * 2, x, cotangent)
        assert torch.allclose(own, other, atol=1e-6)


@on_devices
def test_rows_may_change_without_a_new_derivation(device: str) -> None:
    region = tools.region_of(dropout_add_norm, name="fused_rows")
    known = []
    for rows in (3, 8, 1, 17):
        inputs = [
            leaf(rows, 40, device=device),
            leaf(rows, 40, device=device),
            *(leaf(40, device=device) for _ in range(3)),
        ]
        region(*inputs)
        known.append(region.plans[-1])
    assert known[0].derived is known[1].derived is known[3].derived
    assert known[0].forward_launch.source == known[3].forward_launch.source
    other = tools.region_of(dropout_add_norm, name="fused_rows")
    other(*inputs)
    assert other.plans[-1].derived is known[3].derived  # an equal layer shares it


@on_devices
def test_function_transforms_see_the_ops(device: str) -> None:
    region, x = tools.region_of(lambda x: F.silu(x) * 2), torch.randn(4, 6, device=device)
    gradient = torch.func.grad(lambda x: region(x).sum())(x)
    assert (region.path, region.reason) == ("aten", "a torch.func transform sees the ops")
    assert torch.allclose(gradient, torch.func.grad(lambda x: (F.silu(x) * 2).sum())(x))
    assert torch.func.vmap(region)(x).shape == x.shape


@on_devices
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_and_jit_tracing_see_the_ops(device: str) -> None:
    region, x = tools.region_of(lambda x: F.silu(x) * 2), torch.randn(4, 6, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(region(dual)).tangent
    assert tangent is not None and region.reason == "forward-mode differentiation sees the ops"
    traced = torch.jit.trace(lambda x: region(x), x)
    assert torch.allclose(traced(x + 1), F.silu(x + 1) * 2)
    region(x)
    assert region.path == "triton"


@on_devices
def test_several_outputs_are_a_tuple(device: str) -> None:
    region, x = tools.region_of(lambda x: (x * 2, x + 1)), leaf(4, 6, device=device)
    assert type(region(x)) is tuple
    with torch.no_grad():
        assert type(region(x)) is tuple


@on_devices
def test_a_dispatch_mode_sees_one_op(device: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    region, x = tools.region_of(lambda x, b: F.silu(x + b) * 2), leaf(4, 6, device=device)
    bias = leaf(6, device=device)
    with Names() as seen:
        result = region(x, bias)
        result.backward(torch.ones_like(result))
    assert "fxprec.region_forward.default" in seen.names and "fxprec.region_backward.default" in seen.names
    assert not any("silu" in name for name in seen.names)
    assert torch.allclose(bias.grad, x.grad.sum(0), atol=1e-6)


@on_devices
def test_copies_and_pickles_run(device: str) -> None:
    region, x = tools.region_of(lambda x: F.silu(x) * 2), torch.randn(4, 6, device=device)
    expected = region(x)
    assert torch.equal(copy.deepcopy(region)(x), expected) and region.plans


@on_devices
def test_deterministic(device: str) -> None:
    region = tools.region_of(dropout_add_norm)
    inputs = [leaf(50, 40, device=device), leaf(50, 40, device=device), *(leaf(40, device=device) for _ in range(3))]
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad([o.sum() for o in region(*inputs)], inputs) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)) and region.path == "triton"
    assert "atomic" not in region.source


@on_devices
def test_source_can_be_read(device: str) -> None:
    region = tools.region_of(lambda x, b: F.silu(x + b) * 2, name="fused_add_silu_mul")
    with pytest.raises(RuntimeError, match="no kernels"):
        _ = region.source
    region(leaf(4, 6, device=device), leaf(6, device=device))
    assert "def fused_add_silu_mul(" in region.source and "def fused_add_silu_mul_backward(" in region.source
    assert "sigmoid_" in region.source


# -- where no kernel runs ----------------------------------------------------------------------------------------------

outside = pytest.mark.skipif(kernel_tools.INTERPRETING, reason="wants to be outside of the interpreter")


@outside
def test_on_a_cpu_the_ops_run() -> None:
    region = tools.region_of(dropout_add_norm)
    inputs = [leaf(3, 40), leaf(3, 40), leaf(40), leaf(40), leaf(40)]
    for own, other in zip(region(*inputs), dropout_add_norm(*inputs), strict=True):
        assert torch.equal(own, other)
    reason = "Triton does not run on 'cpu'" if kernel_tools.HAS_TRITON else "Triton is not installed"
    assert (region.path, region.reason) == ("aten", reason)


@outside
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiler_sees_the_ops(backend: str) -> None:
    region = tools.region_of(dropout_add_norm)
    inputs = [leaf(3, 40), leaf(3, 40), leaf(40), leaf(40), leaf(40)]
    compiled = torch.compile(region, fullgraph=True, backend=backend)
    for own, other in zip(compiled(*inputs), dropout_add_norm(*inputs), strict=True):
        assert torch.allclose(own, other, atol=1e-6)


@outside
def test_an_exported_program_holds_the_ops() -> None:
    region = tools.region_of(lambda x: F.silu(x) * 2)
    program = torch.export.export(region, (torch.randn(4, 6),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert names == {"aten.silu.default", "aten.mul.Tensor"}


@outside
def test_symbolic_tracing_sees_one_call_or_asks_for_the_ops() -> None:
    class Outer(torch.nn.Module):
        def __init__(self, call: str) -> None:
            super().__init__()
            self.region = tools.region_of(lambda x: F.silu(x) * 2)
            self.call = call

        def forward(self, x):
            return getattr(self.region, self.call)(x)

    whole, ops = (torch.fx.symbolic_trace(Outer(call)) for call in ("forward", "as_ops"))
    assert [node.op for node in whole.graph.nodes] == ["placeholder", "call_module", "output"]
    assert F.silu in {node.target for node in ops.graph.nodes}
    x = torch.randn(3, 4)
    assert torch.equal(whole(x), ops(x))


@on_devices
def test_a_launch_that_is_declined_is_declined_before_it_is_wanted(device: str) -> None:
    region = tools.region_of(lambda x, b: F.layer_norm(x + b, (3, 4)))
    x, b = leaf(2, 3, 4, device=device), leaf(4, device=device)
    result = region(x, b)
    assert (region.path, region.reason) == ("aten", "a tensor whose columns are not evenly spaced in memory")
    assert torch.equal(result, F.layer_norm(x + b, (3, 4)))


@on_devices
def test_another_device_is_another_plan(device: str) -> None:
    region = tools.region_of(lambda x, y: F.silu(x) * y)
    x = torch.randn(4, 6, device=device)
    region(x, x)
    assert region.path == "triton"
    with pytest.raises((RuntimeError, NotImplementedError)):
        region(x, torch.randn(4, 6, device="meta"))  # the ops themselves say what is wrong
    assert region.reason == "inputs on several devices"
