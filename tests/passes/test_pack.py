"""pack: what runs on packed weights, what joins it, what must not, and how values lie in memory afterwards."""

from __future__ import annotations

import dataclasses

import expecttest
import pytest
import torch

from fxprec.kernels.cpu.packed import Geometry, can_pack
from fxprec.kernels.launch.graph_call import graph_call
from fxprec.passes import pack as module
from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import graph_notes, notes
from fxprec.passes.graph.text import format_graph
from fxprec.passes.pack import Packing, pack
from fxprec.passes.policy.policy import Policy
from fxprec.passes.torch_internals import set_grad_enabled
from tests.tools.graph_text import graph_of

CONTEXT = Context(torch.bfloat16, Policy.preset("O1"))


@pytest.fixture(autouse=True)
def _kernels_are_there(monkeypatch):
    """What the pass does depends on no machine: nothing here runs what it writes."""
    monkeypatch.setattr(module, "can_pack", lambda dtype: dtype is torch.bfloat16)


def small_graph(text, weights, large):
    gm = graph_of(text)
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in weights.split():
            notes(node).kind, notes(node).numel = "parameter", 8192 if large else 64
    return gm


def packed(text, weights="w w2 b", large=True, context=CONTEXT):
    """The text of the graph afterwards, without its placeholders, and the graph."""
    gm = small_graph(text, weights, large)
    result = pack(gm, context)
    gm.graph.lint()
    assert result.changed == bool(graph_notes(gm).packings)
    return "\n".join(line for line in format_graph(gm).splitlines() if "placeholder" not in line), gm, result


LINEAR = """
    %w: bfloat16 = placeholder
    %b: bfloat16 = placeholder
    %x: bfloat16 = placeholder
    %linear: bfloat16 = linear(%x, %w, %b)
"""
CONV = """
    %w: bfloat16 = placeholder
    %mean: float32 = placeholder
    %var: float32 = placeholder
    %x: bfloat16 = placeholder
    %conv: bfloat16 = conv2d(%x, %w, None, 2, 1)
"""


def test_the_graph_after():
    text, gm, _ = packed(
        CONV
        + """
    %bn: bfloat16 = batch_norm(%conv, %mean, %var, None, None, False, 0.1, 1e-5)
    %add: bfloat16 = add(%bn, %x)
    %relu: bfloat16 = relu(%add)
    %flat: bfloat16 = flatten(%relu, 1)
    %view: bfloat16 = view(%flat, 4)
    return %view""",
        "w mean var",
    )
    expecttest.assert_expected_inline(
        text,
        """\
%add: bfloat16 = packed_conv_plus(%x, %packed_w, %packed_w_bias, %x, True)
%flat: bfloat16 = flatten(%add, 1)
%in_format_of: bfloat16 = in_format_of(%flat, %x, %w)
%view: bfloat16 = view(%in_format_of, 4)
return %view""",
    )
    conv = Geometry((2, 2), (1, 1), (1, 1), 1)
    folded = Packing("w", torch.bfloat16, conv, (None, "mean", "var", None, None), 1e-5, same_bias=True)
    assert graph_notes(gm).packings == (folded,)
    assert graph_notes(gm).packed == {"add": ("batch_norm", "add", "relu")}
    assert [node.name for node in gm.graph.find_nodes(op="placeholder")][:2] == ["packed_w", "packed_w_bias"]


def test_convolutions_in_float32_are_packed_as_well_and_linears_are_not():
    wide = (
        CONV.replace("bfloat16", "float32")
        + """
    %bn: float32 = batch_norm(%conv, %mean, %var, None, None, False, 0.1, 1e-5)
    %relu: float32 = relu(%bn)
    %w2: float32 = placeholder
    %linear: float32 = linear(%relu, %w2)
    return %linear"""
    )
    text, gm, _ = packed(wide, "w w2 mean var")
    expecttest.assert_expected_inline(
        text,
        """\
%conv: float32 = packed_conv(%x, %packed_w, %packed_w_bias, 'relu', (), '')
%linear: float32 = linear(%conv, %w2)
return %linear""",
    )
    conv = Geometry((2, 2), (1, 1), (1, 1), 1)
    assert graph_notes(gm).packings == (Packing("w", torch.float32, conv, (None, "mean", "var", None, None), 1e-5),)
    none = dataclasses.replace(CONTEXT, policy=Policy.preset("O0"))
    assert graph_notes(packed(wide, "w w2 mean var", context=none)[1]).packings == ()


def test_transposed_convolutions():
    text, gm, _ = packed(
        CONV.replace("conv2d(%x, %w, None, 2, 1)", "conv_transpose2d(%x, %w, None, 2, 1, (1, 0), 1, dilation=2)")
        + """
    %bn: bfloat16 = batch_norm(%conv, %mean, %var, None, None, False, 0.1, 1e-5)
    %add: bfloat16 = add(%bn, %x)
    return %add""",
        "w mean var",
    )
    expecttest.assert_expected_inline(
        text,
        """\
%conv: bfloat16 = packed_conv(%x, %packed_w, %packed_w_bias)
%add: bfloat16 = add(%conv, %x)
%in_format_of: bfloat16 = in_format_of(%add, %x, %w)
return %in_format_of""",
    )
    assert [packing.conv for packing in graph_notes(gm).packings] == [Geometry((2, 2), (1, 1), (2, 2), 1, (1, 0))]


def test_what_follows_in_another_dtype_does_not_join():
    text, *_ = packed(
        CONV.replace("bfloat16", "float32")
        + """
    %low: bfloat16 = to_bf16(%conv)
    %relu: bfloat16 = relu(%low)
    return %relu""",
        "w mean var",
    )
    assert "relu(%" in text and "packed_conv(%x" in text


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("relu(%linear)", "'relu', [], ''"),
        ("relu_(%linear)", "'relu', [], ''"),
        ("gelu(%linear)", "'gelu', [], 'none'"),
        ("gelu(%linear, approximate='tanh')", "'gelu', [], 'tanh'"),
        ("silu(%linear)", "'swish', [], ''"),
        ("tanh(%linear)", "'tanh', [], ''"),
        ("sigmoid(%linear)", "'sigmoid', [], ''"),
        ("hardswish(%linear)", "'hardswish', [], ''"),
        ("hardsigmoid(%linear)", "'hardsigmoid', [], ''"),
        ("leaky_relu(%linear, 0.2)", "'leaky_relu', [0.2], ''"),
        ("leaky_relu(%linear)", "'leaky_relu', [0.01], ''"),
        ("hardtanh(%linear, -2, max_val=3)", "'hardtanh', [-2.0, 3.0], ''"),
        ("relu6(%linear)", "'hardtanh', [0.0, 6.0], ''"),
    ],
)
def test_activations_join(call, written):
    text, *_ = packed(f"{LINEAR}    %y: bfloat16 = {call}\n    return %y")
    assert text == f"%linear: bfloat16 = packed_linear(%x, %packed_w, %b, {written})\nreturn %linear"


@pytest.mark.parametrize(
    "after",
    [
        "%y: bfloat16 = relu(%linear)\n    %z: bfloat16 = neg(%linear)\n    return (%y, %z)",  # it is read elsewhere
        "%y: bfloat16 = elu(%linear)\n    return %y",  # which oneDNN's linears lack
        "%y_f32: float32 = to(%linear, torch.float32)\n    %y: float32 = relu(%y_f32)\n    return %y",
        "%y: bfloat16 = leaky_relu(%linear, %x)\n    return %y",  # a number that nobody knows
        "%y: bfloat16 = add(%linear, %x)\n    return %y",  # a linear's sum gains nothing
        "return %linear",
    ],
)
def test_others_do_not(after):
    text, gm, _ = packed(LINEAR + "    " + after)
    assert text.splitlines()[0] == "%linear: bfloat16 = packed_linear(%x, %packed_w, %b, 'none', [], '')"
    assert graph_notes(gm).packed == {"linear": ()}


def test_small_weights_are_asked_for_rows_at_each_call():
    text, *_ = packed(LINEAR + "    %y: bfloat16 = relu(%linear)\n    return %y", large=False)
    assert text.splitlines()[:2] == [
        "%linear: bfloat16 = packed_linear_of_many(%x, %w, %packed_w, %b)",
        "%y: bfloat16 = relu(%linear)",
    ]


@pytest.mark.parametrize(
    ("norm", "after"),
    [
        ("batch_norm(%conv, %mean, %var, None, None, True)", "by statistics of the batch"),
        ("batch_norm(%conv, None, None, None, None, True)", "without running ones"),
        ("batch_norm(%conv, %mean, %x, None, None, False)", "by what the model computes"),
    ],
)
def test_a_norm_that_depends_on_the_input_stays(norm, after):
    text, *_ = packed(f"{CONV}    %bn: bfloat16 = {norm}\n    return %bn", "w mean var")
    assert "batch_norm" in text and "packed_conv(%x, %packed_w, None" in text, after


@pytest.mark.parametrize("op", ["relu(%conv)", "batch_norm(%conv, %mean, %var, None, None, False, 0.1, 1e-5)"])
def test_a_graph_call_that_holds_more_than_its_op_stays(op):
    """A product would take in the op of that name alone, and lose the rest."""

    @graph_call
    def more(x, *_):
        return x.relu() * 2

    for target, joins in ((None, True), (more, False)):
        gm = small_graph(f"{CONV}    %end: bfloat16 = {op}\n    return %end", "w mean var", True)
        (node,) = [node for node in gm.graph.nodes if node.name == "end"]
        node.target = target or node.target
        pack(gm, CONTEXT)
        assert any(node.target is more for node in gm.graph.nodes) is not joins
        assert bool(next(iter(graph_notes(gm).packed.values()))) is joins


def test_a_sum_joins_only_where_nobody_writes_to_the_image_in_between():
    add = "\n    %add: bfloat16 = add(%conv, %other)\n    return %add"
    text, *_ = packed(CONV + "    %other: bfloat16 = mul_(%x, 2)" + add)
    assert "%add: bfloat16 = add(%conv, %other)" in text and "packed_conv(" in text
    text, *_ = packed(CONV + "    %other: bfloat16 = mul(%x, 2)" + add)
    assert "%add: bfloat16 = packed_conv_plus(" in text
    text, *_ = packed(CONV.replace("2, 1)", "2, 1, 1, 4)") + "    %other: bfloat16 = mul(%x, 2)" + add)
    assert "%add: bfloat16 = add(%conv, %other)" in text  # oneDNN adds nothing to channels in groups


def test_two_convolutions_that_meet_join_once():
    text, gm, _ = packed(
        CONV
        + """
    %w2: bfloat16 = placeholder
    %shorter: bfloat16 = conv2d(%x, %w2, None, 2, 1)
    %bn: bfloat16 = batch_norm(%shorter, %mean, %var, None, None, False, 0.1, 1e-5)
    %add: bfloat16 = add(%conv, %bn)
    %relu: bfloat16 = relu(%add)
    return %relu""",
        "w w2 mean var",
    )
    assert graph_notes(gm).packed == {"add": ("add", "relu"), "shorter": ("batch_norm",)}
    assert "packed_conv_plus(%x, %packed_w, None, %shorter, True, True)" in text


@pytest.mark.parametrize(
    ("between", "over"),
    [
        ("%again: bfloat16 = conv2d(%other, %w2)", True),
        ("%again: nothing = dim(%other)", True),
        ("%again: bfloat16 = relu(%other)", False),
        ("%again: bfloat16 = view(%other, 4)", False),
    ],
)
@pytest.mark.parametrize("late", ["", "    %late: bfloat16 = conv2d(%other, %w2)\n"])
def test_a_sum_is_written_over_a_convolution_that_such_calls_alone_have_read(between, over, late):
    text, *_ = packed(
        f"{CONV}    %w2: bfloat16 = placeholder\n    %other: bfloat16 = conv2d(%conv, %w2)\n    {between}\n"
        f"    %own: bfloat16 = conv2d(%conv, %w2)\n    %add: bfloat16 = add(%other, %own)\n{late}"
        f"    return (%add, %again{', %late' if late else ''})",
        "w w2",
    )
    assert text.count("packed_conv_plus") == 1
    assert (", False, True)" in text) is (over and not late), text
    assert (", False)" in text) is not (over and not late), text


def test_how_many_dimensions_there_are_is_asked_of_the_input():
    text, *_ = packed(
        CONV.replace("conv2d(%x, %w, None, 2, 1)", "conv2d(%x, %w, None, 2, 1)\n    %dim: int64 = dim(%conv)").replace(
            "%dim: int64", "%dim: nothing"
        )
        + "    %add: bfloat16 = add(%conv, %x)\n    return (%add, %dim)"
    )
    assert "= dim(%x)" in text and "packed_conv_plus" in text


def test_values_go_back_into_their_format_where_it_can_be_seen():
    for op, seen in (("stride(%y)", True), ("shape(%y)", False), ("mean(%y, (2, 3))", False), ("view(%y, 4)", True)):
        dtype = "nothing" if op[:2] in ("st", "sh") else "bfloat16"
        text, *_ = packed(f"{CONV}    %y: bfloat16 = relu(%conv)\n    %z: {dtype} = {op}\n    return %z")
        assert text.splitlines()[1].startswith("%in_format_of") == seen, op
    text, *_ = packed(CONV + "    return %conv")
    assert text.endswith("return %in_format_of")


@pytest.mark.parametrize(
    "rest",
    [
        "%v: bfloat16 = view(%conv, 4)\n    %m: bfloat16 = mul_(%v, 2)\n    return %conv",
        "%s: bfloat16 = select(%conv, 0, 0)\n    %r: bfloat16 = relu(%s)\n    %v: bfloat16 = view(%r, 4)\n"
        "    %m: bfloat16 = mul_(%v, 2)\n    return %r",
    ],
)
def test_convolutions_stay_where_a_copy_would_hide_a_write(rest):
    _, gm, result = packed(f"{CONV}    {rest}")
    assert graph_notes(gm).packings == () and "m: writes to what would be a copy" in " ".join(result.declined)
    _, gm, _ = packed(CONV + "    %m: bfloat16 = relu_(%conv)\n    %v: bfloat16 = view(%m, 4)\n    return %v")
    assert graph_notes(gm).packed == {"conv": ("relu",)}


def test_one_weight_is_packed_once():
    text, gm, _ = packed(LINEAR + "    %again: bfloat16 = linear(%linear, %w, None)\n    return %again")
    assert graph_notes(gm).packings == (Packing("w", torch.bfloat16),) and text.count("%packed_w,") == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LINEAR.replace("linear(%x, %w, %b)", "linear(%x, %x, %b)"), ""),
        (LINEAR.replace("linear(%x, %w, %b)", "linear(%x, %w, %x)"), "its bias is computed"),
        (LINEAR.replace("bfloat16", "float32"), ""),
        (CONV.replace("conv2d", "conv1d").replace(" 2, 1)", " 2, 1)"), "two and three dimensions"),
        (CONV.replace("2, 1)", "2, 'same')"), "no number"),
    ],
)
def test_what_is_left_as_it_is(text, why):
    last = text.strip().splitlines()[-1].split(":")[0].strip()
    _, gm, result = packed(f"{text}    return {last}")
    assert not result.changed and graph_notes(gm).packings == ()
    assert (why in " ".join(result.declined)) if why else not result.declined


def test_nothing_on_other_devices_and_in_other_dtypes():
    for context in (Context(torch.bfloat16, CONTEXT.policy, device="cuda"), Context(torch.float16, CONTEXT.policy)):
        _, gm, result = packed(LINEAR + "    return %linear", context=context)
        assert not result.changed and graph_notes(gm).packings == ()


def test_a_graph_that_turns_gradients_on_is_left():
    gm = small_graph(LINEAR + "    return %linear", "w b", True)
    with gm.graph.inserting_before(next(node for node in gm.graph.nodes if node.op == "call_function")):
        gm.graph.call_function(set_grad_enabled, (True,))
    result = pack(gm, CONTEXT)
    assert not result.changed and "turns gradients on" in result.declined[0]


def test_twice_is_as_once():
    text, gm, _ = packed(LINEAR + "    return %linear")
    assert not pack(gm, CONTEXT).changed
    assert text in format_graph(gm)


def test_it_is_for_bfloat16():
    assert not can_pack(torch.float16) and not can_pack(torch.float32)
