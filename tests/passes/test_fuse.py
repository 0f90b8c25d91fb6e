"""fuse: regions in the graph, their names and choices; converted models that have some."""

from __future__ import annotations

import copy
import io
import json

import expecttest
import pytest
import torch
import torch._higher_order_ops.wrap
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

import fxprec
from fxprec.errors import ConversionError, PolicyError
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.fuse import fuse, region_names
from fxprec.passes.graph.text import format_graph

X, W, B = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)


def fused(tools, function, *inputs, regions="aten", **settings):
    ctx = tools.context(regions=regions, **settings)
    return tools.rewritten(tools.traced(function, *inputs), ctx, until="fuse")


def calls(gm) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "call_module"]


def block(x, w, b):
    h = F.linear(x, w, b)
    y = x + F.dropout(h, 0.5)
    return y, F.linear(F.layer_norm(y, (8,)), w)


def test_the_graph_after(tools):
    gm = fused(tools, block, X, W, B)
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = placeholder
%b: float32 = placeholder
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%b_bf16: bfloat16 = to(%b, torch.bfloat16)
%linear: bfloat16 = linear(%x_bf16, %w_bf16, %b_bf16)
%fused_dropout_add_layer_norm: (float32, bfloat16) = fused_region(%linear, %x)
%add: float32 = getitem(%fused_dropout_add_layer_norm, 0)
%layer_norm_bf16: bfloat16 = getitem(%fused_dropout_add_layer_norm, 1)
%linear_1: bfloat16 = linear(%layer_norm_bf16, %w_bf16)
%linear_1_f32: float32 = to(%linear_1, torch.float32)
return (%add, %linear_1_f32)""",
    )


def test_the_graph_after_with_kernels(tools):
    gm = fused(tools, block, X, W, B, regions="triton", gradients=False)
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = placeholder
%b: float32 = placeholder
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%linear: bfloat16 = linear(%x_bf16, %w_bf16, None)
%draw_seeds_like: int64 = draw_seeds(%b, 1)
%fused_bias_dropout_add_layer_norm: (float32, bfloat16) = fused_region(%b, %linear, %x, %draw_seeds_like)
%add: float32 = getitem(%fused_bias_dropout_add_layer_norm, 0)
%layer_norm_bf16: bfloat16 = getitem(%fused_bias_dropout_add_layer_norm, 1)
%linear_1: bfloat16 = linear(%layer_norm_bf16, %w_bf16)
%linear_1_f32: float32 = to(%linear_1, torch.float32)
return (%add, %linear_1_f32)""",
    )
    expecttest.assert_expected_inline(
        format_graph(gm.fused_bias_dropout_add_layer_norm.graph_module),
        """\
%b: float32 = placeholder
%linear: bfloat16 = placeholder
%x: float32 = placeholder
%b_bf16_joined: bfloat16 = to(%b, torch.bfloat16)
%add_1: bfloat16 = add(%linear, %b_bf16_joined)
%dropout: bfloat16 = dropout(%add_1, p=0.5, training=True, inplace=False)
%add: float32 = add(%x, %dropout)
%layer_norm: float32 = layer_norm(%add, (8), weight=None, bias=None, eps=1e-05)
%layer_norm_bf16: bfloat16 = to(%layer_norm, torch.bfloat16)
return (%add, %layer_norm_bf16)""",
    )


def test_a_returned_value_is_read_by_another_kernel(tools):
    """Where gradients are recorded: the results of one kernel are not on each other's path."""
    lines = format_graph(fused(tools, block, X, W, B, regions="triton")).splitlines()
    assert [line for line in lines if "fused" in line] == [
        "%fused_bias_dropout_add: float32 = fused_region(%b, %linear, %x, %draw_seeds_like)",
        "%fused_layer_norm: bfloat16 = fused_region(%fused_bias_dropout_add)",
        "%linear_1: bfloat16 = linear(%fused_layer_norm, %w_bf16)",
        "return (%fused_bias_dropout_add, %linear_1_f32)",
    ]


def test_a_chain_of_returned_values_is_a_kernel_each(tools):
    def function(x, w, b):
        h = F.gelu(F.linear(x, w, b))
        y = torch.tanh(h) * 2
        return F.linear(y, w), h, y

    gm = fused(tools, function, X, W, B, regions="triton")
    regions = [node for node in gm.graph.nodes if node.op == "call_module"]
    assert len(regions) == 2
    assert regions[0] in regions[1].all_input_nodes
    assert len(calls(fused(tools, function, X, W, B, regions="triton", gradients=False))) == 1


@pytest.mark.parametrize("regions", ["triton", "loops", ""])
def test_a_kernel_reads_what_is_returned(tools, regions):
    """A loss and a norm that could read the low value read its cast where that is returned."""

    def function(x, w, b):
        logits = F.linear(x, w, b)
        norm = F.silu(F.group_norm(logits, 2))
        return F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)), F.linear(norm, w), logits

    gm = fused(tools, function, X, W, B, regions=regions)
    returned = gm.graph.output_node().args[0][2]
    for name in ("cross_entropy", "group_norm"):
        reader = next(node for node in gm.graph.nodes if name in node.name)
        (read,) = [node for node in reader.all_input_nodes if "linear" in node.name]
        assert read is returned or read.all_input_nodes == [returned]


def test_a_second_time_changes_nothing(tools):
    gm = fused(tools, block, X, W, B)
    text = format_graph(gm)
    assert not fuse(gm, tools.context(regions="aten")).changed and format_graph(gm) == text


def test_without_regions_nothing_forms(tools):
    assert calls(fused(tools, block, X, W, B, regions="")) == []


def test_equal_regions_are_numbered(tools):
    def f(x, w):
        for _ in range(3):
            x = F.linear(x, w).relu() * 2
        return x

    assert calls(fused(tools, f, X, W)) == ["fused_relu_mul", "fused_relu_mul_1", "fused_relu_mul_2"]


def test_names_that_are_taken(tools):
    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.fused_relu_mul = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x.relu() * self.fused_relu_mul

    assert calls(fused(tools, Taken(), X)) == ["fused_relu_mul_1"]


def test_seeds_are_drawn_before_all_that_take_some(tools):
    """What the first region reads depends on the last."""

    def f(x, z, w):
        a = F.linear(x, w).relu()
        b = a * 2
        c = F.dropout(a.transpose(0, 1).relu(), 0.5)
        d = F.linear(F.dropout(z + 1, 0.5), w)
        return c, b + d

    gm = fused(tools, f, X, X, W, regions="triton")
    names = [node.name for node in gm.graph.nodes]
    assert names.index("draw_seeds_like") < min(map(names.index, calls(gm)))
    regions = [module for module in gm.children() if isinstance(module, FusedRegion) and module.draws]
    assert sorted(region.seed for region in regions) == [0, 1]
    seeds = next(node for node in gm.graph.nodes if node.name == "draw_seeds_like")
    assert seeds.args[1] == 2 and len(seeds.users) == 2
    gm(X, X, W)


def test_a_mean_that_reads_low_gives_fp32(tools):
    def f(x, w):
        return F.linear(x, w) - F.linear(x, w).mean(-1, keepdim=True)

    gm, plain = fused(tools, f, X, W), fused(tools, f, X, W, regions="")
    assert calls(gm) and torch.equal(gm(X, W), plain(X, W))


def test_bodies_of_higher_order_ops(tools):
    graph = Graph()
    x, w = (graph.placeholder(name) for name in "xw")
    for node, value in zip((x, w), (X, W), strict=True):
        node.meta["dtype"] = value.dtype
    graph.output(graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr("body"), x, w)))
    gm = GraphModule({"body": symbolic_trace(lambda x, w: F.linear(x, w).relu() * 2)}, graph)
    tools.rewritten(gm, tools.context(regions="aten"), until="fuse")
    assert region_names(gm) == ["fused_relu_mul"] and calls(gm.body) == ["fused_relu_mul"]
    assert torch.allclose(gm(X, W), F.linear(X, W).relu() * 2, atol=0.2)


# -- converted models --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x):
        return x + F.silu(self.down(self.norm(F.gelu(self.up(x)))) * 2)


class Breaking(Net):
    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y.relu() * 2


class Quiet(nn.Module):
    """Gradients are off for a while."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        y = self.up(x) * 2
        with torch.no_grad():
            z = y.relu() + 1
        return z * y


def converted(model=None, **settings):
    torch.manual_seed(0)
    return fxprec.convert(model or Net(), (X,), **settings).module


def regions(model) -> list[str]:
    return [region.name for graph in fxprec.report(model).graphs for region in graph.regions]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [Net, Breaking, Quiet])
def test_values_and_gradients_are_those_without_regions(make, level):
    results = []
    for choice in ("aten", "auto"):
        torch.manual_seed(0)
        model = converted(make(), fuse=choice, level=level)
        model(X).sum().backward()
        results.append([model(X), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


def test_single_regions_by_name():
    every = regions(converted(fuse="aten"))
    assert every == ["fused_gelu_layer_norm", "fused_mul_silu_add"]
    assert regions(converted(fuse={"*gelu*": False})) == every[1:]
    assert regions(converted(fuse={"*": False, "fused_mul*": True})) == every[1:]
    model = converted(fuse={"*": False})
    assert regions(model) == [] and any("fuse says no" in reason for reason in fxprec.report(model).graphs[0].declined)


def test_a_pattern_that_names_no_region():
    model = Net()
    with pytest.raises(PolicyError, match=r"'\*glu\*' names no region.*fused_mul_silu_add"):
        fxprec.convert(model, (X,), fuse={"*glu*": False})
    assert type(model) is Net


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fuse": "aten", "level": "O0"}, "bit for bit"),
        ({"fuse": "aten", "executor": "inductor"}, "fuses by itself"),
        ({"fuse": {"*": False}, "level": "O0"}, "bit for bit"),
        ({"fuse": True, "dtype": torch.float16}, "are of bfloat16"),
    ],
)
def test_where_there_can_be_no_regions(settings, says):
    with pytest.raises(ConversionError, match=says):
        fxprec.convert(Net(), **settings)


@pytest.mark.parametrize("value", ["triton", 1, None, {"*": "yes"}, {1: True}])
def test_choices_that_are_none(value):
    with pytest.raises(ValueError, match="fuse="):
        fxprec.convert(Net(), fuse=value)


def test_o0_and_inductor_have_no_regions():
    assert regions(fxprec.convert(Net(), fuse="auto", level="O0").module) == []
    assert regions(fxprec.convert(Net(), fuse="auto", executor="inductor").module) == []


def test_copies_and_saved_models_have_the_same_regions():
    model = converted(fuse={"*gelu*": False})
    expected, every = model(X), regions(model)
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        assert torch.equal(other(X), expected) and regions(other) == every
    assert model.state_dict().keys() == Net().state_dict().keys()


def test_revert_leaves_nothing():
    model = converted(fuse="aten")
    model(X)
    fxprec.revert(model)
    assert type(model) is Net and not any(isinstance(module, FusedRegion) for module in model.modules())


def test_the_report_sees_inside():
    model = converted(fuse="aten")
    report = fxprec.report(model)
    rows = {row.node: row for graph in report.graphs for row in graph.rows}
    assert rows["gelu"].region == "fused_gelu_layer_norm" and rows["gelu"].kind == "op"
    assert rows["fused_gelu_layer_norm"].kind == "region"
    assert "fused_gelu_layer_norm" in str(report.nodes)
    assert json.dumps(report.to_dict())
    fxprec.testing.assert_precision(model, "norm", torch.float32)
    with pytest.raises(AssertionError):
        fxprec.testing.assert_precision(model, "norm", torch.bfloat16)
    assert "gelu" in str(fxprec.explain(model, "gelu"))
