"""fold_casts: idle casts go and the values stay; what rounds, copies or shares memory is left alone."""

from __future__ import annotations

import copy

import expecttest
import pytest
import torch
import torch._higher_order_ops.wrap
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

from fxprec.passes.fold_casts import fold_casts
from fxprec.passes.graph.annotations import graph_notes
from fxprec.passes.graph.casts import CASTS, cast, cast_saturating
from fxprec.passes.graph.text import format_graph
from fxprec.passes.runner import run_passes
from fxprec.passes.verify import verify

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def run(gm, inputs):
    """Results and inputs after a call on copies of the inputs."""
    inputs = copy.deepcopy(inputs)
    results = gm(*inputs)
    return [*(results if isinstance(results, tuple) else (results,)), *inputs]


@pytest.fixture
def folded(tools):
    """Fold a traced function: the same bits as before, nothing left to do a second time."""

    def fold(function, *inputs, **settings):
        inputs = inputs or (torch.randn(2, 4), torch.randn(4, 4))
        ctx = tools.context(**settings)
        before = tools.rewritten(tools.traced(function, *inputs), ctx, until="insert_casts")
        gm = tools.rewritten(tools.traced(function, *inputs), ctx, until="insert_casts")
        changed = fold_casts(gm, ctx).changed
        assert changed is (format_graph(gm) != format_graph(before))
        run_passes(gm, ctx, [verify])
        for ours, theirs in zip(run(gm, inputs), run(before, inputs), strict=True):
            assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)
        count = graph_notes(gm).folded
        assert not fold_casts(gm, ctx).changed and graph_notes(gm).folded == count
        return gm

    return fold


def casts(gm: GraphModule) -> list[str]:
    """Names of the casts, apart from those of inputs and outputs."""
    output = gm.graph.output_node()
    found = [node for node in gm.graph.nodes if "op" in node.meta and node.meta["op"].name == "to"]
    inserted = [node.name for node in found if node.args[0].op == "placeholder" or output in node.users]
    return [node.name for node in found if not ("inserted" in node.meta and node.name in inserted)]


def test_the_graph_after(folded):
    def f(x, w):
        a = F.linear(x, w).float()
        c = torch.relu(F.linear(a, w))
        return c.bfloat16() * 2.0

    gm = folded(f)
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = placeholder
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%linear: bfloat16 = linear(%x_bf16, %w_bf16)
%linear_1: bfloat16 = linear(%linear, %w_bf16)
%relu: bfloat16 = relu(%linear_1)
%mul: bfloat16 = mul(%relu, 2.0)
return %mul""",
    )
    assert graph_notes(gm).folded == 2


@pytest.mark.parametrize(
    ("dtypes", "left"),
    [
        ((BF16,), 0),  # already is
        ((F32,), 0),  # the cast back is the inserted one
        ((F32, BF16), 0),
        ((F64, BF16), 0),
        ((BF16, F32), 0),
        ((F32, F64, F32), 0),
        ((F32, F64, BF16), 0),
        ((F16, F32), 3),
        ((F64, F32), 3),  # narrows what nobody looks into
        ((F64, F16, F64), 4),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_round_trips_of_a_low_value(folded, dtypes, left):
    def f(x, w):
        y = F.linear(x, w)
        for dtype in dtypes:
            y = y.to(dtype)
        return F.linear(y.to(BF16) if dtypes[-1] is F64 else y, w)

    assert len(casts(folded(f))) == left


@pytest.mark.parametrize(("low", "other"), [(BF16, F16), (F16, BF16)])
def test_neither_16_bit_type_holds_the_other(folded, low, other):
    assert len(casts(folded(lambda x, w: F.linear(F.linear(x, w).to(other), w), low=low))) == 2


@pytest.mark.parametrize(
    ("to", "left"),
    [
        (lambda y: y.float(), 0),
        (lambda y: y.to(F32), 0),
        (lambda y: y.to(dtype=F32), 0),
        (lambda y: y.type(F32), 0),
        (lambda y: y.to(F32, copy=True), 2),
        (lambda y: y.to(F32, memory_format=torch.contiguous_format), 2),
        (lambda y: y.to(F32, True), 2),
        (lambda y: y.to("cpu", F32), 2),
        (lambda y: y.type("torch.FloatTensor"), 2),
    ],
)
def test_only_casts_that_do_nothing_else_fold(folded, to, left):
    assert len(casts(folded(lambda x, w: F.linear(to(F.linear(x, w)), w)))) == left


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x.float() * 2.0, []),
        (lambda x: x.bfloat16().float() * 2.0, ["bfloat16", "float_1"]),  # rounds
        (lambda x: x.double().float() * 2.0, ["double", "float_1"]),  # a copy of the caller's
        (lambda x: (x * 2.0).double().float() * 2.0, []),
        (lambda x: x.double().float().double(), ["double", "float_1", "double_1"]),
        (lambda x: x.long().float().long(), ["long", "float_1", "long_1"]),
        (lambda x: x.bool().float(), ["bool_1", "float_1"]),
    ],
)
def test_user_casts(folded, function, left, level):
    assert casts(folded(function, torch.randn(2, 4), level=level)) == left


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("function", [lambda d: (d.float() * 2.0, d), lambda d: (lambda f: (f * 2.0, f))(d.float())])
def test_who_reads_a_copy_that_is_returned_goes_on_reading_it(folded, function, level):
    def read(**settings):
        gm = folded(lambda x: function((x * 2.0).double()), torch.randn(2, 4), level=level, **settings)
        return gm.graph.output_node().args[0][0].args[0].name

    assert read() == "float_1" and read(gradients=False) == "mul"


def test_a_cast_that_looks_at_its_value_is_not_a_plain_one(tools):
    def f(q, mask):
        return F.linear(mask, q), F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    gm = tools.rewritten(tools.traced(f, torch.randn(3, 3), torch.randn(3, 3)), tools.context(), until="fold_casts")
    found = [node.target for node in gm.graph.nodes if node.target in CASTS and node.args[0].name == "mask"]
    assert found == [cast, cast_saturating]


def test_a_cast_of_what_may_be_anything_stays(tools):
    gm = tools.rewritten(tools.traced(lambda x: (x + 1).float() * 2), tools.context(), until="fold_casts")
    assert gm(torch.arange(3)).dtype is F32


def test_what_nobody_knows_is_looked_at_once(tools):
    def f(x, w):
        y = torch.relu(x @ w).view(-1, 4)
        return F.linear(y, w).softmax(-1)

    before = tools.rewritten(tools.traced(f), tools.context(), until="insert_casts")
    gm = tools.rewritten(tools.traced(f), tools.context(), until="fold_casts")
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = placeholder
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%matmul: bfloat16 = matmul(%x_bf16, %w_bf16)
%relu: bfloat16 = relu(%matmul)
%view: bfloat16 = view(%relu, -1, 4)
%linear: bfloat16 = linear(%view, %w_bf16)
%linear_f32: float32 = to(%linear, torch.float32)
%softmax: float32 = softmax(%linear_f32, -1)
return %softmax""",
    )
    inputs = torch.randn(3, 4), torch.randn(4, 4)
    assert torch.equal(gm(*inputs), before(*inputs)) and graph_notes(gm).folded == 4
    assert gm(*(each.double() for each in inputs)).dtype is F64


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, w: (x * 0.5) @ w, (torch.arange(4).view(2, 2), torch.randn(2, 2))),  # of integers FP32
        (lambda x, w: torch.sigmoid(x.t()).t() @ w, (torch.arange(4).view(2, 2), torch.randn(2, 2))),
        (lambda x, w: torch.cat([x @ w, (x @ w).exp()]) @ w, (torch.randn(2, 2), torch.randn(2, 2))),
        (lambda x, w: (x @ w).add_(1.0).view(-1) @ w.view(-1), (torch.randn(2, 2), torch.randn(2, 2))),
    ],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_may_be_another_float_is_looked_at_again(tools, function, inputs, level):
    gm = tools.rewritten(tools.traced(function), tools.context(level=level), until="fold_casts")
    before = tools.rewritten(tools.traced(function), tools.context(level=level), until="insert_casts")
    assert torch.equal(*(each(*copy.deepcopy(inputs)) for each in (gm, before)))


def test_of_equal_casts_the_first_serves_both(folded):
    def f(x, w):
        y = F.linear(x, w)
        first, second = y.half(), y.half()
        return first * second + second

    gm = folded(f)
    assert [node.name for node in gm.graph.nodes if node.target == "half"] == ["half"]
    assert graph_notes(gm).folded == 1


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.w.double().float(), self.w.half(), self.w.half()


@pytest.mark.parametrize("function", [Weight(), lambda x: (x.double().float(), x.half(), x.half())])
def test_copies_of_what_the_caller_holds_stay_apart(folded, function):
    x = torch.randn(4)
    gm = folded(function, x)
    results = gm(x)
    assert len({id(value) for value in (x, *gm.parameters(), *results)}) == 4 + len([*gm.parameters()])


def test_a_reader_that_wants_the_users_dtype_keeps_the_cast(folded):
    def f(x, w):
        z = F.linear(x, w).bfloat16()  # of an FP32 value, in the original program
        return z, F.linear(z, w)

    for gradients in (True, False):
        gm = folded(f, gradients=gradients)
        assert casts(gm) == ["bfloat16"]
        nodes = {node.name: node for node in gm.graph.nodes}
        assert nodes["linear_1"].args[0] is nodes["bfloat16" if gradients else "linear"]


def written_result(x, w):
    y = F.linear(x, w)
    z = y.float().bfloat16()
    z.view(-1).add_(1.0)
    return F.linear(y, w), z


def written_source(x, w):
    y = F.linear(x, w)
    z = y.float().bfloat16()
    y.add_(1.0)
    return F.linear(z, w), y


@pytest.mark.parametrize("function", [written_result, written_source])
def test_a_copy_that_somebody_writes_to_is_kept(folded, function):
    assert casts(folded(function))[:2] == ["float_1", "bfloat16"]


def test_casts_that_nobody_reads_go(folded):
    def f(x):
        y = x * 2.0
        y.double(), y.half().float(), y.to("cpu")
        return y

    gm = folded(f, torch.randn(4))
    assert casts(gm) == ["to"] and graph_notes(gm).folded == 0


# -- bodies of checkpointed regions


def region(function, *inputs) -> GraphModule:
    """``y, w -> relu(checkpoint(function, y, w))`` for ``y = x * 1.0``, the way dynamo captures it."""
    graph = Graph()
    x, w = (graph.placeholder(name) for name in "xw")
    for node, value in zip((x, w), inputs, strict=True):
        node.meta |= {"dtype": value.dtype, "val": value}
    y = graph.call_function(torch.mul, (x, 1.0))
    call = graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr("body"), y, w))
    graph.output((graph.call_function(torch.relu, (call,)), y))
    return GraphModule({"body": symbolic_trace(function)}, graph)


INPUTS = torch.randn(2, 4), torch.randn(4, 4)


def test_casts_of_operands_move_to_the_caller(tools):
    gm, before = (region(lambda x, w: torch.relu(F.linear(x, w)), *INPUTS) for _ in range(2))
    for each in (before, gm):
        tools.rewritten(each, tools.context(), until="insert_casts")
    assert fold_casts(gm, tools.context()).changed
    run_passes(gm, tools.context(), [verify])
    expecttest.assert_expected_inline(
        format_graph(gm) + "\n--\n" + format_graph(gm.body),
        """\
%x: float32 = placeholder
%w: float32 = placeholder
%mul: float32 = mul(%x, 1.0)
%body: - = get_attr[body]
%cast: bfloat16 = to(%mul, torch.bfloat16)
%cast_1: bfloat16 = to(%w, torch.bfloat16)
%wrap: bfloat16 = higher_order::wrap(%body, %cast, %cast_1)
%relu: bfloat16 = relu(%wrap)
%relu_f32: float32 = to(%relu, torch.float32)
return (%relu_f32, %mul)
--
%x: bfloat16 = placeholder
%w: bfloat16 = placeholder
%linear: bfloat16 = linear(%x, %w)
%relu: bfloat16 = relu(%linear)
return %relu""",
    )
    for ours, theirs in zip(run(gm, INPUTS), run(before, INPUTS), strict=True):
        assert torch.equal(ours, theirs)
    originals = [node.meta["dtype"] for node in gm.body.graph.find_nodes(op="placeholder")]
    assert originals == [torch.float32, torch.float32]
    assert next(node.meta["numel"] for node in gm.graph.nodes if node.name == "cast_1") == 16
    assert not fold_casts(gm, tools.context()).changed


def hoisted(gm: GraphModule) -> list[str]:
    return [node.args[0].name for node in gm.graph.nodes if node.name.startswith("cast")]


def test_what_the_body_reads_as_it_comes_too_is_cast_inside(tools):
    gm = region(lambda x, w: F.linear(x, w), *INPUTS)
    tools.rewritten(gm, tools.context(), until="insert_casts")
    (x, _), output = gm.body.graph.find_nodes(op="placeholder"), gm.body.graph.output_node()
    output.prepend(gm.body.graph.call_method("neg", (x,)))
    fold_casts(gm, tools.context())
    assert hoisted(gm) == ["w"]


def test_operands_that_nobody_can_tell_apart_are_cast_inside(tools):
    gm = region(lambda x, w: F.linear(x, w), *INPUTS)
    tools.rewritten(gm, tools.context(), until="insert_casts")
    call = next(node for node in gm.graph.nodes if node.name == "wrap")
    call.insert_arg(1, "a tag")  # as invoke_subgraph has it
    assert not fold_casts(gm, tools.context()).changed


def test_the_caller_reads_the_cast_that_moved_out(tools):
    gm = region(lambda x, w: torch.relu(F.linear(x, w)), *INPUTS)
    call = next(node for node in gm.graph.nodes if node.name == "wrap")
    with gm.graph.inserting_after(call):
        again = gm.graph.call_function(F.linear, call.args[1:])
    gm.graph.output_node().args = ((call, again),)
    assert hoisted(tools.rewritten(gm, tools.context())) == ["mul", "w"]
    assert [node.name for node in again.args] == ["cast", "cast_1"]


@pytest.mark.parametrize("body", [lambda x, w: F.linear(x, w).add_(1.0), lambda x, w: x.to(F16)])
def test_writing_bodies_and_user_casts_stay_whole(tools, body):
    gm = region(body, *INPUTS)
    assert hoisted(tools.rewritten(gm, tools.context(), until="fold_casts")) == []


def test_an_operand_that_the_caller_writes_is_cast_inside(tools):
    gm = region(lambda x, w: F.linear(x, w), *INPUTS)
    call = next(node for node in gm.graph.nodes if node.name == "wrap")
    with gm.graph.inserting_after(call):
        gm.graph.call_method("add_", (call.args[1], 1.0))
    assert hoisted(tools.rewritten(gm, tools.context(), until="fold_casts")) == ["w"]


@pytest.mark.parametrize("kind", ["called twice", "a branch"])
def test_a_body_that_was_decided_alone_keeps_its_casts(tools, kind):
    gm = region(lambda x, w: torch.relu(F.linear(x, w)), *INPUTS)
    call = next(node for node in gm.graph.nodes if node.name == "wrap")
    body, *operands = call.args
    with gm.graph.inserting_before(call):
        if kind == "called twice":
            gm.graph.call_function(call.target, call.args)
        else:
            call.target, call.args = torch.ops.higher_order.map_impl, (body, operands, [])
    tools.rewritten(gm, tools.context(), until="fold_casts")
    assert hoisted(gm) == [] and len([node for node in gm.body.graph.nodes if node.meta.get("inserted")]) == 3


def test_folds_in_bodies_count(tools):
    gm = region(lambda x, w: F.linear(F.linear(x, w).float(), w), *INPUTS)
    tools.rewritten(gm, tools.context(), until="fold_casts")
    assert not fold_casts(gm, tools.context()).changed
    assert (graph_notes(gm).folded, graph_notes(gm.body).folded) == (0, 1)
    assert not any(node.target == "float" for node in gm.body.graph.nodes)
