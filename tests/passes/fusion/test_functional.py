"""make_functional: in-place row operations become ordinary ones where nobody can see the difference, else they stay."""

from __future__ import annotations

import operator

import expecttest
import pytest
import torch
import torch.nn.functional as F

from fxprec.passes.context import Context
from fxprec.passes.fusion.functional import make_functional
from fxprec.passes.graph.text import format_graph
from fxprec.passes.policy.policy import Policy

X, W = torch.randn(4, 4), torch.randn(4, 4)
REGIONS = Context(torch.bfloat16, Policy.preset("O1"), regions="aten")


def before(tools, function, *inputs, **settings):
    return tools.rewritten(tools.traced(function, *inputs), tools.context(**settings), until="fold_casts")


def written(gm) -> list[str]:
    return [node.name for node in gm.graph.nodes if "op" in node.meta and node.meta["op"].in_place]


def test_the_graph_after(tools):
    def f(x, w):
        y = F.linear(x, w)
        z = y * 2
        y.relu_()
        return y.view(-1) + z.view(-1)

    gm = before(tools, f, X, W)
    assert make_functional(gm, REGIONS).changed
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = placeholder
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%linear: bfloat16 = linear(%x_bf16, %w_bf16)
%mul: bfloat16 = mul(%linear, 2)
%relu_: bfloat16 = relu(%linear)
%view: bfloat16 = view(%relu_, -1)
%view_1: bfloat16 = view(%mul, -1)
%add: bfloat16 = add(%view, %view_1)
%add_f32: float32 = to(%add, torch.float32)
return %add_f32""",
    )
    assert not make_functional(gm, REGIONS).changed


YES = {
    "method": lambda y, x: y.relu_(),
    "function": lambda y, x: torch.relu_(y),
    "flag": lambda y, x: F.relu(y, inplace=True),
    "nn": lambda y, x: F.leaky_relu_(y, 0.2),
    "itself": lambda y, x: y.mul_(y),
    "twice": lambda y, x: y.mul_(0.5).add_(1),
    "mask": lambda y, x: y.masked_fill_(x > 0, 0.5),
    "integers": lambda y, x: y.mul_(torch.arange(4)),
}
NO = {
    "view_before": lambda y, x: (y.view(-1), y.relu_())[0],
    "part": lambda y, x: y[1:].mul_(2),
    "filled": lambda y, x: y.fill_diagonal_(0.0),
    "cast_view": lambda y, x: (y.add_(x), y.view(-1), y.relu_())[1],
    "other_op": lambda y, x: y.cumsum_(0),
    "dropout": lambda y, x: F.dropout(y, 0.0, True, True),
}


@pytest.mark.parametrize("function", YES.values(), ids=YES.keys())
def test_rewritten(tools, function):
    def f(x, w):
        y = F.linear(x, w)
        earlier = y * 3
        function(y, x)
        return y * 2, earlier, y

    gm, plain = before(tools, f, X, W), before(tools, f, X, W)
    assert written(gm) and make_functional(gm, REGIONS).changed and not written(gm)
    gm.graph.lint()
    gm.recompile()
    for own, other in zip(gm(X, W), plain(X, W), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("function", NO.values(), ids=NO.keys())
def test_left(tools, function):
    def f(x, w):
        y = F.linear(x, w)
        return function(y, x), y

    gm = before(tools, f, X, W)
    text = format_graph(gm)
    assert written(gm) and not make_functional(gm, REGIONS).changed and format_graph(gm) == text


@pytest.mark.parametrize(
    "function",
    [lambda x, w: x.relu_() + 1, lambda x, w: x.view(-1).add_(1), lambda x, w: x.chunk(2)[0].add_(1)],
    ids=["argument", "view", "part"],
)
def test_memory_of_others(tools, function):
    gm = before(tools, function, X, W)
    assert not make_functional(gm, REGIONS).changed and written(gm)


def test_a_view_after_the_last_write_sees_it(tools):
    def f(x, w):
        y = F.linear(x, w)
        y.relu_()
        return F.linear(y.flatten(), w.flatten()), F.linear(F.dropout(y, 0.5, False), w)

    gm = before(tools, f, X, W)
    assert make_functional(gm, REGIONS).changed
    flatten = next(node for node in gm.graph.nodes if node.name == "flatten")
    assert flatten.args[0].name == "relu_"


def test_operators(tools):
    gm, plain = (tools.traced(lambda x, w: F.linear(x, w) + 2, X, W) for _ in range(2))
    add = next(node for node in gm.graph.nodes if node.name == "add")
    add.target = operator.iadd
    tools.rewritten(gm, tools.context(), until="fold_casts")
    assert written(gm) == ["add"] and make_functional(gm, REGIONS).changed and add.target is operator.add
    gm.recompile()
    assert torch.equal(gm(X, W), tools.rewritten(plain, tools.context())(X, W))


def test_a_cast_before_the_write_is_a_copy(tools):
    def f(x, w):
        y = F.linear(x, w)
        earlier = y.exp()  # reads FP32
        y.relu_()
        return earlier + y

    gm, plain = before(tools, f, X, W), before(tools, f, X, W)
    assert "linear_f32" in {node.name for node in gm.graph.nodes} and make_functional(gm, REGIONS).changed
    gm.recompile()
    assert torch.equal(gm(X, W), plain(X, W))


def test_not_across_a_mode(tools):
    """A write below ``no_grad`` is not recorded; a value made there would have no history."""
    gm = tools.traced(lambda x, w: F.linear(x, w).relu_() + 1, X, W)
    relu = next(node for node in gm.graph.nodes if node.name == "relu_")
    with gm.graph.inserting_before(relu):
        gm.graph.call_function(torch._C._set_grad_enabled, (False,)).meta["dtype"] = "-"
    gm = tools.rewritten(gm, tools.context(), until="fold_casts")
    assert not make_functional(gm, REGIONS).changed


def test_then_they_join_a_region(tools):
    gm = tools.rewritten(
        tools.traced(lambda x, w: F.linear(F.linear(x, w).relu_() + 1, w), X, W), tools.context(regions="aten"), "fuse"
    )
    assert [node.name for node in gm.graph.nodes if node.op == "call_module"] == ["fused_relu_add"]
