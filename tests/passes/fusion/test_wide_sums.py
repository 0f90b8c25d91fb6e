"""wide_sums: sums and means that read low say what they accumulate in; nothing else changes."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch._higher_order_ops.wrap
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, symbolic_trace

from fxprec.passes.fusion.wide_sums import accumulate_wide
from fxprec.passes.graph.annotations import UNDECIDED, Precision, Rule
from fxprec.passes.graph.text import format_graph

INPUTS = torch.randn(2, 4), torch.randn(4, 4)


def reductions(gm: GraphModule) -> list:
    return [node for node in gm.graph.nodes if "op" in node.meta and node.meta["op"].name in ("sum", "mean")]


def both(x, w):
    y = F.linear(x, w)
    return y.mean(-1), torch.sum(y)


def test_the_graph_after(tools):
    def f(x, w):
        return *both(x, w), F.layer_norm(F.linear(x, w), (4,)), F.linear(x, w).amax(-1)

    gm = tools.rewritten(tools.traced(f, *INPUTS), tools.context(), until="fuse")
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = placeholder
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%linear: bfloat16 = linear(%x_bf16, %w_bf16)
%mean: float32 = mean(%linear, -1, dtype=torch.float32)
%sum_1: float32 = sum(%linear, dtype=torch.float32)
%linear_1: bfloat16 = linear(%x_bf16, %w_bf16)
%layer_norm: bfloat16 = layer_norm(%linear_1, (4), weight=None, bias=None, eps=1e-05)
%linear_2: bfloat16 = linear(%x_bf16, %w_bf16)
%amax: bfloat16 = amax(%linear_2, -1)
%layer_norm_f32: float32 = to(%layer_norm, torch.float32)
%amax_f32: float32 = to(%amax, torch.float32)
return (%mean, %sum_1, %layer_norm_f32, %amax_f32)""",
    )
    assert {node.name: node.meta["fused"] for node in gm.graph.nodes if "fused" in node.meta} == dict.fromkeys(
        ("mean", "sum_1"), "accumulates in FP32 while it reads low"
    )
    assert not accumulate_wide(gm, tools.context()).changed


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, lambda y: y.sum(-1, keepdim=True), lambda y: y.mean((0, 1))])
def test_the_result_is_that_of_an_fp32_copy(tools, reduce, low):
    def f(x, w):
        return reduce(F.linear(x, w))

    inputs = torch.randn(3, 4), torch.randn(64, 4)
    gm = tools.rewritten(tools.traced(f, *inputs), tools.context(low=low), until="insert_casts")
    assert gm(*inputs).dtype is low  # the kernel's own choice, without the keyword
    assert accumulate_wide(gm, tools.context(low=low)).changed
    gm.recompile()
    copied = tools.rewritten(tools.traced(f, *inputs), tools.context(low=low, native_mixed=False))
    assert gm(*inputs).dtype is torch.float32
    assert torch.equal(gm(*inputs), copied(*inputs))


@pytest.mark.parametrize(
    ("given", "after"),
    [
        (None, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_dtype_that_the_user_gave_stays(tools, given, after):
    gm = tools.traced(lambda x, w: F.linear(x, w).sum(-1, dtype=given), *INPUTS)
    tools.rewritten(gm, tools.context(), until="insert_casts")
    assert accumulate_wide(gm, tools.context()).changed is (given is None)
    assert [node.kwargs for node in reductions(gm)] == [{"dtype": after}]


@pytest.mark.parametrize(
    ("inputs", "settings"),
    [
        (INPUTS, {"level": "O0"}),
        (INPUTS, {"level": "O3"}),  # sums are low there
        (INPUTS, {"native_mixed": False}),  # read a copy
        ([value.double() for value in INPUTS], {}),
        ([], {}),  # nobody knows: float64 may arrive
    ],
    ids=["O0", "O3", "copies", "float64", "unknown"],
)
def test_sums_that_do_not_read_low_for_certain_stay(tools, inputs, settings):
    gm = tools.rewritten(tools.traced(both, *inputs), tools.context(**settings), until="insert_casts")
    assert not accumulate_wide(gm, tools.context(**settings)).changed
    assert all("dtype" not in node.kwargs and "fused" not in node.meta for node in reductions(gm))


@pytest.mark.parametrize(("function", "value"), [(torch.mean, torch.randn(3)), (torch.sum, torch.arange(3))])
def test_sums_of_what_was_never_low_stay(tools, function, value):
    gm = tools.rewritten(tools.traced(lambda x: function(x), value), tools.context(), until="insert_casts")
    assert not accumulate_wide(gm, tools.context()).changed
    assert torch.equal(gm(value), function(value))


def test_bodies_of_higher_order_ops(tools):
    graph = Graph()
    x, w = (graph.placeholder(name) for name in "xw")
    for node, value in zip((x, w), INPUTS, strict=True):
        node.meta["dtype"] = value.dtype
    graph.output(graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr("body"), x, w)))
    gm = GraphModule({"body": symbolic_trace(lambda x, w: F.linear(x, w).sum())}, graph)
    tools.rewritten(gm, tools.context(), until="fold_casts")
    assert accumulate_wide(gm, tools.context()).changed
    assert reductions(gm.body)[0].kwargs == {"dtype": torch.float32}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mean", UNDECIDED),
        ("mean", Precision(torch.bfloat16, torch.float32, torch.float64, Rule.FULL, "a test")),
        ("amax", Precision(torch.bfloat16, torch.float32, torch.float32, Rule.FULL, "a test")),  # takes no dtype
    ],
)
def test_a_node_that_is_not_said_to_accumulate_stays(tools, name, precision):
    gm = tools.traced(lambda x, w: getattr(F.linear(x, w), name)(-1), *INPUTS)
    tools.rewritten(gm, tools.context(), until="insert_casts")
    node = next(node for node in gm.graph.nodes if node.name == name)
    node.meta["precision"] = precision
    assert not accumulate_wide(gm, tools.context()).changed and node.kwargs == {}
