"""rotary: Llama's embedding is one node, whose kernel reads and writes low; what only looks like it stays."""

from __future__ import annotations

import copy
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
import kernel_tools
from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.kernels.nn import rope as rope_file
from fxprec.passes.canonical.rotary import NEIGHBOURS, rope
from fxprec.passes.graph.text import format_graph

on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)
outside = pytest.mark.skipif(kernel_tools.INTERPRETING, reason="wants to be outside of the interpreter")
launch = rope_file._launch
X, W = torch.randn(2, 3, 5, 8), torch.randn(8, 8)
COS, SIN = torch.randn(2, 1, 5, 8), torch.randn(2, 1, 5, 8)


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


def rotated(x):
    return torch.cat((-x[..., 4:], x[..., :4]), dim=-1)


def llama(x, cos, sin):
    return (x * cos) + (rotated(x) * sin)


def by(halves):
    """Llama's embedding with halves made otherwise."""

    def embedded(x, cos, sin):
        left, right = halves(x)
        return x * cos + torch.cat((-right, left), dim=-1) * sin

    return embedded


def gpt_j(x, cos, sin):
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1)
    return (x * cos) + (turned.flatten(-2) * sin)


@outside
def test_the_graph_after(tools) -> None:
    def f(x, w, cos, sin):
        return F.linear(llama(F.linear(x, w), cos, sin), w)

    gm = tools.rewritten(tools.traced(f, X, W, COS, SIN), tools.context(regions="triton"), until="fuse")
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = placeholder
%cos: float32 = placeholder
%sin: float32 = placeholder
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%linear: bfloat16 = linear(%x_bf16, %w_bf16)
%add: bfloat16 = rope(%linear, %cos, %sin, 4)
%linear_1: bfloat16 = linear(%add, %w_bf16)
%linear_1_f32: float32 = to(%linear_1, torch.float32)
return %linear_1_f32""",
    )
    looped = tools.rewritten(tools.traced(f, X, W, COS, SIN), tools.context(regions="loops"), until="fuse")
    (node,) = looped.graph.find_nodes(op="call_function", target=rope)
    assert node.args[3:] == (4, True)
    plain = tools.rewritten(tools.traced(f, X, W, COS, SIN), tools.context(), until="fuse")
    assert not plain.graph.find_nodes(op="call_function", target=rope)  # where no kernel runs, nothing changes


@outside
@pytest.mark.parametrize(
    "function",
    [
        llama,
        lambda x, cos, sin: (rotated(x) * sin) + (x * cos),
        lambda x, cos, sin: torch.add(torch.mul(cos, x), torch.mul(sin, rotated(x))),
        by(lambda x: x.chunk(2, dim=-1)),
        by(lambda x: torch.chunk(x, chunks=2, dim=-1)),
        by(lambda x: x.split((4, 4), dim=-1)),
        by(lambda x: torch.split(x, [4, 4], -1)),
        gpt_j,
    ],
    ids=["llama", "swapped", "torch functions", "chunk", "torch.chunk", "split", "torch.split", "neighbours"],
)
def test_spellings(tools, function) -> None:
    gm = tools.rewritten(tools.traced(function, X, COS, SIN), tools.context(regions="triton"), until="recognize_rotary")
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [rope]
    assert torch.allclose(gm(X, COS, SIN), function(X, COS, SIN))


@outside
@pytest.mark.parametrize(
    "function",
    [
        lambda x, cos, sin: (x * cos) + (torch.cat((-x[..., 4:], x[..., :3]), dim=-1)[..., :8] * sin[..., :7]).sum(),
        lambda x, cos, sin: (x * cos) + (torch.cat((x[..., 4:], x[..., :4]), dim=-1) * sin),
        lambda x, cos, sin: (x * cos) + (torch.cat((-x[..., 4:], x[..., :4]), dim=-2).view(2, 3, 5, 8) * sin),
        lambda x, cos, sin: (x * cos) - (rotated(x) * sin),
        lambda x, cos, sin: ((x + 1) * cos) + (rotated(x) * sin),
        lambda x, cos, sin: torch.add(x * cos, rotated(x) * sin, alpha=2),
        lambda x, cos, sin: (x * 2.0) + (rotated(x) * sin),
        by(lambda x: x.chunk(2, dim=-1)[::-1]),
        by(lambda x: (x[..., :4], x[..., :4])),
        by(lambda x: (x[..., :4], x.chunk(2, dim=-1)[1])),
        by(lambda x: (x[..., ::2], x[..., 1::2])),
        lambda x, cos, sin: (x * cos) + torch.stack((-x[..., 4:], x[..., :4]), dim=-1).flatten(-2) * sin,
        lambda x, cos, sin: (x * cos) + torch.stack((-x[..., ::2], x[..., 1::2]), dim=-1).flatten(-2) * sin,
        lambda x, cos, sin: (x * cos) + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-2).flatten(-2) * sin,
    ],
    ids=[
        "uneven",
        "no sign",
        "other dim",
        "sub",
        "other x",
        "alpha",
        "number",
        "halves swapped",
        "one half",
        "ways mixed",
        "neighbours joined as halves",
        "halves joined as neighbours",
        "neighbours swapped",
        "rows joined",
    ],
)
def test_what_only_looks_like_it_stays(tools, function) -> None:
    gm = tools.rewritten(tools.traced(function, X, COS, SIN), tools.context(regions="triton"), until="recognize_rotary")
    assert not gm.graph.find_nodes(op="call_function", target=rope)
    assert torch.equal(gm(X, COS, SIN), function(X, COS, SIN))


@outside
def test_parts_that_others_read_stay(tools) -> None:
    def f(x, cos, sin):
        half = rotated(x)
        return (x * cos) + (half * sin), half

    gm = tools.rewritten(tools.traced(f, X, COS, SIN), tools.context(regions="triton"), until="recognize_rotary")
    assert len(gm.graph.find_nodes(op="call_function", target=rope)) == 1
    for own, other in zip(gm(X, COS, SIN), f(X, COS, SIN), strict=True):
        assert torch.allclose(own, other)


SHAPES = {
    "heads first": ((2, 3, 5, 8), (2, 1, 5, 8)),
    "heads last": ((2, 5, 3, 8), (2, 5, 1, 8)),
    "one table": ((2, 3, 5, 8), (1, 1, 5, 8)),
    "tables of positions": ((2, 3, 5, 8), (5, 8)),
    "tables of positions, heads last": ((2, 5, 3, 8), (5, 1, 8)),
    "tables of heads": ((2, 3, 5, 8), (3, 5, 8)),  # runs as ops
    "a number of columns that is no double": ((2, 3, 5, 9), (2, 1, 5, 9)),  # likewise
    "no heads": ((3, 5, 8), (5, 8)),  # likewise
}


@outside
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "half"),
    [(name, half) for name, (x, _) in SHAPES.items() for half in (4, None, NEIGHBOURS)[: 2 + (x[-1] % 2 == 0)]],
)
def test_values_and_gradients_of_loops(name: str, low: torch.dtype, half, monkeypatch) -> None:
    shape, table = SHAPES[name]
    launched = []
    monkeypatch.setattr(rope_file, "_launch", lambda *args: launched.append(launch(*args)))
    x = torch.randn(shape).to(low).requires_grad_()
    cos, sin = torch.randn(table), torch.randn(table)
    exact = x.detach().double().requires_grad_()
    plain = {4: llama, None: by(lambda x: x.chunk(2, dim=-1)), NEIGHBOURS: gpt_j}[half]
    found, ops, right = rope(x, cos, sin, half, True), rope(x, cos, sin, half), plain(exact, cos.double(), sin.double())
    cotangent = torch.randn_like(found)
    gradients = [
        torch.autograd.grad(y, of, cotangent.to(y.dtype))[0] for y, of in ((found, x), (ops, x), (right, exact))
    ]
    for ours, theirs, truth in ((found, ops, right), gradients):
        assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max() + 1e-6
    served = name not in ("tables of heads", "a number of columns that is no double", "no heads")
    assert len(launched) == (2 if served else 0)
    again = torch.func.vmap(lambda x: rope(x, cos, sin, half, True))(x[None])[0]  # where somebody looks, torch's ops
    assert torch.allclose(again.double(), right, 2e-2, 2e-2) and len(launched) == (2 if served else 0)


@outside
def test_a_model_on_a_cpu_turns_its_queries_in_loops() -> None:
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)
            angles = torch.arange(12)[:, None] * 10.0 ** -(torch.arange(4) / 4)
            self.register_buffer("cos", angles.cos().repeat(1, 2))
            self.register_buffer("sin", angles.sin().repeat(1, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k = (layer(x).view(3, 12, 4, 8).transpose(1, 2) for layer in (self.q, self.k))
            return F.scaled_dot_product_attention(llama(q, self.cos, self.sin), llama(k, self.cos, self.sin), k)

    own, x, names = Attention(), torch.randn(3, 12, 32), set()
    exact, model = copy.deepcopy(own).double(), fxprec.convert(copy.deepcopy(own), fuse=True).module

    def run(of: nn.Module, x: torch.Tensor) -> list[Any]:
        y = of(x)
        names.update(kernel_tools.backwards_of(y))
        y.square().sum().backward()
        return [y.detach(), *(each.grad for each in of.parameters())]

    with torch.autocast("cpu", torch.bfloat16):
        eager = run(own, x)
    right = run(exact, x.double())
    assert "ropeBackward" not in names
    for ours, theirs, truth in zip(run(model, x), eager, right, strict=True):
        assert (ours.double() - truth).norm() <= 2 * (theirs.double() - truth).norm()
    assert "ropeBackward" in names
    assert not fxprec.graph_module(model).graph.find_nodes(op="call_function", target=torch.cat)


@on_devices
@pytest.mark.parametrize("low", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("name", "half"),
    [(name, half) for name, (x, _) in SHAPES.items() for half in (4, None, NEIGHBOURS)[: 2 + (x[-1] % 2 == 0)]],
)
def test_values_and_gradients(device: str, name: str, low: torch.dtype, half, monkeypatch) -> None:
    shape, table = SHAPES[name]
    launched = []
    monkeypatch.setattr(rope_file, "_launch", lambda *args: launched.append(launch(*args)))
    x = torch.randn(shape).to(device, low).requires_grad_()
    cos, sin = torch.randn(table, device=device), torch.randn(table, device=device)
    exact = x.detach().double().requires_grad_()
    plain = {4: llama, None: by(lambda x: x.chunk(2, dim=-1)), NEIGHBOURS: gpt_j}[half]
    result, right = rope(x, cos, sin, half), plain(exact, cos.double(), sin.double())
    assert result.dtype == low and result.shape == right.shape
    cotangent = torch.randn_like(result)
    (gradient,) = torch.autograd.grad(result, x, cotangent)
    (other,) = torch.autograd.grad(right, exact, cotangent.double())
    tolerance = 2e-3 if low is torch.float16 else 1e-5
    assert torch.allclose(result.double(), right, tolerance, tolerance)
    assert torch.allclose(gradient.double(), other, tolerance, tolerance)
    assert len(launched) == (
        0 if name in ("tables of heads", "a number of columns that is no double", "no heads") else 2
    )


class Written(nn.Module):
    """Writes to what the embedding reads, between its products and its sum."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.q, self.to = nn.Linear(8, 8), to
        self.register_buffer("cos", torch.randn(5, 8))
        self.register_buffer("sin", torch.randn(5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        plain, turned = q * self.cos, rotated(q) * self.sin
        {"cos": self.cos, "q": q}[self.to].zero_()
        return plain + turned


@outside
@pytest.mark.parametrize("to", ["cos", "q"])
def test_what_is_written_to_between_product_and_sum_stays(to: str) -> None:
    torch.manual_seed(0)
    own, x = Written(to), torch.randn(2, 3, 5, 8)
    model = fxprec.convert(copy.deepcopy(own), fuse=True).module
    with torch.no_grad():
        torch.testing.assert_close(model(x), own(x), rtol=0.05, atol=0.05)


@outside
def test_a_result_of_another_dtype_than_x_stays() -> None:
    class Exact(Written):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return llama(self.q(x), self.cos, self.sin)

    model = Exact("q")
    model.cos, model.sin = model.cos.double(), model.sin.double()
    assert fxprec.convert(model, fuse=True).module(torch.randn(2, 3, 5, 8)).dtype is torch.float64


@outside
def test_tables_that_are_learned_stay_with_a_loop_of_a_region() -> None:
    class UnderAutocast(Written):
        def __init__(self) -> None:
            super().__init__("q")
            del self.cos
            self.cos = nn.Parameter(torch.randn(5, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return llama(self.q(x), self.cos, self.sin)

    model = fxprec.convert(UnderAutocast(), fuse=True).module
    model(torch.randn(2, 3, 5, 8)).sum().backward()
    assert model.cos.grad is not None and model.cos.grad.abs().sum() > 0
    assert not fxprec.graph_module(model).graph.find_nodes(op="call_function", target=rope)


@outside
def test_negated_memory_and_subclasses_are_torchs() -> None:
    x, cos = torch.randn(2, 3, 5, 8), torch.randn(5, 8)
    negated = torch._neg_view(-cos)
    assert negated.is_neg()
    for given in ((x, negated, cos), (x, cos, negated), (torch._neg_view(-x), cos, cos)):
        torch.testing.assert_close(rope(*given, 4, True), llama(*given))
        torch.testing.assert_close(rope_file.rope(*given, compiled=not why_not()), llama(*given))

    class Own(torch.Tensor):
        pass

    assert type(rope(x.as_subclass(Own), cos, cos, 4, True)) is Own
