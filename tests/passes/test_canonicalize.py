"""canonicalize: one name for every op, and no in-place write left whose dtype could matter."""

from __future__ import annotations

import inspect
import operator

import expecttest
import pytest
import torch
import torch._higher_order_ops.wrap
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

from fxprec.errors import PolicyError
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes import canonicalize as canonical
from fxprec.passes.canonical.autocast_regions import resolve_autocast_regions
from fxprec.passes.context import PassResult
from fxprec.passes.graph.annotations import arg_nodes
from fxprec.passes.graph.subgraphs import every_graph, subgraphs
from fxprec.passes.graph.text import format_graph
from fxprec.passes.policy.policy import Policy

ATEN = torch.ops.aten
ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
BF16 = torch.bfloat16


def canonicalize(gm, context) -> PassResult:
    """What the pipeline begins with."""
    passes = (resolve_autocast_regions, canonical.canonicalize)
    return PassResult(gm, any([step(gm, context).changed for step in passes]))


def built(build, inputs: str = "xy") -> GraphModule:
    """The graph that ``build(graph, *placeholders)`` makes; what it returns is the output."""
    graph = Graph()
    graph.output(build(graph, *map(graph.placeholder, inputs)))
    return GraphModule({}, graph)


def one_call(target, *args, **kwargs) -> GraphModule:
    """One call; "x" and "y" among the arguments are placeholders, a target that is a string is a method."""

    def build(graph, x, y):
        def nodes(value):
            return {"x": x, "y": y}[value] if isinstance(value, str) else value

        kind = "call_method" if isinstance(target, str) else "call_function"
        return graph.create_node(kind, target, tuple(map(nodes, args)), {k: nodes(v) for k, v in kwargs.items()})

    return built(build)


def the_call(gm: GraphModule):
    (node,) = gm.graph.output_node().all_input_nodes
    return node


def spelled(value) -> str | None:
    """The name of a call's target, for test ids."""
    return getattr(value[0], "__name__", str(value[0])) if isinstance(value, tuple) else None


def ops(gm: GraphModule) -> list[str]:
    found = [node.meta["op"] for node in gm.graph.nodes if "op" in node.meta]
    return [op.name + "_" * op.in_place for op in found]


def test_the_graph_after(tools):
    def build(graph, x, y):
        a = graph.call_function(F.linear, (x, y))
        view = graph.call_method("view", (a, -1))
        b = graph.call_method("exp_", (a,))
        region = graph.call_function(ENTER, ("cpu", None, False, None))
        c = graph.call_function(torch.mul, (b, 2.0))
        graph.call_function(EXIT, (region,))
        return c, view

    gm, plain = built(build), built(build)
    assert canonicalize(gm, tools.context()).changed
    gm.graph.lint()
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: - = placeholder
%y: - = placeholder
%linear: - = linear(%x, %y)
%view: - = view(%linear, -1)
%exp: - = exp(%linear)
%copy_: - = copy_(%linear, %exp)
%mul: - = mul(%copy_, 2.0)
return (%mul, %view)""",
    )
    inputs = torch.randn(2, 3), torch.randn(3, 3)
    for ours, theirs in zip(gm.forward(*inputs), plain(*inputs), strict=True):  # the view sees the write
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (("exp_", "x"), "exp"),
        ((torch.exp_, "x"), "exp"),
        ((ATEN.exp_.default, "x"), "exp"),
        (("pow_", "x", 2.0), "pow"),
        (("__ipow__", "x", 2.0), "pow"),
        ((operator.ipow, "x", 2.0), "pow"),
        ((ATEN.pow_.Scalar, "x", 2.0), "pow"),  # its twin is pow.Tensor_Scalar, not pow.Scalar
        (("addmm_", "x", "y", "y"), "addmm"),
        ((torch.relu_, "x"), "relu"),
        ((F.relu, "x", True), "relu"),
        ((F.elu, "x", 0.5, True), "elu"),
        ((F.elu_, "x", 0.5), "elu"),
        (("tanh_", "x"), "tanh"),
    ],
    ids=spelled,
)
def test_low_and_full_in_place_ops_become_a_copy(tools, call, name):
    policy = Policy.preset("O1").override(ops={"relu": "full", "elu": "low", "tanh": BF16})
    gm, plain = one_call(*call), one_call(*call)
    the_call(gm).meta["stack_trace"] = "model.py"
    assert canonicalize(gm, tools.context(policy=policy)).changed
    gm.recompile()
    reads_input = name in ("pow", "elu")  # in its backward: of a copy, since the input is overwritten
    assert ops(gm) == [*(["clone"] if reads_input else []), name, "copy_"]
    assert all(new.meta["stack_trace"] == "model.py" for new in gm.graph.nodes if "op" in new.meta)
    ours, y = torch.rand(3, 3) - 0.5, torch.rand(3, 3)
    theirs = ours.clone()
    assert gm(ours, y) is ours and plain(theirs, y) is theirs
    assert torch.equal(ours, theirs)
    written, value = the_call(gm), the_call(gm).args[1]
    written.replace_all_uses_with(value)
    gm.graph.erase_node(written)
    gm.recompile()
    assert torch.equal(gm(ours, y), plain(theirs.clone(), y)) and torch.equal(ours, theirs)  # only the copy writes


def test_a_keyword_flag_goes_too(tools):
    gm = one_call(F.relu, "x", inplace=True)
    assert canonicalize(gm, tools.context(policy=Policy.preset("O1").override(ops={"relu": "full"}))).changed
    assert ops(gm) == ["relu", "copy_"] and the_call(gm).args[1].kwargs == {}


@pytest.mark.parametrize("op", ["exp_", "pow_", "sinh_", "erfinv_", "sqrt_", "log1p_", "reciprocal_", "logit_"])
def test_gradients_flow_through_the_copy(tools, op):
    def f(x):
        return getattr((x * 0.2 + 0.5).t(), op)(*([2] if op == "pow_" else [])).sum()

    gm = symbolic_trace(f)
    canonicalize(gm, tools.context())
    gm.recompile()
    ours, theirs = (torch.linspace(-1, 1, 5).requires_grad_() for _ in range(2))
    gm(ours).backward()
    f(theirs).backward()
    assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("call", "name", "level"),
    [
        (("relu_", "x"), "relu_", "O1"),
        (("add_", "x", "y"), "add_", "O1"),
        ((operator.iadd, "x", "y"), "add_", "O1"),
        (("copy_", "x", "y"), "copy_", "O1"),
        ((operator.setitem, "x", 0, "y"), "setitem_", "O1"),
        ((torch.exp, "x"), "exp", "O1"),
        (("exp_", "x"), "exp_", "O0"),
        ((print, "x"), None, "O1"),  # nobody's op
    ],
    ids=spelled,
)
def test_what_follows_promotes_or_converts_stays(tools, call, name, level):
    policy = Policy.preset(level).override(ops={"copy": "full", "setitem": "full"})
    gm = one_call(*call)
    before = str(gm.graph)
    assert not canonicalize(gm, tools.context(policy=policy)).changed
    assert (ops(gm), str(gm.graph)) == ([name] if name else [], before)


def test_an_in_place_function_without_a_twin_is_refused(tools):
    policy = Policy.preset("O1").override(ops={"zero": "full"})
    for function in (torch.zero_, lambda x: x.zero_()):
        with pytest.raises(PolicyError, match="'zero', which writes in place"):
            canonicalize(symbolic_trace(lambda x: function(x)), tools.context(policy=policy))  # noqa: B023


@pytest.mark.parametrize("target", [torch.exp, ATEN.exp.out])
def test_out_becomes_a_copy(tools, target):
    gm = one_call(target, "x", out="y")
    assert canonicalize(gm, tools.context()).changed
    gm.recompile()
    assert ops(gm) == ["exp", "copy_"] and the_call(gm).args[1].kwargs == {}
    x, y = torch.randn(3), torch.empty(3)
    assert gm(x, y) is y and torch.equal(y, x.exp())
    assert not canonicalize(one_call(torch.exp, "x", out=None), tools.context()).changed


def test_every_out_of_several_by_itself(tools):
    def build(graph, x, v, i):
        both = graph.call_function(torch.max, (x, 1), {"out": (v, i)})
        both.meta["stack_trace"] = "model.py"
        first, second = (graph.call_function(operator.getitem, (both, part)) for part in range(2))
        return first, second, graph.call_method("add", (first, 1.0))

    gm = built(build, "xvi")
    assert canonicalize(gm, tools.context()).changed
    gm.graph.lint()
    gm.recompile()
    assert ops(gm) == ["max", "getitem", "copy_", "getitem", "copy_", "add"]
    assert [node.name for node in gm.graph.nodes if "stack_trace" not in node.meta] == ["x", "v", "i", "add", "output"]
    x, values, indices = torch.randn(2, 3), torch.empty(2), torch.empty(2, dtype=torch.int64)
    first, second, more = gm(x, values, indices)
    assert first is values and second is indices
    assert torch.equal(values, x.amax(1)) and torch.equal(indices, x.argmax(1)) and torch.equal(more, values + 1.0)


def test_imatmul_makes_a_new_tensor(tools):
    gm = one_call(operator.imatmul, "x", "y")
    assert canonicalize(gm, tools.context()).changed
    assert ops(gm) == ["matmul"] and the_call(gm).target is operator.matmul


FLAGGED = {
    name: list(inspect.signature(function).parameters).index("inplace")
    for name, function in vars(F).items()
    if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters and name[0] != "_"
}


@pytest.mark.parametrize("name", FLAGGED)
@pytest.mark.parametrize("flag", [True, False])
def test_every_inplace_flag_of_torch_is_seen_by_position(tools, name, flag):
    gm = one_call(getattr(F, name), "x", *[0.5] * (FLAGGED[name] - 1), flag)
    canonicalize(gm, tools.context("O0"))
    assert ops(gm) == [name + "_" * flag]


@pytest.mark.parametrize(
    ("target", "name", "rest", "moved"),
    [
        (torch.relu_, "input", {}, True),
        (ATEN.add_.Tensor, "self", {"other": "y"}, True),
        (torch.transpose, "input", {"dim0": 0, "dim1": 1}, True),
        (torch.relu, "input", {}, False),
    ],
)
def test_views_and_in_place_ops_take_their_tensor_by_position(tools, target, name, rest, moved):
    gm = one_call(target, **{name: "x"}, **rest)
    assert canonicalize(gm, tools.context()).changed is moved
    node = the_call(gm) if "other" not in rest else list(gm.graph.nodes)[2]
    assert [arg.name for arg in node.args] == ["x"] * moved
    assert [*node.kwargs] == [name] * (not moved) + [*rest]


@pytest.mark.parametrize(
    ("regions", "disabled"),
    [([False], True), ([True], False), ([None], False), ([False, True], False), ([True, False], True)],
)
@pytest.mark.parametrize("keyword", [True, False])
def test_the_innermost_autocast_region_counts(tools, regions, disabled, keyword):
    def build(graph, x, y):
        before = graph.call_method("neg", (x,))
        entered = []
        for enabled in regions:  # None: left out, which means enabled
            args, kwargs = ((), {"enabled": enabled}) if keyword else ((enabled,), {})
            args, kwargs = ((), {}) if enabled is None else (args, kwargs)
            entered.append(graph.call_function(ENTER, ("cpu", None, *args), kwargs))
        inside = graph.call_method("neg", (before,))
        for region in reversed(entered):
            graph.call_function(EXIT, (region,))
        return graph.call_method("neg", (inside,))

    gm = built(build)
    assert canonicalize(gm, tools.context()).changed
    before, inside, after = (node for node in gm.graph.nodes if node.op.startswith("call"))
    assert inside.meta.get("autocast", True) is not disabled
    assert "autocast" not in before.meta and "autocast" not in after.meta


def test_bodies_of_higher_order_ops(tools):
    gm = symbolic_trace(lambda x: x.exp_())
    for calls in (1, 2):
        graph = Graph()
        value = graph.placeholder("x")
        for _ in range(calls):
            value = graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr("body"), value))
        graph.output(value)
        gm = GraphModule({"body": gm}, graph)
    assert [graph.graph for graph in subgraphs(gm)] == [gm.body.graph]  # once, though called twice
    assert [graph.graph for graph in every_graph(gm)] == [gm.graph, gm.body.graph, gm.body.body.graph]
    assert canonicalize(gm, tools.context()).changed
    assert ops(gm.body.body) == ["exp", "copy_"]
    assert not canonicalize(gm, tools.context()).changed  # nothing left to do


def test_bodies_and_regions_in_the_order_of_the_graph():
    def negated():
        return symbolic_trace(lambda x: (-x,))

    region = FusedRegion("fused_neg", negated(), 0, 0, "aten")
    root = nn.ModuleDict(
        {"last": region, "first": FusedRegion("fused_neg", negated(), 0, 0, "aten"), "body": negated()}
    )
    root["layer"] = nn.Linear(4, 4)  # a module, and no graph
    graph = Graph()
    x = graph.placeholder("x")
    for name in ("first", "body", "layer", "last", "first"):
        if name == "body":
            x = graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr("body"), x))
        else:
            x = graph.call_module(name, (x,))
    graph.output(x)
    with graph.inserting_before(x):  # made last, and still not the last of the graph
        graph.get_attr("body")
    gm = GraphModule(root, graph)
    expected = [gm.first.graph_module.graph, gm.body.graph, gm.last.graph_module.graph]
    assert [sub.graph for sub in subgraphs(gm)] == expected


def test_ports_of_nested_arguments():
    graph = Graph()
    a, b, c, d = map(graph.placeholder, "abcd")
    node = graph.call_function(torch.add, ((a, [b, 1]), slice(None, c)), {"out": {"key": d}, "alpha": a})
    assert [*arg_nodes(node)] == [(0, a), (0, b), (1, c), ("out", d), ("alpha", a)]


def test_a_cast_to_a_type_by_name_is_one_to_the_tensor_that_has_it(tools):
    """The name stays where others read it."""

    def function(x, y):
        name = y.type()
        return x.type(name), x.type(dtype=name, non_blocking=True)

    def with_others(x, y):
        name = y.type()
        return x.type(name), name

    for traced, lines in (
        (function, ["%type_2 = to(%x, %y)", "%type_3 = to(%x, %y, non_blocking=True)"]),
        (with_others, ["%type_1 = type(%y)", "%type_2 = to(%x, %y)"]),
    ):
        gm = symbolic_trace(traced)
        assert canonicalize(gm, tools.context()).changed
        found = [(node.name, node.target, *map(str, node.args)) for node in gm.graph.nodes if node.op == "call_method"]
        assert [f"%{name} = {target}(%{', %'.join(args)}" for name, target, *args in found] == [
            line.removesuffix(")").removesuffix(", non_blocking=True") for line in lines
        ]
        assert not canonicalize(gm, tools.context()).changed
