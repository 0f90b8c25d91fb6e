"""lower="pays": what stays FP32 by costs made by hand, what the report says of it, and that nothing else changes."""

from __future__ import annotations

import copy
import io
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.costs.files import path_of, write
from fxprec.passes.costs.device_costs import Curve, DeviceCosts
from fxprec.passes.placement.mincut import ops_kept_in_fp32, place_by_cut
from fxprec.passes.placement.walk import Walk
from fxprec.testing import assert_precision, format_graph
from made_costs import device

FP32, BF16 = torch.float32, torch.bfloat16


def rate(per_microsecond: float) -> Curve:
    return Curve(((1e-3, 1e-9 / per_microsecond),))


PAYS = device(100.0, 1.0, attention=(100, 1), attention_backward=(100, 1))
LOSES = device(1.0, 100.0, attention=(1, 100), attention_backward=(1, 100))


class Weights(nn.Module):
    """Products by square matrices with a relu between; ``shared``: all by the same."""

    def __init__(self, *widths: int, shared: bool = False) -> None:
        super().__init__()
        sizes = list(zip(widths[1:], widths, strict=False))
        weights = [nn.Parameter(torch.randn(size) / math.sqrt(size[1])) for size in sizes]
        self.names = [f"w{position}" for position in range(len(sizes))]
        for name, weight in zip(self.names, weights, strict=True):
            self.register_parameter(name, weights[0] if shared else weight)

    def forward(self, x):
        for name in self.names:
            x = torch.relu(F.linear(x, getattr(self, name)))
        return x


class Block(nn.Module):
    """A norm, attention and a feed-forward around a residual stream."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Breaks(Weights):
    """One for dynamo: its forward asks a value."""

    def forward(self, x):
        if x.sum() > 1e9:
            x = x + 1
        return super().forward(x)


@pytest.fixture
def lowered(tools):
    """Names of the products that run low, of a traced function, by costs."""

    def run(model, costs, *inputs, level="O1", gradients=False, **settings):
        context = tools.context(level, costs=costs, gradients=gradients, **settings)
        gm = tools.rewritten(tools.traced(model, *inputs), context, until="decide")
        products = [node for node in gm.graph.nodes if "op" in node.meta and node.meta["op"].name == "linear"]
        return [node.name for node in products if node.meta["precision"].compute is BF16], gm

    return run


def products(model):
    """compute dtype -> products and attention."""
    rows = [row for graph in fxprec.report(model).graphs for row in graph.rows]
    return [row.compute for row in rows if row.op in ("linear", "scaled_dot_product_attention", "conv2d")]


# -- the cut -----------------------------------------------------------------------------------------------------------


def test_two_products_pay_together_and_not_alone(lowered):
    costs = device(4.0, 2.0, cast=1.5)
    assert lowered(Weights(4, 4), costs, torch.randn(3, 4))[0] == []  # 2 + 2 * 1.5 > 4
    assert lowered(Weights(4, 4, 4), costs, torch.randn(3, 4))[0] == ["linear", "linear_1"]  # 2 * 2 + 2 * 1.5 < 2 * 4


def test_casts_cost_the_same_when_they_are_placed(tools):
    """A second look at the graph once took it for a body, whose inputs all have gradients."""
    context = tools.context(costs=device(4.0, 2.0, cast=1.5), gradients=True)
    gm = tools.rewritten(tools.traced(Weights(4, 4), torch.randn(3, 4)), context, until="propagate")
    walk = Walk([gm], context)
    verdict = ops_kept_in_fp32(walk)
    (x,) = gm.graph.find_nodes(op="placeholder")
    before = verdict.costs.cast(x)
    place_by_cut(walk, verdict)
    assert verdict.costs.cast(x) == before == 1.5e6


def test_one_large_product_in_a_chain(lowered):
    costs = device(rate(1e5), 1.0, cast=0.5)  # of 8x8 by 8x4096 5.2 us in FP32
    x = torch.randn(8, 8)
    assert lowered(Weights(8, 8, 4096, 8, 8), costs, x)[0] == ["linear_1", "linear_2"]


def test_a_shared_weight_has_one_shadow(lowered):
    """Each product gains 3 * 3 us (the first 6). A shadow costs 12, casts of the input 10 and of the result 20."""
    costs = device(4.0, 1.0, cast=10.0)
    unshared, shared = Weights(4, 4, 4, 4, 4, 4, 4, 4), Weights(4, 4, 4, 4, 4, 4, 4, 4, shared=True)
    assert lowered(unshared, costs, torch.randn(3, 4), gradients=True)[0] == []
    assert len(lowered(shared, costs, torch.randn(3, 4), gradients=True)[0]) == 7


def test_a_weight_that_many_nodes_fetch_has_one_shadow(tools):
    gm = tools.traced(Weights(4, 4, 4, 4, 4, 4, 4, 4, shared=True), torch.randn(3, 4))
    (weight,) = gm.graph.find_nodes(op="get_attr")
    for position, user in enumerate(list(weight.users)[1:], 1):
        gm.register_parameter(f"w{position}", gm.w0)
        with gm.graph.inserting_before(user):
            again = gm.graph.create_node("get_attr", f"w{position}")
        again.meta = dict(weight.meta)
        user.replace_input_with(weight, again)
    tools.rewritten(gm, tools.context(costs=device(4.0, 1.0, cast=10.0)), until="decide")
    computes = [node.meta["precision"].compute for node in gm.graph.nodes if node.name.startswith("linear")]
    assert computes == [BF16] * 7


def test_the_backward_counts_where_gradients_flow(lowered):
    """0.6 us gained a product; two casts of 0.29 in the forward, and 1.2 of them more in the backward."""
    costs = device(4.0, 3.4, cast=0.29)
    x = torch.randn(3, 4)
    assert lowered(Weights(4, 4), costs, x)[0] == ["linear"]
    assert lowered(Weights(4, 4), costs, x, gradients=True)[0] == []
    assert lowered(Weights(4, 4).requires_grad_(False), costs, x, gradients=True)[0] == []
    assert lowered(Weights(4, 4), device(4.0, 3.4, cast=0.2), x, gradients=True)[0] == ["linear"]


def test_an_override_is_obeyed_whatever_it_costs(lowered):
    for override in ({"ops": {"linear": "low"}}, {"nodes": {"linear*": BF16}}, {"where": lambda node: BF16}):
        policy = fxprec.Policy.preset("O1").override(**override)
        assert lowered(Weights(4, 4, 4), LOSES, torch.randn(3, 4), policy=policy)[0] == ["linear", "linear_1"], override
    full = fxprec.Policy.preset("O1").override(nodes={"linear_1": FP32})
    assert lowered(Weights(4, 4, 4), PAYS, torch.randn(3, 4), policy=full)[0] == ["linear"]


def test_safety_is_as_ever(tools):
    def f(x, w):
        return torch.exp(F.linear(x, w)).masked_fill(x > 0, -3.0e38).sum()

    for costs in (PAYS, LOSES):
        gm = tools.traced(f, torch.randn(4, 4), torch.randn(4, 4))
        tools.rewritten(gm, tools.context(costs=costs))
        of_op = {node.meta["op"].name: node.meta["precision"] for node in gm.graph.nodes if "op" in node.meta}
        assert {of_op[name].compute for name in ("exp", "masked_fill", "sum")} == {FP32}


def test_what_has_no_sizes_or_no_price_is_lowered_and_says_so(lowered, tools):
    found, gm = lowered(Weights(4, 4), LOSES)
    (linear,) = (node for node in gm.graph.nodes if node.name == "linear")
    assert found == ["linear"] and linear.meta["precision"].why.endswith("; pays: sizes unknown")
    gm = tools.traced(lambda a: torch.linalg.multi_dot([a, a, a]), torch.randn(4, 4))
    tools.rewritten(gm, tools.context(costs=LOSES), until="decide")
    (dot,) = (node for node in gm.graph.nodes if "multi_dot" in node.name)
    assert dot.meta["precision"].compute is BF16
    assert dot.meta["precision"].why.endswith("; pays: its cost is not modelled")


def test_several_results_have_no_price_and_say_so():
    attention = nn.MultiheadAttention(8, 2)
    model, _ = fxprec.convert(attention, (torch.randn(3, 1, 8),) * 3, lower=LOSES)
    (row,) = [row for row in fxprec.report(model).graphs[0].rows if row.op == "multi_head_attention_forward"]
    assert row.compute == "bfloat16" and row.why.endswith("; pays: its cost is not modelled")


class WrittenLater(Weights):
    """Results of products that are written in place."""

    def forward(self, x):
        for name in self.names:
            x = F.linear(x, getattr(self, name))
            x.view(-1).add_(1.0)
            x.relu_()
        return x


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_result_that_is_written_in_place_has_its_price_too(level, capture):
    for costs, dtype in ((LOSES, "float32"), (PAYS, "bfloat16")):
        original = WrittenLater(4, 4, 8)
        model, _ = fxprec.convert(copy.deepcopy(original), level=level, lower=costs, capture=capture)
        x = torch.randn(3, 4)
        assert torch.equal(model(x), original(x)) is (costs is LOSES)
        assert products(model) == [dtype] * 2


def test_a_result_written_in_fp32_leaves_its_product_the_choice(tools):
    def f(x, w):
        return F.linear(x, w).exp_()

    for costs, dtype in ((LOSES, FP32), (PAYS, BF16)):
        gm = tools.traced(f, torch.randn(4, 4), torch.randn(4, 4))
        tools.rewritten(gm, tools.context(costs=costs))
        of_op = {node.meta["op"].name: node.meta["precision"].compute for node in gm.graph.nodes if "op" in node.meta}
        assert of_op["linear"] is dtype and of_op["exp"] is FP32


def test_a_convolution_with_all_its_arguments_by_name():
    def f(x, w):
        rest = {"padding": [1, 1], "dilation": [1, 1], "output_padding": [0, 0], "groups": 1}
        return torch.convolution(x, w, None, stride=[1, 1], transposed=False, **rest)

    loses = device(1.0, 100.0, thin_convolution=(1, 100))
    model, _ = fxprec.convert(f, (torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)), lower=loses)
    (row,) = [row for row in fxprec.report(model).graphs[0].rows if row.op == "convolution"]
    assert row.why.startswith("pays: convolution 1x3x8x8 * 4x3x3x3 takes 1 us in float32, 100 us in bfloat16")


@pytest.mark.parametrize("written", [Weights, WrittenLater])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_where_all_pay_the_graph_is_that_of_always(tools, level, written):
    graphs = []
    for costs in (None, PAYS):
        gm = tools.traced(written(4, 4, 8), torch.randn(3, 4))
        graphs.append(format_graph(tools.rewritten(gm, tools.context(level, costs=costs))))
    assert graphs[0] == graphs[1] and "bfloat16" in graphs[0]


def test_where_all_pay_casts_are_placed_by_their_bytes(tools):
    """Not by time: a copy in bfloat16 that takes 50 us would stand before the cast."""
    costs = device(100.0, 1.0, pointwise=(1.0, 50.0))
    texts = []
    for each in (None, costs):
        gm = tools.traced(lambda x, w: F.linear(x.repeat(1, 4), w), torch.randn(2, 1), torch.randn(4, 4))
        texts.append(format_graph(tools.rewritten(gm, tools.context(costs=each, gradients=False))))
    assert texts[0] == texts[1] and "%repeat: bfloat16" in texts[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_where_none_pays_nothing_is_cast(level):
    model, _ = fxprec.convert(Block(), (torch.randn(2, 5, 16),), level=level, lower=LOSES)
    assert fxprec.report(model).headline.casts == 0
    assert set(products(model)) == {"float32"}


def test_an_input_at_o2_is_low_only_where_that_pays(tools):
    def f(x, w):
        return F.linear(torch.relu(x), w)

    inputs = torch.randn(3, 4), torch.randn(4, 4)
    for costs, dtype in ((LOSES, FP32), (PAYS, BF16)):
        gm = tools.traced(f, *inputs)
        tools.rewritten(gm, tools.context("O2", costs=costs), until="decide")
        assert [node.meta["precision"].output for node in gm.graph.nodes if "op" in node.meta] == [dtype] * 2


def test_regions_absorb_casts(lowered):
    """Where fused kernels cast what they read and write, only the casts of inputs and results are left to pay for."""
    costs = device(4.0, 3.0, cast=0.9)

    def between(x, w):
        return torch.relu(F.linear(torch.relu(x), w)) * 2.0

    inputs = torch.randn(3, 4), torch.randn(4, 4)
    assert lowered(between, costs, *inputs)[0] == []
    assert lowered(between, device(4.0, 3.0, cast=0.6), *inputs, casts_fuse=True)[0] == ["linear"]
    assert lowered(between, device(4.0, 3.0, cast=0.6), *inputs)[0] == []


# -- convert -----------------------------------------------------------------------------------------------------------


def test_all_fp32_is_the_original_bit_for_bit():
    torch.manual_seed(1)
    original = Block()
    x = torch.randn(2, 5, 16)
    model, _ = fxprec.convert(copy.deepcopy(original), (x,), lower=LOSES)
    expected, got = original(x), model(x)
    assert torch.equal(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    for mine, theirs in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_mixture_is_as_exact_as_autocast():
    """Large products low, small ones and attention FP32: error against float64 at most twice eager autocast's."""
    torch.manual_seed(2)
    original = Block(32)
    x = torch.randn(4, 9, 32)
    costs = device(rate(1e5), 1.0, cast=0.01, attention=(1, 5), attention_backward=(1, 5))
    model, _ = fxprec.convert(copy.deepcopy(original), (x,), lower=costs)
    assert sorted(products(model)) == ["bfloat16"] * 3 + ["float32"] * 2

    def outcome(module, x):
        module.zero_grad()
        out = module(x)
        out.float().square().sum().backward()
        return [out.detach(), *(p.grad for p in module.parameters())]

    truth = outcome(copy.deepcopy(original).double(), x.double())
    with torch.autocast("cpu", dtype=BF16):
        cast = outcome(copy.deepcopy(original), x)
    for ours, theirs, exact in zip(outcome(model, x), cast, truth, strict=True):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + 1e-6 * exact.norm()


def test_the_report_says_why_and_by_which_costs():
    costs = device(rate(1.0), 1.0, cast=0.25)
    model, _ = fxprec.convert(Weights(64, 64, 4), (torch.randn(32, 64),), lower=costs)
    assert products(model) == ["bfloat16", "bfloat16"]
    costs = device(1.5, 1.75, cast=0.25)
    model, _ = fxprec.convert(Weights(64, 192), (torch.randn(32, 64),), lower=costs)
    report = fxprec.report(model)
    (row,) = (row for row in report.graphs[0].rows if row.op == "linear")
    assert (row.compute, row.rule) == ("float32", "full")
    # twice a product (no gradient of the input); casts of the input, the result and its gradient, and the shadow's
    low = 2 * 1.75 + 0.25 + 2 * 0.25 + (0.2 * 0.25 + 0.25)
    assert row.why == (
        f"pays: linear 32x64 @ 64x192 takes 3 us in float32, {low:.3g} us in bfloat16 with its casts "
        "(a machine, 2 threads, made by hand)"
    )
    assert report.headline.costs == "a machine, 2 threads, made by hand, forward and backward: 1 op not worth lowering"
    assert "not worth lowering" in str(report) and report.to_dict()["headline"]["costs"] == report.headline.costs
    assert "because   full: pays: linear 32x64" in fxprec.explain(model, "op:linear")
    assert_precision(model, "op:linear", FP32)
    with pytest.raises(AssertionError, match="pays: linear 32x64 @ 64x192"):
        assert_precision(model, "op:linear", BF16)
    assert fxprec.report(fxprec.convert(Weights(4, 4)).module).headline.costs == ""


def test_a_model_that_only_serves_is_priced_without_a_backward_and_freeze_warns_where_it_was_not():
    """A linear of one row: faster in the low dtype forward, slower with the product of its backward."""
    costs = fxprec.costs.files.shipped("cpu", "a laptop", 2, "none")
    x = torch.randn(1, 512)

    def converted():
        return fxprec.convert(Weights(512, 512).eval(), (x,), lower=costs)[0]

    with torch.inference_mode():
        serves = converted()
    assert products(serves) == ["bfloat16"]
    assert "forward alone" in fxprec.report(serves).headline.costs
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxprec.ServiceWarning)
        fxprec.freeze(serves)
    trains = converted()
    assert products(trains) == ["float32"]
    with pytest.warns(fxprec.ServiceWarning, match=r"convert within torch\.inference_mode\(\)"):
        fxprec.freeze(trains)


def test_a_cast_that_another_op_pays_for_is_not_counted(tools):
    def f(x, large, small):
        return F.linear(x, large).sum(), F.linear(x, small)

    inputs = torch.randn(64, 64), torch.randn(512, 64), torch.randn(2, 64)
    costs = device(rate(1e4), 2.0, cast=3.0)
    gm = tools.traced(f, *inputs)
    tools.rewritten(gm, tools.context(costs=costs, gradients=False), until="decide")
    large, small = (node.meta["precision"] for node in gm.graph.nodes if node.name.startswith("linear"))
    assert (large.compute, small.compute) == (BF16, FP32)
    # 2 us, and casts of its matrix and of its result: x is cast for the other one already
    assert "takes 1.64 us in float32, 8 us in bfloat16 with its casts" in small.why


@pytest.mark.slow
def test_the_bodies_of_checkpointed_regions():
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    x = torch.randn(2, 5, 16)
    for costs, dtype in ((PAYS, "bfloat16"), (LOSES, "float32")):
        model, _ = fxprec.convert(Checkpointed(), (x,), lower=costs)
        assert products(model) == [dtype] * 5
        model(x).sum().backward()


def test_weights_of_checkpointed_bodies_have_shadows_too():
    """Two products gain 2 * 2 us low, casts of the input and of the result cost 3, and no shadow is made anew."""

    plain = {"use_reentrant": False}

    class Checkpointed(Weights):
        def forward(self, x):
            return checkpoint(lambda h: checkpoint(super(Checkpointed, self).forward, h, **plain), x, **plain)

    x = torch.randn(3, 4)
    with torch.no_grad():
        for gain, dtype in ((1.4, "float32"), (2.0, "bfloat16")):
            model, _ = fxprec.convert(Checkpointed(4, 4, 4), (x,), lower=device(4.0, 4.0 - gain, cast=1.5))
            assert products(model) == [dtype] * 2


def test_pays_goes_by_the_costs_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("FXPREC_CACHE_DIR", str(tmp_path))
    x = torch.randn(2, 4)
    model, _ = fxprec.convert(Weights(4, 4), (x,), lower="pays")
    assert "shipped for CPUs" in fxprec.report(model).headline.costs
    here = path_of("cpu")
    write(DeviceCosts("cpu", _processor(), torch.get_num_threads(), "calibrated on 2026-01-02", PAYS.curves), here)
    model, _ = fxprec.convert(Weights(4, 4), (x,), lower="pays")
    assert "calibrated on 2026-01-02" in fxprec.report(model).headline.costs and products(model) == ["bfloat16"]


def _processor() -> str:
    from fxprec.costs.files import processor_name

    return processor_name("cpu")


@pytest.mark.parametrize("capture", ["auto", "symbolic"])
def test_without_inputs_the_first_call_gives_the_sizes(capture):
    costs = device(rate(1e2), 20.0, cast=0.01)  # 2x4 by 4x4: 64 FLOP, 0.64 us; of 512 rows 160 us
    for rows, dtype in ((2, "float32"), (512, "bfloat16")):
        model, _ = fxprec.convert(Weights(4, 4), lower=costs, capture=capture)
        with pytest.raises(fxprec.NotCapturedError, match=r"first call \(lower='pays' asks for sizes\)"):
            fxprec.report(model)
        model(torch.randn(rows, 4))
        assert products(model) == [dtype]
        model(torch.randn(512, 4))
        assert products(model) == [dtype], "the decision stays, and nothing is captured again"


def test_through_dynamo():
    x = torch.randn(2, 4)
    for costs, dtype in ((PAYS, "bfloat16"), (LOSES, "float32")):
        model, _ = fxprec.convert(Weights(4, 4), (x,), lower=costs, capture="dynamo")
        assert products(model) == [dtype]
        model, _ = fxprec.convert(Breaks(4, 4), (x,), lower=costs)
        assert products(model) == [dtype]


def test_sizes_that_dynamo_left_open_are_those_of_the_capture():
    model, _ = fxprec.convert(Weights(4, 4), lower=device(rate(1e2), 20.0, cast=0.01), capture="dynamo")
    x = torch.randn(512, 4)
    torch._dynamo.mark_dynamic(x, 0)
    model(x)
    assert products(model) == ["bfloat16"]


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_gradients_that_are_off_at_the_capture_do_not_count(capture):
    """Forward: 0.6 us gained for two casts. Backward: 0.6 more, for a cast of the result's gradient and the shadow."""
    costs = device(4.0, 3.4, cast=0.29)
    x = torch.randn(2, 4)
    for gradients, dtype in ((False, "bfloat16"), (True, "float32")):
        with torch.set_grad_enabled(gradients):
            model, _ = fxprec.convert(Weights(4, 4), (x,), lower=costs, capture=capture)
        assert products(model) == [dtype]


def test_copies_and_pickles_decide_alike():
    x = torch.randn(2, 4)
    model, _ = fxprec.convert(Weights(4, 4), (x,), lower=LOSES)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), model(x))
        assert products(other) == ["float32"] and "made by hand" in fxprec.report(other).headline.costs


@pytest.mark.slow
def test_the_same_every_time():
    costs = device(rate(1e2), 5.0, cast=1.0)
    x = torch.randn(9, 16)
    texts = {format_graph(fxprec.convert(Block(), (x,), lower=costs).module) for _ in range(3)}
    assert len(texts) == 1


def test_level_o0_changes_nothing():
    model, _ = fxprec.convert(Weights(4, 4), level="O0", lower=PAYS)
    assert products(model) == ["float32"] and fxprec.report(model).headline.costs == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lower": "pay"}, "did you mean 'pays'"),
        ({"lower": "pays", "placement": "autocast"}, "torch.autocast lowers whatever the cost"),
        ({"lower": "pays", "level": "O3"}, "Take level O2 or O1"),
        ({"lower": PAYS, "dtype": torch.float16}, "Give costs of that device and dtype"),
        ({"lower": DeviceCosts("cuda", "a GPU", 0, "by hand", PAYS.curves)}, "DeviceCosts of cuda"),
    ],
)
def test_settings_that_contradict_each_other(settings, words):
    model = Weights(4, 4)
    with pytest.raises(ValueError, match=words):
        fxprec.convert(model, **settings)
    assert type(model) is Weights
