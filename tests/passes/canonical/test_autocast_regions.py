"""autocast_regions: a region in the low dtype is ours to decide, one in another dtype runs as it is written."""

from __future__ import annotations

import expecttest
import pytest
import torch
from torch.fx import Graph, GraphModule

from fxprec.passes import canonicalize as canonical
from fxprec.passes.canonical.autocast_regions import resolve_autocast_regions
from fxprec.passes.context import PassResult
from fxprec.passes.graph.text import format_graph
from fxprec.passes.torch_internals import enter_autocast, exit_autocast

F16, BF16 = torch.float16, torch.bfloat16


def canonicalize(gm, context) -> PassResult:
    """What the pipeline begins with."""
    passes = (resolve_autocast_regions, canonical.canonicalize)
    return PassResult(gm, any([step(gm, context).changed for step in passes]))


def built(*parts) -> GraphModule:
    """``%a = neg(%x)``, then regions as (dtype, what is in it, ...) and calls by name, each of what came before.

    A dtype alone, None or False is for a CPU; (device type, dtype) for another one.
    """
    graph = Graph()
    value = graph.call_method("neg", (graph.placeholder("x"),))

    def add(part):
        nonlocal value
        if isinstance(part, str):
            value = graph.call_method(part, (value,))
            return
        first, *inner = part
        device, dtype = first if isinstance(first, tuple) else ("cpu", first)
        entered = graph.call_function(enter_autocast, (device, dtype or None, dtype is not False, None))
        for each in inner:
            add(each)
        graph.call_function(exit_autocast, (entered,))

    for part in parts:
        add(part)
    graph.output(value)
    return GraphModule({}, graph)


def marks(gm: GraphModule) -> dict[str, object]:
    return {node.name: node.meta["autocast"] for node in gm.graph.nodes if "autocast" in node.meta}


def test_a_region_in_another_dtype_becomes_a_body(tools):
    gm = built("relu", (F16, "tanh", "sigmoid"), "abs")
    assert canonicalize(gm, tools.context()).changed
    gm.graph.lint()
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: - = placeholder
%neg: - = neg(%x)
%relu: - = relu(%neg)
%autocast_0: - = get_attr[autocast_0]
%wrap_with_autocast: - = higher_order::wrap_with_autocast('cpu', torch.float16, True, None, %autocast_0, %relu)
%getitem: - = getitem(%wrap_with_autocast, 0)
%abs_1: - = abs(%getitem)
return %abs_1""",
    )
    expecttest.assert_expected_inline(
        format_graph(gm.autocast_0),
        """\
%relu: - = placeholder
%tanh: - = tanh(%relu)
%sigmoid: - = sigmoid(%tanh)
return (%sigmoid)""",
    )
    assert marks(gm) == {} and {*marks(gm.autocast_0).values()} == {F16}


@pytest.mark.parametrize(("region", "expected"), [
    ((BF16, "tanh"), {"tanh": BF16}),
    ((None, "tanh"), {"tanh": BF16}),  # which is a CPU's default
    ((False, "tanh"), {"tanh": False}),
    ((BF16, "tanh", (False, "sigmoid"), "abs"), {"tanh": BF16, "sigmoid": False, "abs_1": BF16}),
    ((False, (BF16, "tanh")), {"tanh": BF16}),
    ((("cuda", F16), "tanh"), {}),
    ((BF16, (("cuda", F16), "tanh")), {"tanh": BF16}),
    ((BF16, (("cuda", False), "tanh")), {"tanh": False}),  # which is meant, whatever it runs on
], ids=str)  # fmt: skip
def test_a_region_in_the_low_dtype_is_marked(region, expected, tools):
    gm = built(region, "relu")
    assert canonicalize(gm, tools.context()).changed
    assert marks(gm) == expected and not gm.graph.find_nodes(op="get_attr")


@pytest.mark.parametrize(("region", "context"), [
    ((BF16, "tanh"), {"level": "O0"}),
    ((BF16, "tanh", "made_up"), {}),
    ((BF16, "tanh", "inverse"), {}),
    ((BF16, (F16, "tanh")), {}),
], ids=str)  # fmt: skip
def test_it_runs_as_it_is_written_where_that_is_not_ours(region, context, tools):
    gm = built(region, "relu")
    canonicalize(gm, tools.context(**context))
    assert [str(node.target) for node in gm.graph.find_nodes(op="get_attr")] == ["autocast_0"]


def test_regions_within_are_bodies_of_bodies(tools):
    gm = built((F16, "tanh", (False, "sigmoid"), (BF16, "sin")), (F16, "cos"))
    canonicalize(gm, tools.context())
    inner, second = gm.autocast_0, gm.autocast_1
    assert {*marks(inner.autocast_0).values()} == {False} and {*marks(inner.autocast_1).values()} == {BF16}
    assert [node.target for node in second.graph.nodes if node.op == "call_method"] == ["cos"]
    x = torch.rand(3)
    torch.testing.assert_close(gm(x), (-x).tanh().sigmoid().sin().cos())


@pytest.mark.parametrize("dtype", [BF16, False], ids=str)
def test_a_region_of_another_device_type_does_nothing_in_one_that_runs_as_it_is_written(dtype, tools):
    gm = built((F16, "tanh", (("cuda", dtype), "sigmoid")))
    canonicalize(gm, tools.context())
    assert {*marks(gm.autocast_0.autocast_0).values()} == {F16}


def test_an_empty_region_goes(tools):
    gm = built((F16,), "relu")
    assert canonicalize(gm, tools.context()).changed
    assert [node.target for node in gm.graph.nodes if node.op.startswith("call")] == ["neg", "relu"]


def test_autocast_is_left_where_the_body_fails(tools):
    gm = built((F16, "made_up"))
    canonicalize(gm, tools.context())
    gm.recompile()
    with pytest.raises(AttributeError, match="made_up"):
        gm(torch.ones(1))
    assert not torch.is_autocast_enabled("cpu")
