"""verify: every invariant, broken by hand once, is found and told; what only looks like a break is not."""

from __future__ import annotations

import re

import pytest
import torch
import torch._higher_order_ops.wrap
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, symbolic_trace

import fxprec
from fxprec.passes.graph.annotations import Arrival, Op, Precision, Rule
from fxprec.passes.graph.casts import cast, cast_if_float
from fxprec.passes.graph.text import format_graph
from fxprec.passes.verify import INVARIANTS, check, verify

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ORDER, DTYPES, DECIDED, EDGES, NON_FLOATS, LEAST, FULL, TORCH = [invariant.text for invariant in INVARIANTS]
INPUTS = torch.randn(2, 4), torch.randn(4, 4), torch.arange(4), torch.randn(4).double()


def f(x, w, n, d):
    y = F.linear(x, w)
    return torch.exp(y), y.sum(-1), n + 1, d * 2.0


def rewrite(tools, *inputs, **settings) -> GraphModule:
    """x_bf16, w_bf16, linear, linear_f32, exp, sum_1, add, mul."""
    return tools.rewritten(tools.traced(f, *inputs), tools.context(**settings), until="fuse")


def node(gm: GraphModule, name: str):
    return next(node for node in gm.graph.nodes if node.name == name)


def forget(name: str, key: str):
    return lambda gm: node(gm, name).meta.pop(key)


def annotate(name: str, **fields):
    def change(gm):
        meta = node(gm, name).meta
        meta["precision"] = meta["precision"]._replace(**fields)

    return change


def rewire(reader: str, old: str, new: str):
    return lambda gm: node(gm, reader).replace_input_with(node(gm, old), node(gm, new))


def aim(name: str, target):
    return lambda gm: setattr(node(gm, name), "target", target)


def together(*changes):
    def change(gm):
        for each in changes:
            each(gm)

    return change


def insert(source: str, dtype: torch.dtype, before: str = "output", function=cast):
    """One more cast, read by nobody."""

    def change(gm):
        with gm.graph.inserting_before(node(gm, before)):
            new = gm.graph.call_function(function, (node(gm, source), dtype))
        new.meta = {
            "op": Op("to"),
            "dtype": dtype,
            "precision": Precision.arriving(dtype, dtype, Rule.KEEP, ""),
        }

    return change


LOW_OUTPUT = rewire("output", "exp", "linear")
BREAKS = {
    "no dtype": (forget("exp", "dtype"), DTYPES, "exp", "no dtype", "a dtype, UNKNOWN or NON_TENSOR"),
    "no precision": (
        forget("add", "precision"),
        *(DECIDED, "add", "no precision", "what it reads, computes and puts out"),
    ),
    "low integers": (annotate("add", output=BF16), DECIDED, "add", "bfloat16", "int64 untouched"),
    "low float64": (annotate("mul", output=BF16), DECIDED, "mul", "bfloat16", "float64 untouched"),
    "a low edge": (rewire("exp", "linear_f32", "linear"), EDGES, "exp, argument linear", "bfloat16", "float32"),
    "a wide edge": (rewire("linear", "x_bf16", "x"), EDGES, "linear, argument x", "float32", "bfloat16"),
    "an edge without a dtype": (annotate("linear_f32", output=None), EDGES, "exp, argument linear_f32", "-", "float32"),
    "an integer cast": (insert("n", BF16), NON_FLOATS, "cast", "a cast of int64", "no cast"),
    "a float64 cast": (insert("d", F32), NON_FLOATS, "cast", "a cast of float64", "no cast"),
    "a low output": (LOW_OUTPUT, EDGES, "output, argument linear", "bfloat16", "float32"),
    "a second cast": (insert("x", BF16), LEAST, "cast", "a second cast of x", "one per dtype and mutation epoch"),
    "an idle cast": (insert("exp", F32), LEAST, "cast", "exp is float32 already", "no cast"),
    "low arithmetic": (annotate("exp", compute=BF16), FULL, "exp", "computes in bfloat16", "computes in float32"),
    "a low exp": (
        together(rewire("exp", "linear_f32", "linear"), annotate("exp", reads=BF16)),
        *(FULL, "exp", "reads bfloat16", "a kernel with FP32 inside"),
    ),
    "a half exp": (
        together(annotate("linear_f32", output=F16), annotate("exp", reads=F16)),
        *(FULL, "exp", "reads float16", "a kernel with FP32 inside"),
    ),
    "a wide sum": (
        lambda gm: setattr(node(gm, "sum_1"), "kwargs", {"dtype": torch.float64}),
        *(TORCH, "sum_1", "float64", "float32"),
    ),
    "a low sum": (
        lambda gm: setattr(node(gm, "sum_1"), "kwargs", {}),
        *(FULL, "sum_1", "reads bfloat16", "a kernel with FP32 inside"),
    ),
}  # fmt: skip


#: What torch gives otherwise than stated, where a break is another one too.
ALSO = {
    "a low edge": ("exp", "bfloat16", "float32"),
    "a wide edge": ("linear", "float32", "bfloat16"),
    "an edge without a dtype": ("linear_f32", "float32", "-"),
    "a low exp": ("exp", "bfloat16", "float32"),
    "a half exp": ("linear_f32", "float32", "float16"),
    "a low sum": ("sum_1", "bfloat16", "float32"),
}


def violations(gm: GraphModule, ctx) -> list[tuple[str, ...]]:
    return [(invariant.text, *found) for invariant in INVARIANTS for found in invariant.violations(gm, ctx)]


@pytest.mark.parametrize("case", BREAKS)
def test_a_broken_invariant_is_named(tools, case):
    change, text, where, got, expected = BREAKS[case]
    gm, ctx = rewrite(tools, *INPUTS), tools.context()
    assert violations(gm, ctx) == []
    change(gm)
    also = [(TORCH, *ALSO[case])] if case in ALSO else []
    assert violations(gm, ctx) == [(text, where, got, expected), *also]  # and no other
    told = re.escape(f'"{text}": node {where}: got {got}, expected {expected}. This is a bug in fxprec')
    since = next(invariant.holds_after for invariant in INVARIANTS if invariant.text == text)
    with pytest.raises(fxprec.InvariantError, match="^fuse broke " + told):
        check(gm, ctx, [since], "fuse")
    with pytest.raises(fxprec.InvariantError, match="^verify broke " + told):
        verify(gm, ctx)
    check(
        gm, ctx, [other.holds_after for other in INVARIANTS if other.holds_after not in (since, "verify")], "fuse"
    )  # not yet


def test_a_node_that_reads_what_is_not_there_yet_is_named_before_the_graph_is_run(tools):
    gm = rewrite(tools, *INPUTS)
    node(gm, "linear_f32").prepend(node(gm, "exp"))
    got = "node exp: got its operand linear_f32 behind it, expected operands before it"
    with pytest.raises(fxprec.InvariantError, match=f'^verify broke "{ORDER}": {got}'):
        verify(gm, tools.context())


def test_every_invariant_is_broken_once_and_holds_from_its_pass_on():
    assert {text for _, text, *_ in BREAKS.values()} | {ORDER} == {invariant.text for invariant in INVARIANTS}
    assert {invariant.text: invariant.holds_after for invariant in INVARIANTS} == {
        ORDER: "verify",
        DTYPES: "propagate",
        DECIDED: "decide",
        EDGES: "insert_casts",
        NON_FLOATS: "insert_casts",
        LEAST: "fold_casts",
        FULL: "fuse",
        TORCH: "verify",
    }


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("inputs", [INPUTS, ()], ids=["known", "unknown"])
def test_verify_changes_nothing(tools, inputs, level):
    gm = rewrite(tools, *inputs, level=level)
    before = format_graph(gm)
    result = verify(gm, tools.context(level))
    assert result.gm is gm and not result.changed and format_graph(gm) == before


@pytest.mark.parametrize("function", [cast, cast_if_float])
def test_of_unknown_values_only_casts_that_look_first_are_allowed(tools, function):
    gm = rewrite(tools)
    insert("d", F32, function=function)(gm)
    bad = (NON_FLOATS, "cast", "a cast whatever arrives", "one that looks at run time")
    assert violations(gm, tools.context()) == ([bad] if function is cast else [])


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (together(rewire("output", "exp", "linear"), annotate("output", reads=Arrival.AS_IT_ARRIVES)), {}),  # a body's
        (annotate("exp", compute=BF16), {"level": "O3"}),
        (annotate("exp", compute=F64), {}),
        (annotate("exp", compute=None), {}),
        (annotate("exp", compute=BF16, rule=Rule.FOLLOW), {}),
        (insert("x", F16), {}),  # another dtype
        (insert("x", BF16, function=cast_if_float), {}),  # another cast
        (insert("exp", F32, function=cast_if_float), {}),  # looks at run time
        (together(annotate("linear_f32", output=None), aim("linear_f32", cast_if_float)), {}),
    ],
)
def test_what_is_allowed(tools, change, settings):
    gm = rewrite(tools, *INPUTS)
    change(gm)
    assert violations(gm, tools.context(**settings)) == []


def test_a_norm_with_a_mixed_kernel_may_read_low(tools):
    gm = tools.rewritten(tools.traced(lambda x, w: F.layer_norm(F.linear(x, w), (4,)), *INPUTS[:2]), tools.context())
    assert node(gm, "layer_norm").meta["precision"].reads is BF16
    assert violations(gm, tools.context()) == []
    assert [found[:2] for found in violations(gm, tools.context(device="cuda"))] == [(FULL, "layer_norm")]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (together(rewire("exp", "linear_f32", "linear"), annotate("linear", output=None)), []),
        (annotate("exp_f32", output=None), []),
        (rewire("exp", "linear_f32", "linear"), [(EDGES, "exp, argument linear", "bfloat16", "float32")]),
    ],
)
def test_of_unknown_values_only_what_is_known_can_be_wrong(tools, change, found):
    gm = rewrite(tools)
    change(gm)
    assert violations(gm, tools.context()) == found


@pytest.mark.parametrize(("written", "allowed"), [("mul", True), ("view", True), ("w", False)])
def test_a_write_in_between_allows_a_second_cast(tools, written, allowed):
    gm = tools.traced(lambda x, w: (y := x * 1.0, y.view(-1), F.linear(y, w))[2], *INPUTS[:2])
    tools.rewritten(gm, tools.context())
    with gm.graph.inserting_before(gm.graph.output_node()):
        write = gm.graph.call_method("zero_", (node(gm, written),))
    write.meta = node(gm, written).meta | {"op": Op("zero", in_place=True)}
    insert("mul", BF16)(gm)
    assert violations(gm, tools.context()) == (
        [] if allowed else [(LEAST, "cast", "a second cast of mul", "one per dtype and mutation epoch")]
    )


def test_bodies_are_checked_too(tools):
    graph = Graph()
    x, w = (graph.placeholder(name) for name in "xw")
    x.meta["dtype"] = w.meta["dtype"] = F32
    graph.output(graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr("body"), x, w)))
    gm = GraphModule({"body": symbolic_trace(lambda x, w: F.linear(x, w))}, graph)
    tools.rewritten(gm, tools.context())
    del node(gm.body, "linear").meta["dtype"]
    with pytest.raises(fxprec.InvariantError, match="node linear: got no dtype"):
        verify(gm, tools.context())


def test_outputs_are_low_where_their_dtype_is_not_kept(tools):
    gm = rewrite(tools, *INPUTS, keep_output_dtype=False)
    LOW_OUTPUT(gm)
    assert violations(gm, tools.context(keep_output_dtype=False)) == []
