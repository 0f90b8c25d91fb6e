"""Prices of ops from their shapes, against torch's own count of FLOP; casts, shadows and traffic."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from fxprec.passes.costs.device_costs import Curve, DeviceCosts, Work
from fxprec.passes.costs.op_costs import OpCosts, Price

FP32, BF16 = torch.float32, torch.bfloat16
RATE = {Work.CONVOLUTION_BACKWARD: 2, Work.THIN_CONVOLUTION_BACKWARD: 2, Work.CAST: 1000}


def per_unit(picoseconds: float) -> Curve:
    return Curve(((1e-3, picoseconds * 1e-15),))


def device(low: float = 0.5) -> DeviceCosts:
    """A picosecond a FLOP in FP32, ``low`` of it in bfloat16; memory costs nothing; a cast 1000 ps an element."""
    full = {work: per_unit(RATE.get(work, 1)) for work in Work if work is not Work.ROW} | {Work.STREAM: per_unit(1e-6)}
    return DeviceCosts("cpu", "test", 1, "by hand", {FP32: full, BF16: _lowered(full, low)})


def _lowered(full: dict[Work, Curve], low: float) -> dict[Work, Curve]:
    return {work: curve if work is Work.CAST else curve.faster(1 / low) for work, curve in full.items()}


class Weighted(nn.Module):
    """``function(x, weight)``."""

    def __init__(self, function, *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.function(x, self.weight)


class Chain(nn.Module):
    """Products with matrices of their own, and a relu behind."""

    def __init__(self, first: bool = True, second: bool = True) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 4), requires_grad=first)
        self.second = nn.Parameter(torch.randn(4, 4), requires_grad=second)

    def forward(self, x):
        return torch.relu(F.linear(F.linear(x, self.first), self.second))


@pytest.fixture
def prices(tools):
    """node name -> what OpCosts says of it, for a traced function."""

    def run(function, *inputs, gradients=True, costs=None):
        gm = tools.rewritten(tools.traced(function, *inputs), tools.context(), until="propagate")
        of_ops = OpCosts(costs or device(), tools.context(gradients=gradients))
        of_ops.enter(gm.graph)
        return (
            of_ops,
            {node.name: node for node in gm.graph.nodes},
            of_ops.price,
        )

    return run


PRODUCTS = {
    "linear": (F.linear, (3, 4, 5), (7, 5)),
    "linear_vector": (F.linear, (5,), (7, 5)),
    "matmul": (torch.matmul, (3, 4, 5), (5, 6)),
    "matmul_many": (torch.matmul, (2, 3, 4, 5), (2, 3, 5, 6)),
    "mm": (torch.mm, (4, 5), (5, 6)),
    "bmm": (torch.bmm, (3, 4, 5), (3, 5, 6)),
    "addmm": (lambda x, w: torch.addmm(torch.zeros(6), x, w), (4, 5), (5, 6)),
    "baddbmm": (lambda x, w: torch.baddbmm(torch.zeros(3, 4, 6), x, w), (3, 4, 5), (3, 5, 6)),
    "einsum": (lambda x, w: torch.einsum("bthd, bshd -> bhts", x, w), (2, 3, 4, 5), (2, 6, 4, 5)),
    "conv1d": (F.conv1d, (2, 16, 9), (6, 16, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, weight=w, stride=2, padding=1), (2, 16, 9, 9), (6, 16, 3, 3)),
    "conv2d_grouped": (lambda x, w: F.conv2d(x, w, groups=8), (2, 16, 9, 9), (8, 2, 3, 3)),
    "conv_transpose2d": (F.conv_transpose2d, (2, 16, 5, 5), (16, 9, 3, 3)),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("gradients", [False, True])
def test_products_cost_the_flop_that_torch_counts(prices, name, gradients):
    function, shape, weight = PRODUCTS[name]
    model = Weighted(function, *weight)
    x = torch.randn(shape)
    _, nodes, price = prices(model, x, gradients=gradients)
    (found,) = [each for node in nodes.values() if isinstance(each := price(node), Price)]
    with FlopCounterMode(display=False) as counter:
        out = model(x)
        if gradients:
            out.sum().backward()
    counted = counter.get_total_flops()
    if name == "conv2d_grouped" and gradients:  # its count of a backward forgets the groups
        counted = 2 * (2 * out.numel() * 2 * 9)
    assert found.full == counted
    assert found.low == pytest.approx(found.full / 2, abs=1)


def test_both_operands_have_gradients_where_both_ask_for_one(prices):
    for flags, times in (((True, True), (2, 3)), ((True, False), (2, 2)), ((False, True), (1, 2))):
        _, nodes, price = prices(Chain(*flags), torch.randn(3, 4))
        assert tuple(price(nodes[name]).full for name in ("linear", "linear_1")) == tuple(96 * each for each in times)


def test_attention_costs_its_two_products(prices):
    def attend(x, w):
        return F.scaled_dot_product_attention(w, x, x)

    shape = (2, 3, 8, 16)
    model = Weighted(attend, 2, 3, 8, 16)
    x = torch.randn(shape)
    _, nodes, price = prices(model, x, gradients=False)
    (found,) = [each for node in nodes.values() if isinstance(each := price(node), Price)]
    assert found.full == sdpa_flop_count(shape, shape, shape) and found.what == "attention of 2x3x8x16 over 2x3x8x16"
    _, nodes, price = prices(model, x)
    (trained,) = [each for node in nodes.values() if isinstance(each := price(node), Price)]
    assert trained.full == 2 * found.full


def test_few_channels_are_another_kind_of_convolution(prices):
    costs = device()
    thin = {**costs.curves[FP32], Work.THIN_CONVOLUTION: per_unit(7)}
    costs = DeviceCosts("cpu", "test", 1, "by hand", {FP32: thin, BF16: costs.curves[BF16]})
    for channels, times in ((7, 7), (8, 1)):
        model = Weighted(F.conv2d, 2, channels, 3, 3)
        _, nodes, price = prices(model, torch.randn(1, channels, 5, 5), gradients=False, costs=costs)
        (found,) = [each for node in nodes.values() if isinstance(each := price(node), Price)]
        assert found.full == times * 2 * 2 * 9 * channels * 9


def test_what_nobody_can_price(prices, tools):
    _, nodes, price = prices(Weighted(F.linear, 4, 4))
    assert price(nodes["linear"]) == "sizes unknown"
    _, nodes, price = prices(Weighted(lambda x, w: torch.einsum("...i,ji", x, w), 4, 4), torch.randn(2, 4))
    assert price(nodes["einsum"]) == "sizes unknown"
    _, nodes, price = prices(lambda a, b: torch.linalg.multi_dot([a, b, a]), torch.randn(4, 4), torch.randn(4, 4))
    assert price(nodes["linalg_multi_dot"]) == "its cost is not modelled"


def test_casts_forward_and_backward(prices):
    model = Chain()
    for gradients, times in ((False, 1), (True, 2)):
        costs, nodes, _ = prices(model, torch.randn(3, 4), gradients=gradients)
        assert costs.cast(nodes["x"]) == 12_000, "no gradient flows to an input"
        assert costs.cast(nodes["relu"]) == 12_000 * times


def test_a_shadow_is_refreshed_with_all_others_and_its_gradient_is_cast_alone(prices):
    model = Chain(second=False)
    costs, nodes, _ = prices(model, torch.randn(3, 4))
    trained, frozen = (node for node in nodes.values() if node.op == "get_attr")
    refresh = 16_000 - 1000 + 200  # its bytes, and a fifth of a call
    assert (costs.cast(trained), costs.cast(frozen)) == (refresh + 16_000, refresh)
    costs, nodes, _ = prices(model, torch.randn(3, 4), gradients=False)
    assert [costs.cast(node) for node in nodes.values() if node.op == "get_attr"] == [0, 0], "made once, and kept"


def test_traffic_is_what_fp32_costs_more(prices):
    costs, nodes, _ = prices(lambda x: torch.relu(x).view(-1), torch.randn(6, 4))
    assert costs.traffic(nodes["relu"]) == 24 - 12
    assert costs.traffic(nodes["view"]) == 0
