"""regions (by way of fuse): what compiled loops take on a CPU, and what stays with torch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import fxprec
from fxprec.costs.files import shipped
from fxprec.kernels.cpu import compiled_attention
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.model.conversion import conversion_of
from fxprec.passes.graph.annotations import graph_notes
from fxprec.passes.graph.text import format_graph
from fxprec.settings import Settings

PRICES = shipped("cpu", "a CPU", 2, "other").loops
X, Y, W = torch.randn(64, 32), torch.randn(64, 32), torch.randn(32)


@pytest.fixture
def fused(tools: Any) -> Callable[..., GraphModule]:
    def rewrite(function: Any, *inputs: Tensor) -> GraphModule:
        return tools.rewritten(
            tools.traced(function, *inputs), tools.context(regions="loops", loops=PRICES), until="fuse"
        )

    return rewrite


def regions(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "call_module"]


def test_the_graph_after(fused: Any) -> None:
    def f(x: Tensor, y: Tensor, w: Tensor) -> Any:
        total = x + F.dropout(y, 0.1)
        return F.gelu(F.rms_norm(total, (32,), w, 1e-6)) @ y.T

    expecttest.assert_expected_inline(
        format_graph(fused(f, X, Y, W)),
        """\
%x: float32 = placeholder
%y: float32 = placeholder
%w: float32 = placeholder
%dropout: float32 = dropout(%y, p=0.1, training=True, inplace=False)
%fused_add_rms_norm: float32 = fused_region(%x, %dropout, %w)
%gelu: float32 = gelu(%fused_add_rms_norm)
%getattr_1: float32 = getattr(%y, 'T')
%gelu_bf16: bfloat16 = to(%gelu, torch.bfloat16)
%getattr_1_bf16: bfloat16 = to(%getattr_1, torch.bfloat16)
%matmul: bfloat16 = matmul(%gelu_bf16, %getattr_1_bf16)
%matmul_f32: float32 = to(%matmul, torch.float32)
return %matmul_f32""",
    )


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (lambda x, y, w: F.rms_norm(x, (32,), w), ["fused_rms_norm"]),  # five kernels of torch
        (lambda x, y, w: F.gelu(x, approximate="tanh"), ["fused_gelu"]),
        (lambda x, y, w: F.layer_norm(x, (32,), w), []),  # one, and a good one
        (lambda x, y, w: F.gelu(x), []),
        (lambda x, y, w: F.gelu(x) + y, []),  # a lone sum is left
        (lambda x, y, w: F.gelu(x) + y * w, ["fused_mul_add"]),
        (lambda x, y, w: F.dropout(x, 0.5) + y * w, ["fused_mul_add"]),
        (lambda x, y, w: F.dropout(x, 0.0) + y * w, ["fused_dropout_mul_add"]),  # drops nothing
    ],
)
def test_what_is_taken(fused: Any, function: Any, taken: list[str]) -> None:
    gm = fused(lambda x, y, w: function(x, y, w), X, Y, W)
    assert regions(gm) == taken
    assert all(module.prices is PRICES for module in gm.modules() if isinstance(module, FusedRegion))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return F.relu(self.norm(self.conv(x)) + x) * 2.0 + 1.0


@pytest.mark.skipif(bool(compiled_attention.why_not()), reason=compiled_attention.why_not())
def test_sums_behind_convolutions_are_left_for_packing() -> None:
    model = fxprec.convert(Residual().eval(), dtype=torch.bfloat16, fuse=True).module
    with torch.no_grad():
        model(torch.randn(2, 8, 12, 12))
    fxprec.freeze(model)
    report = fxprec.report(model)
    *_, packed = graph_notes(conversion_of(model).captured[0].gm).packed.values()
    assert packed == ("batch_norm", "add", "relu")
    assert [region.name for graph in report.graphs for region in graph.regions] == ["fused_mul_add"]


@pytest.mark.skipif(bool(compiled_attention.why_not()), reason=compiled_attention.why_not())
def test_a_model_trains_with_loops_as_without_and_its_copies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import copy

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.RMSNorm(64), nn.Linear(64, 256), nn.Linear(128, 64)

        def forward(self, x: Tensor) -> Tensor:
            gate, value = self.up(self.norm(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * value)

    monkeypatch.setattr(Settings, "_loops", None)  # whatever they take
    torch.manual_seed(0)
    original = nn.Sequential(Block(), Block())
    x = torch.randn(600, 64)
    losses = []
    for fuse in ("auto", True):
        model = fxprec.convert(copy.deepcopy(original), dtype=torch.bfloat16, fuse=fuse).module
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss))
    assert losses[1] == pytest.approx(losses[0], rel=2e-3) and losses[1][3] < losses[1][0]
    again = copy.deepcopy(model)
    assert torch.equal(again(x), model(x))
    paths = {region.path for copied in (model, again) for region in copied.modules() if isinstance(region, FusedRegion)}
    assert paths <= {"loops"}
    headline = fxprec.report(model).headline
    assert headline.regions == "5 fused: 5 loops"
    assert {region.kernels for graph in fxprec.report(model).graphs for region in graph.regions} == {2, 3}
