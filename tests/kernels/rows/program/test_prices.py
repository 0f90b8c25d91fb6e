"""What regions are priced at, op by op and as loops, by prices that are made by hand; and what a call does then."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import region_tools as tools
from fxprec.kernels.cpu import compiled_attention
from fxprec.kernels.rows.program.layout import spec_of
from fxprec.kernels.rows.program.prices import MORE_STEPS, LoopPrices, count, is_faster_by_torch, seconds
from fxprec.kernels.rows.run import region as region_module
from fxprec.kernels.rows.run.derive import make_plan
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.costs.device_costs import Curve

FULL, LOW = torch.float32, torch.bfloat16
FIRST, SECOND = torch.randn(8, 16, dtype=LOW), torch.randn(8, 16, dtype=LOW)
ROW = torch.randn(16, dtype=LOW)
N = 8.0 * 16


class Rate:
    """``call`` seconds, and ``rate`` for each element."""

    def __init__(self, call: float, rate: float) -> None:
        self.call, self.rate = call, rate

    def __call__(self, elements: float) -> float:
        return self.call + self.rate * (elements if elements > 1 else 0.0)


def prices(loop: float = 0.0) -> LoopPrices:
    """An element of ``x * y`` takes 1 by torch (its gradients 2 each), in a loop 3 (``loop``: a call besides).

    FP32 takes ten times as long. A step in a loop takes 0.25, an exp 5, a tanh 6, an erf 7; by torch 2, 4, and 3.
    """
    rates = {"plain": 1.0, "exp": 2.0, "tanh": 4.0, "erf": 3.0, "norm": 5.0}
    of_low = {kernel: Rate(0, rate) for kernel, rate in rates.items()}
    of_full = {kernel: Rate(0, 10 * rate) for kernel, rate in rates.items()}
    stepped = {
        step: Rate(loop, 3 + MORE_STEPS[step] * each)
        for step, each in {"plain": 0.25, "exp": 5.0, "tanh": 6.0, "erf": 7.0}.items()
    }
    trained_low = {"plain": Rate(0, 5), "norm": Rate(0, 12)}
    trained_full = {"plain": Rate(0, 50), "norm": Rate(0, 120)}
    return LoopPrices(
        {FULL: of_full, LOW: of_low}, {FULL: trained_full, LOW: trained_low},
        {FULL: Rate(loop, 30), LOW: Rate(loop, 3)}, Rate(1000.0, 0), Rate(1007.0, 0), stepped,
    )  # fmt: skip


def priced(function: Callable[..., Any], *inputs: Tensor) -> tuple[float, float]:
    gm = tools.graph_of(function)
    plan = make_plan("fused", gm, [spec_of(x) for x in inputs], tools.CPU, {}, True)
    return seconds(gm, plan.programs, plan.layout.rows * plan.layout.columns, prices())


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (lambda x, y: (x + y) * y, 1 + 1),
        (lambda x, y: F.silu(x) * y, 2 + 1),
        (lambda x, y: F.gelu(x) * y, 3 + 1),
        (lambda x, y: F.gelu(x, approximate="tanh") * y, 4 + 1),
        (lambda x, y: F.mish(x) * y, 8 + 1),
        (lambda x, y: F.layer_norm(x + y, (16,)), 1 + 5),
        (lambda x, y: F.rms_norm(x + y, (16,)), 1 + 5),
        (lambda x, y: F.dropout(x, 0.0) * y, 1),
        (lambda x, y: x.float() + y.float(), 10 + 10 + 10),
        (lambda x, y: (x * y).sum(-1), 1 + 1),
    ],
)
def test_op_by_op_a_forward_takes_its_kernels(function: Any, ops: float) -> None:
    assert priced(function, FIRST, SECOND)[0] == pytest.approx(ops * N)


@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (lambda x, y: x * y, 1 + 2 * 2),
        (lambda x, y: (x + y) * y, 1 + 1 + 2 * 2),  # the gradients of a sum are its own
        (lambda x, y: x.relu() * y, 1 + 2 + 1 + 2 * 2),
        (lambda x, y: F.silu(x) * y, 2 + 2 + 1 + 1 + 2 * 2),
        (lambda x, y: F.layer_norm(x + y, (16,)), 1 + 12),
        (lambda x, y: x.float() + y, 10 + 20 + 10 + 20),  # a cast of each gradient
    ],
)
def test_in_training_the_kernels_of_gradients_too(function: Any, ops: float) -> None:
    assert priced(function, leaf(FIRST), leaf(SECOND))[0] == pytest.approx(ops * N)


@pytest.mark.parametrize(
    ("function", "inputs", "accesses", "steps"),
    [
        (lambda x, y: x * y, (FIRST, SECOND), {LOW: 3}, {"plain": 1}),
        (lambda x, y: (x + y) * y, (FIRST, SECOND), {LOW: 3}, {"plain": 2}),
        (lambda x, y: torch.exp(x) + torch.erf(x) * torch.tanh(y), (FIRST, SECOND), {LOW: 3},
         {"plain": 2, "exp": 1, "tanh": 1, "erf": 1}),
        (lambda x, y: x.float() * y, (FIRST, SECOND), {LOW: 2, FULL: 1}, {"plain": 1}),
        (lambda x, y: x * y, (FIRST, ROW), {LOW: 2}, {"plain": 2}),  # a row is read from the cache
        # exp(x) and its sum; the second pass reads x again, and what it kept of exp(x)
        (lambda x: F.softmax(x * 2.0, -1), (FIRST,), {LOW: 2}, None),
    ],
)  # fmt: skip
def test_what_a_loop_does_for_an_element(function: Any, inputs: Any, accesses: Any, steps: Any) -> None:
    counts = count(tools.plan_of(function, *inputs).derived.forward)
    assert counts.accesses == Counter(accesses)
    if steps is not None:
        assert counts.steps == Counter(steps)
    else:
        assert counts.steps["exp"] == 1 and counts.steps["plain"] >= 5


def test_a_loop_takes_a_call_and_what_it_does_for_each_element() -> None:
    assert priced(lambda x, y: (x + y) * y, FIRST, SECOND)[1] == pytest.approx((3 + 2 * 0.25) * N)
    _, trained = priced(lambda x, y: x * y, leaf(FIRST), leaf(SECOND))
    assert trained == pytest.approx(1000 + (3 + 0.25) * N + (5 + 2 * 0.25) * N)
    _, summed = priced(lambda x, y: x * y, leaf(FIRST), leaf(ROW))  # a partial sum is read, added to and written
    assert summed == pytest.approx(1007 + (2 + 2 * 0.25) * N + (3 + (1 + 2 + 2) * 0.25) * N)


def test_a_node_is_torchs_where_its_kernel_takes_less_time_than_its_part_of_a_loop() -> None:
    def node(function: Callable[[Tensor], Tensor]) -> Any:
        return [*tools.graph_of(function).graph.nodes][1]

    assert is_faster_by_torch(node(lambda x: F.silu(x)), prices())  # 2 and 5
    assert not is_faster_by_torch(node(lambda x: torch.neg(x)), prices())  # 1 and 0.25
    assert is_faster_by_torch(node(lambda x: F.gelu(x)), prices())
    assert not is_faster_by_torch(node(lambda x: F.layer_norm(x, (16,))), prices())


@pytest.mark.skipif(bool(compiled_attention.why_not()), reason=compiled_attention.why_not())
def test_a_call_goes_the_way_that_takes_less_time_and_says_why() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return ((x + y) * y - x) * x * y

    def path(loop: float) -> tuple[str, str]:
        region = tools.region_of(function, kernels="loops", prices=prices(loop))
        region(FIRST, SECOND)
        return region.path, region.reason

    assert path(0.0) == ("loops", "")  # 5 and 4.25
    assert path(10 * N) == ("aten", "op by op takes 6.4e+08 us, a loop 1.82e+09 us, by the device's costs")


@pytest.mark.skipif(bool(compiled_attention.why_not()), reason=compiled_attention.why_not())
def test_what_is_too_dear_is_remembered_for_its_size_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, row: Tensor) -> Tensor:
        return ((x + row) * row - x) * x * row

    region = tools.region_of(function, kernels="loops", prices=prices(10 * N))
    small, wide = torch.randn(4, 16).to(LOW), torch.randn(400, 16).to(LOW)
    row = torch.randn(16).to(LOW)

    def ways(*inputs: Tensor) -> tuple[str, Tensor]:
        result = region(*inputs)
        torch.testing.assert_close(result, function(*inputs), rtol=0.05, atol=0.05)
        return region.path, result

    assert ways(small, row)[0] == "aten"
    assert ways(wide, row)[0] == "loops" and region.reason == ""
    asked: list[Any] = []
    looked = region_module._why_ops
    monkeypatch.setattr(region_module, "_why_ops", lambda inputs: asked.append(inputs) or looked(inputs))
    assert ways(small, row)[0] == "aten" and region.reason.startswith("op by op takes") and not asked
    assert ways(wide, row)[0] == "loops" and len(asked) == 1
    assert ways(leaf(small), row)[0] == "aten" and len(asked) == 2  # it is trained: another question
    assert ways(leaf(small), row)[0] == "aten" and len(asked) == 2
    with torch.no_grad():
        assert ways(leaf(small), row)[0] == "aten" and len(asked) == 2
    assert not copy.deepcopy(region)._slower_sizes and region.__getstate__()["_slower_sizes"] == {}


@pytest.mark.skipif(bool(compiled_attention.why_not()), reason=compiled_attention.why_not())
def test_whoever_looks_into_what_is_too_dear_sees_its_ops() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return ((x + y) * y - x).exp() * y

    region = tools.region_of(function, kernels="loops", prices=prices(1e9))
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    region(x, y)
    assert region._slower_sizes
    close = torch.testing.assert_close
    close(torch.func.vmap(region)(x, y), function(x, y))
    close(torch.func.grad(lambda x: region(x, y).sum())(x), torch.func.grad(lambda x: function(x, y).sum())(x))
    close(torch.func.jvp(region, (x, y), (y, x)), torch.func.jvp(function, (x, y), (y, x)))
    traced = torch.fx.symbolic_trace(_Around(region))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "placeholder", "call_module", "output"]
    close(torch.compile(_Around(region), backend="eager", fullgraph=True)(x, y), function(x, y))
    made = make_fx(region)(x, y)
    assert "exp" in made.code and "region_forward" not in made.code
    scripted = torch.jit.trace(_Around(region), (x, y))
    close(scripted(y, x), function(y, x))


def test_what_is_too_dear_for_fake_tensors_is_not_so_for_proxies() -> None:
    region = tools.region_of(lambda x, y: ((x + y) * y - x).exp() * y, kernels="loops", prices=prices(1e9))
    with FakeTensorMode():
        region(torch.randn(4, 16), torch.randn(4, 16))
    assert region.reason.startswith("op by op takes")
    traced = torch.fx.symbolic_trace(_Around(region))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "placeholder", "call_module", "output"]


def test_sizes_of_one_input_are_not_taken_for_those_of_another() -> None:
    region = tools.region_of(lambda x, y: (x + y) * y - x, kernels="loops", prices=prices(1e5))

    def remembered(x: tuple[int, ...], y: tuple[int, ...]) -> set[Any]:
        region(torch.randn(x), torch.randn(y))
        assert region.path == "aten"
        return {tuple(shape) for shape, _ in region._slower_sizes}

    assert remembered((4, 16), (1, 16)) == {(4, 16)}
    assert remembered((2, 16), (1, 16)) == {(4, 16), (2, 16)}
    # Had it kept these, a call with x (400, 4, 16) and y (4, 16) would be taken for a small one.
    assert remembered((1, 8), (2, 8)) == {(2, 8)}


class _Around(torch.nn.Module):
    def __init__(self, region: FusedRegion) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.region(x, y)


def test_prices_are_copied_and_saved_with_a_region() -> None:
    region = tools.region_of(lambda x: -x, kernels="loops", prices=prices())
    assert copy.deepcopy(region).prices is region.prices
    curve = Curve(((1.0, 2.0),))
    region.prices = LoopPrices({}, {}, {}, curve, curve, {})
    assert pickle.loads(pickle.dumps(region)).prices == region.prices
