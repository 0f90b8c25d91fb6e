"""split_bias: biases that join a region, those that stay, and how a split is undone."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F

from fxprec.passes.fusion.split_bias import put_back, split_biases
from fxprec.passes.graph.text import format_graph

X, W, B = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)


def before(tools, function, *inputs, **settings):
    return tools.rewritten(tools.traced(function, *inputs), tools.context(**settings), until="fold_casts")


def gelu_of_linear(x, w, b):
    return F.gelu(F.linear(x, w, b)) * 2


def test_the_graph_after(tools):
    gm = before(tools, gelu_of_linear, X, W, B)
    text = format_graph(gm)
    (split,) = split_biases(gm.graph)
    gm.graph.lint()
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = placeholder
%b: float32 = placeholder
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%b_bf16: bfloat16 = to(%b, torch.bfloat16)
%linear: bfloat16 = linear(%x_bf16, %w_bf16, None)
%b_bf16_joined: bfloat16 = to(%b, torch.bfloat16)
%add: bfloat16 = add(%linear, %b_bf16_joined)
%gelu: bfloat16 = gelu(%add)
%mul: bfloat16 = mul(%gelu, 2)
%mul_f32: float32 = to(%mul, torch.float32)
return %mul_f32""",
    )
    gone = put_back(gm.graph, split)
    assert format_graph(gm) == text and {node.name for node in gone} == {"add", "b_bf16_joined"}


IMAGE, KERNEL, CHANNELS = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4)
YES = {
    "keyword": (lambda x, w, b: F.linear(x, w, bias=b).relu(), (X, W, B)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w).relu(), (X, W, B)),
    "view": (lambda x, w, b: torch.addmm(b, x, w).view(2, 2, 8).relu(), (X, W, B)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b).relu(), (IMAGE, KERNEL, CHANNELS)),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b).relu(), (IMAGE[..., 0], KERNEL[..., 0], CHANNELS)),
    "two_readers": (lambda x, w, b: (lambda y: y.relu() + y.tanh())(F.linear(x, w, b)), (X, W, B)),
}
NO = {
    "none": (lambda x, w, b: F.linear(x, w).relu() + b, (X, W, B)),
    "matmul_reads": (lambda x, w, b: F.linear(F.linear(x, w, b), w), (X, W, B)),
    "also_a_view_reads": (lambda x, w, b: (lambda y: (y.relu(), y.t()))(F.linear(x, w, b)), (X, W, B)),
    "only_a_cast": (lambda x, w, b: F.linear(x, w, b), (X, W, B)),
    "scaled": (lambda x, w, b: torch.addmm(b, x, w, beta=0.5).relu(), (X, W, B)),
    "matrix": (lambda x, w, b: torch.addmm(x, x, w).relu(), (X, W, B)),
    "other_last": (lambda x, w, b: F.linear(x, w, b).view(8, 4).relu(), (X, W, B)),
    "double": (lambda x, w, b: F.linear(x, w, b).relu(), (X.double(), W.double(), B.double())),
}


@pytest.mark.parametrize(("function", "inputs"), YES.values(), ids=YES.keys())
def test_split(tools, function, inputs):
    gm, plain = before(tools, function, *inputs), before(tools, function, *inputs)
    assert len(split_biases(gm.graph)) == 1
    gm.graph.lint()
    gm.recompile()
    for own, other in zip(gm(*inputs), plain(*inputs), strict=True):
        assert own.dtype is other.dtype and torch.allclose(own, other, atol=0.1)  # rounded once more


@pytest.mark.parametrize(("function", "inputs"), NO.values(), ids=NO.keys())
def test_left(tools, function, inputs):
    gm = before(tools, function, *inputs)
    text = format_graph(gm)
    assert not split_biases(gm.graph) and format_graph(gm) == text


def test_a_bias_of_unknown_dtype_stays(tools):
    """float64 may arrive: its cast would have to look."""
    assert not split_biases(before(tools, lambda x, w, b: F.linear(x, w, b) + 1).graph)


def fused(tools, function, *inputs, **settings):
    return tools.rewritten(tools.traced(function, *inputs), tools.context(regions="triton", **settings), until="fuse")


def test_two_products_with_one_bias(tools):
    """One joins a region, the other does not, and reads its cast still."""

    def f(x, w, b):
        y = F.gelu(F.linear(x, w, b)).relu()
        z = F.linear(x, w, b)
        return y, F.layer_norm(z, (8,)), F.layer_norm(z, (4, 8))

    gm = fused(tools, f, X, W, B)
    text = format_graph(gm)
    assert "%linear: bfloat16 = linear(%x_bf16, %w_bf16, None)" in text
    assert "%linear_1: bfloat16 = linear(%x_bf16, %w_bf16, %b_bf16)" in text
    assert "%fused_bias_gelu_relu: float32 = fused_region(%b, %linear)" in text
    for own, other in zip(gm(X, W, B), f(X, W, B), strict=True):
        assert torch.allclose(own, other, atol=0.2)


def test_both_of_two_products_with_one_bias(tools):
    gm = fused(tools, lambda x, w, b: F.linear(x, w, b).relu() @ (F.linear(x, w, b).t().relu() + 1), X, W, B)
    gm.graph.lint()
    gm = fused(tools, lambda x, w, b: F.linear(F.linear(x, w, b).relu() * 2, w, b).relu() * 3, X, W, B)
    assert "b_bf16" not in {node.name for node in gm.graph.nodes}
    assert [node.name for node in gm.graph.nodes if node.op == "call_module"] == [
        "fused_bias_relu_mul", "fused_bias_relu_mul_1",
    ]  # fmt: skip


def test_without_its_region_a_bias_goes_back(tools):
    plain = tools.rewritten(tools.traced(gelu_of_linear, X, W, B), tools.context(device="cuda"), until="fuse")
    gm = fused(tools, gelu_of_linear, X, W, B, device="cuda", region_choices=(("fused_bias*", False),))
    assert format_graph(gm) == format_graph(plain)


def test_a_bias_that_is_written_goes_back(tools):
    def f(x, w, b):
        y = F.gelu(F.linear(x, w, b)) * 2
        b.add_(1)
        return y

    assert "%b_bf16" in format_graph(fused(tools, f, X, W, B))


def test_in_fp32_there_is_no_cast(tools):
    gm = before(tools, gelu_of_linear, X, W, B, level="O0")
    (split,) = split_biases(gm.graph)
    assert split.add.args[1].name == "b"
    put_back(gm.graph, split)
    assert "b" in {node.name for node in gm.graph.find_nodes(op="placeholder")}
