"""keep_returned: what is returned lies on the gradient's path, and nothing else costs a cast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.passes.graph.casts import cast_for_caller
from fxprec.passes.graph.text import format_graph
from fxprec.passes.keep_returned import keep_returned
from fxprec.passes.runner import run_passes
from fxprec.passes.verify import verify
from fxprec.testing import format_graph as format_model

X, W, V = torch.randn(2, 4), torch.randn(4, 4), torch.randn(4, 4)


@pytest.fixture
def kept(tools):
    """The text of a traced function's graph behind the pass; a second run of the pass changes nothing."""

    def keep(function, *inputs, **settings):
        inputs, ctx = inputs or (X, W, V), tools.context(**settings)
        before = tools.rewritten(tools.traced(function, *inputs), ctx, until="fold_casts")
        gm = tools.rewritten(tools.traced(function, *inputs), ctx, until="fold_casts")
        changed = keep_returned(gm, ctx).changed
        assert changed is (format_graph(gm) != format_graph(before))
        assert not keep_returned(gm, ctx).changed
        run_passes(gm, ctx, [verify])
        for ours, theirs in zip(gm(*inputs), before(*inputs), strict=True):
            assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)
        return format_graph(gm) if changed else ""

    return keep


def two(x, w, v):
    h = F.linear(x, w)
    return F.linear(h, v), h


def test_the_graph_after(kept):
    lines = kept(two).splitlines()
    assert [line for line in lines if "linear" in line] == [
        "%linear: bfloat16 = linear(%x_bf16, %w_bf16)",
        "%linear_f32: float32 = to(%linear, torch.float32)",
        "%linear_f32_bf16: bfloat16 = to(%linear_f32, torch.bfloat16)",
        "%linear_1: bfloat16 = linear(%linear_f32_bf16, %v_bf16)",
        "%linear_1_f32: float32 = to(%linear_1, torch.float32)",
        "return (%linear_1_f32, %linear_f32)",
    ]


def test_of_an_object_that_is_made_last_its_parts_are_returned(kept):
    text = kept(lambda x, w, v: torch.return_types.max(two(x, w, v)))
    assert text.count("= to(%linear_f32, torch.bfloat16)") == 1


class TwoLayers(nn.Module):
    """Returns what is between its layers, too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        return self.b(h), h


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_cast_of_the_users_may_be_handed_out_twice(capture):
    class Twice(TwoLayers):
        def forward(self, x):
            h = self.a(x)
            cast = h.type_as(x)
            return self.b(h), cast, cast.contiguous()

    torch._dynamo.reset()
    model = fxprec.convert(Twice(), dtype=torch.bfloat16, capture=capture).module
    out, h, same = model(X)
    assert h is same and out.dtype is h.dtype is torch.float32
    (gradient,) = torch.autograd.grad(out.sum(), h)
    torch.testing.assert_close(gradient, model.b.weight.sum(0).expand(2, 4), rtol=0.02, atol=0.02)


def test_low_weights_of_o3_do_not_tell_that_a_result_is_fp32():
    """In a graph without inputs; a call with low ones gives low results, as the original with such weights."""
    model = fxprec.convert(TwoLayers(), dtype=torch.bfloat16, level="O3").module
    lines = format_model(model).splitlines()
    assert [line for line in lines if "= to(%linear" in line or "= linear(" in line] == [
        "%linear: bfloat16 = linear(%x_bf16, %a_weight, %a_bias)",
        "%linear_f32: float32 = to(%linear, torch.float32, %x)",
        "%linear_f32_bf16: bfloat16 = to(%linear_f32, torch.bfloat16)",
        "%linear_1: bfloat16 = linear(%linear_f32_bf16, %b_weight, %b_bias)",
    ]
    for x in (X, X.bfloat16(), X):
        out, h = model(x)
        assert out.dtype is h.dtype is x.dtype
        (gradient,) = torch.autograd.grad(out.sum(), h)
        assert gradient.dtype is x.dtype
        torch.testing.assert_close(gradient.float(), model.b.weight.float().sum(0).expand(2, 4), rtol=0.02, atol=0.01)


def test_cast_for_caller_looks_into_inputs():
    x = torch.ones(2, dtype=torch.bfloat16)
    assert cast_for_caller(x, torch.float32, X, [W], None).dtype is torch.float32
    assert cast_for_caller(x, torch.float32, X, [{"w": W.bfloat16()}]) is x


def test_readers_share_one_cast(kept):
    def function(x, w, v):
        h = F.linear(x, w)
        return F.linear(h, v) + torch.relu(h), h

    text = kept(function)
    assert text.count("= to(%linear_f32, torch.bfloat16)") == 1 and "relu(%linear_f32_bf16)" in text


def test_a_cast_of_the_users_that_does_nothing_counts_as_the_value(kept):
    def function(x, w, v):
        h = F.linear(x, w).float()
        return F.linear(h, v), h

    assert "linear(%float_1_bf16" in kept(function).replace("float_1_bf16_1", "float_1_bf16")


def test_what_is_written_is_read_after_the_last_write(kept):
    def function(x, w, v):
        h = F.linear(x, w)
        before = torch.relu(h)
        h.add_(1)
        return F.linear(h, v) + before, h

    text = kept(function)
    assert "relu(%linear)" in text and text.index("add_") < text.index("= to(%linear_f32, torch.bfloat16)")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, v: (F.linear(F.linear(x, w), v), x),
        lambda x, w, v: (F.linear(x, w), torch.exp(x)),
        lambda x, w, v: (torch.exp(F.linear(x, w)), F.linear(x, v)),
        lambda x, w, v: (F.linear(x, w.double().float()).argmax(-1), x),
    ],
    ids=["an input", "nobody reads it", "read in FP32", "integers"],
)
def test_nothing_to_do(kept, function):
    assert kept(function) == ""


@pytest.mark.parametrize(
    "settings", [{"level": "O0"}, {"gradients": False}, {"keep_output_dtype": False}], ids=["O0", "no_grad", "low"]
)
def test_where_it_costs_nothing(kept, settings):
    assert kept(two, **settings) == ""
