"""limit_readers: a low copy with many readers becomes several, where autocast would add up their gradients in FP32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.passes.graph.text import format_graph
from fxprec.passes.limit_readers import READERS, limit_readers
from fxprec.passes.runner import run_passes
from fxprec.passes.verify import verify
from fxprec.testing import format_graph as format_model

BF16, FP32 = torch.bfloat16, torch.float32
X, W, V = torch.randn(4, 4), torch.randn(4, 4), torch.randn(12, 4, 4)


@pytest.fixture
def limited(tools):
    """Return the text of a traced function's graph behind the pass, "" where nothing changed; run the pass twice."""

    def limit(function, *inputs, **settings):
        inputs = inputs or (X, W, V)
        ctx = tools.context(**settings)
        before, gm = (tools.rewritten(tools.traced(function, *inputs), ctx, until="share_returned") for _ in range(2))
        changed = limit_readers(gm, ctx).changed
        assert changed is (format_graph(gm) != format_graph(before))
        assert not limit_readers(gm, ctx).changed
        run_passes(gm, ctx, [verify])
        assert torch.equal(gm(*inputs), before(*inputs))
        return format_graph(gm) if changed else ""

    return limit


def products(h, w, count):
    return torch.stack([F.linear(h, w[n]) for n in range(count)])


def test_the_graph_after(limited):
    lines = limited(lambda x, w, v: products(x.softmax(-1), v, READERS + 2)).splitlines()
    softmax = [line for line in lines if "softmax" in line]
    assert softmax == [
        "%softmax: float32 = softmax(%x, -1)",
        "%softmax_bf16: bfloat16 = to(%softmax, torch.bfloat16)",
        "%softmax_bf16_1: bfloat16 = to(%softmax, torch.bfloat16)",
        *(f"%linear{n}: bfloat16 = linear(%softmax_bf16, %getitem{n}_bf16)" for n in ("", "_1", "_2", "_3")),
        *(f"%linear{n}: bfloat16 = linear(%softmax_bf16_1, %getitem{n}_bf16)" for n in ("_4", "_5")),
    ]
    assert READERS == 4


def test_as_many_as_may_share(limited):
    assert not limited(lambda x, w, v: products(x.softmax(-1), v, READERS))


def test_what_no_cast_made_goes_to_fp32_and_back(limited):
    text = limited(lambda x, w, v: products(F.relu(F.layer_norm(F.linear(x, w), (4,))), v, 2 * READERS + 1))
    assert text.count("= linear(%relu, ") == READERS
    assert "%relu_f32: float32 = to(%relu, torch.float32)" in text
    assert text.count("bfloat16 = to(%relu_f32, torch.bfloat16)") == 2


def test_an_input_is_no_leaf(limited):
    """In a checkpoint, a converted submodule, behind a graph break: an earlier layer made it."""
    assert limited(lambda x, w, v: products(x, v, READERS + 1)).count("bfloat16 = to(%x, torch.bfloat16)") == 2


def test_a_weight_s_copy_is_shared_as_under_autocast(limited):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(W.clone())

        def forward(self, x):
            return torch.stack([F.linear(x[n % 4], self.weight) for n in range(9)])

    assert not limited(Shared(), X)


def test_a_cast_to_fp32_that_is_there_serves(limited):
    def f(x, w, v):
        h = F.relu(F.layer_norm(F.linear(x, w), (4,)))
        return torch.cat((products(h, v, READERS + 1).flatten(), h.exp().flatten()))

    text = limited(f)
    assert text.count("= to(%relu, torch.float32)") == text.count("= to(%relu_f32, torch.bfloat16)") == 1


#: Many readers that share a copy under autocast too, or look at parts, or whose gradient nobody wants.
ALIKE = {
    "a product": lambda x, w, v: products(F.relu(F.linear(x, w)), v, 9),
    "parts": lambda x, w, v: (h := x.softmax(-1), torch.stack([F.linear(h[n % 4], v[n]) for n in range(9)]))[1],
    "the user's own low": lambda x, w, v: products(x.bfloat16(), v.bfloat16(), 9),
    "sizes": lambda x, w, v: F.linear(y := x.softmax(-1), w) * sum(y.shape[n % 2] for n in range(9)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_stays(limited, name):
    assert not limited(ALIKE[name])


def test_without_gradients_all_share(limited):
    assert not limited(lambda x, w, v: products(x.softmax(-1), v, 9), gradients=False)


class ReadWithoutGradients(nn.Module):
    """The fifth reader of a value, and of a weight's transpose, stands under ``no_grad``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.heads = nn.LayerNorm(8), nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        h, w = self.norm(x), self.weight.t()
        out = sum(head(h) + (x + n) @ w for n, head in enumerate(self.heads[:4]))
        with torch.no_grad():
            out = out + self.heads[4](h) + x @ w
        return out + sum(head(h) + (x - n) @ w for n, head in enumerate(self.heads[5:]))


@pytest.mark.parametrize("settings", [{}, {"level": "O2"}, {"level": "O3"}, {"capture": "dynamo"}], ids=str)
def test_a_reader_under_no_grad_ends_nobody_s_gradient(settings):
    torch._dynamo.reset()
    model, x = ReadWithoutGradients(), torch.randn(4, 8)
    model(x).square().sum().backward()
    ours = fxprec.convert(ReadWithoutGradients(), dtype=BF16, **settings).module
    ours(x).square().sum().backward()
    for name in ("norm.weight", "weight"):
        found, right = ours.get_parameter(name).grad, model.get_parameter(name).grad
        assert (found - right).norm() <= 0.03 * right.norm(), name


def test_written_memory_is_left_alone(limited):
    def f(x, w, v):
        y = F.layer_norm(F.linear(x, w), (4,))
        y.relu_()
        return products(y, v, 9)

    assert not limited(f)


def test_a_list_that_has_it_often(limited):
    text = limited(lambda x, w, v: F.linear(torch.cat([x.softmax(-1)] * 9), w))
    cat = next(line for line in text.splitlines() if "= cat(" in line)
    assert cat.count("%softmax_bf16,") == cat.count("%softmax_bf16_1,") == READERS


def test_a_second_cast_without_need_is_an_error(tools):
    ctx = tools.context()
    gm = tools.rewritten(tools.traced(lambda x, w: products(x.softmax(-1), w, 5), X, V), ctx, until="limit_readers")
    last = next(node for node in gm.graph.nodes if node.name == "linear_3")
    last.replace_input_with(last.args[0], next(node for node in gm.graph.nodes if node.name == "softmax_bf16_1"))
    with pytest.raises(fxprec.InvariantError, match="a second cast of softmax"):
        run_passes(gm, ctx, [verify])


class Many(nn.Module):
    """What one value gives to many products: experts and heads, blocks on one embedding, a recurrent weight."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.count = kind, 60
        self.first, self.norm, self.weight = nn.Linear(8, 8), nn.LayerNorm(8), nn.Parameter(torch.eye(8) * 0.5)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(self.count))
        self.factor = nn.Parameter(torch.rand(8, 8))

    def forward(self, x):
        h = self.norm(x + self.first(x))
        if self.kind == "heads":
            return self.sum_of_heads(h)
        if self.kind == "checkpoint":
            return checkpoint(self.sum_of_heads, h, use_reentrant=False)
        if self.kind == "blocks":
            return sum(head(F.silu(h)) for head in self.heads)
        w = self.weight + self.factor @ self.factor.t() * 0.01 if self.kind == "made once" else self.weight
        for _ in range(self.count):
            h = torch.tanh(h @ (w if self.kind == "made once" else w.t()) + x)
        return h

    def sum_of_heads(self, h):
        return sum(head(h) for head in self.heads)


class Heads(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def forward(self, h):
        return sum(head(h) for head in self.heads)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("kind", ["heads", "blocks", "made once", "transposed"])
def test_gradients_as_under_autocast(kind, capture):
    torch._dynamo.reset()
    check_gradients(kind, fxprec.convert(Many(kind), dtype=BF16, capture=capture).module)


def test_what_a_checkpoint_s_body_reads():
    """The cast moved out of the body; within it the copy is split, as it would be outside."""
    torch._dynamo.reset()
    ours = fxprec.convert(Many("checkpoint"), dtype=BF16, scaler=False).module
    check_gradients("checkpoint", ours)
    assert format_model(ours).count("_f32, torch.bfloat16)") == ours.count / READERS - 1


def test_what_a_converted_part_reads():
    """Its inputs are no leaves."""
    ours = Many("heads")
    ours.sum_of_heads = fxprec.convert(Heads(ours.heads), dtype=BF16).module.forward
    check_gradients("heads", ours)


def check_gradients(kind, ours):
    x = torch.rand(32, 8, generator=torch.Generator().manual_seed(1))
    exact, eager = Many(kind).double(), Many(kind)
    (exact(x.double()) ** 2).sum().backward()
    with torch.autocast("cpu", BF16):
        y = eager(x)
    (y.float() ** 2).sum().backward()
    (ours(x) ** 2).sum().backward()
    for (name, own), other, right in zip(ours.named_parameters(), eager.parameters(), exact.parameters(), strict=True):
        if own.grad is None or other.grad is None or right.grad is None:
            assert own.grad is other.grad is right.grad is None
        elif right.grad.norm() > 0:
            found, theirs = (float((each - right.grad).norm() / right.grad.norm()) for each in (own.grad, other.grad))
            assert found <= 2.5 * theirs + 2.0**-8, (name, found, theirs)
