"""regions: on a GPU those of few elements and few ops are torch's, until a call brings more elements."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
import kernel_tools
from fxprec import settings
from fxprec.kernels.calls import sizes
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.graph.annotations import graph_notes
from fxprec.passes.graph.text import format_graph
from fxprec.passes.policy.policy import Policy

X, W, B = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
#: Elements of X's region are one less than these.
FEWEST = 33


@pytest.fixture
def _fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known here as on a GPU, where regions of so few elements are few."""
    monkeypatch.setattr(sizes, "FEWEST", FEWEST)


@pytest.fixture
def _by_size(monkeypatch: pytest.MonkeyPatch, _fewest: None) -> None:
    """Models are converted as on a GPU, with regions that run op by op."""
    made = settings.Settings.context

    def context(self: settings.Settings, gradients: bool = True, by_size: bool = True):
        return dataclasses.replace(made(self, gradients), by_size=by_size)

    monkeypatch.setattr(settings.Settings, "context", context)


def activated(x, w, b):
    return F.gelu(F.linear(x, w, b)) * 2


def normed(x, w, b):
    """As Llama's norm is written by hand: five ops."""
    h = F.linear(x, w, b)
    return h * (h.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def fused(tools, function, rows=4, by_size=True, **options):
    ctx = tools.context(regions="aten", device="cuda", by_size=by_size, **options)
    return tools.rewritten(tools.traced(function, torch.randn(rows, 8), W, B), ctx, until="fuse")


def names(gm) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="call_module")]


@pytest.mark.slow
@pytest.mark.usefixtures("_fewest")
def test_a_region_of_few_elements_is_left_with_its_bias_in_the_product(tools):
    plain = tools.rewritten(tools.traced(activated, X, W, B), tools.context(device="cuda"), until="fuse")
    gm = fused(tools, activated)
    assert format_graph(gm) == format_graph(plain)
    assert "linear(%x_bf16, %w_bf16, %b_bf16)" in format_graph(gm)
    assert graph_notes(gm).declined == [
        "fuse: fused_gelu_mul: 32 elements are few, and a GPU would wait for its host; fuse=True fuses it, or its name "
        "with True"
    ]


@pytest.mark.usefixtures("_fewest")
def test_of_more_elements_or_of_many_ops_it_is_a_region(tools):
    assert names(fused(tools, activated, rows=5)) == ["fused_gelu_mul"]
    assert names(fused(tools, normed)) == ["fused_pow_mean_add_rsqrt_mul"]
    assert names(fused(tools, activated, by_size=False)) == ["fused_gelu_mul"]


@pytest.mark.usefixtures("_fewest")
def test_the_user_decides_over_the_size(tools):
    assert names(fused(tools, activated, region_choices=(("*gelu*", True),))) == ["fused_gelu_mul"]
    gm = fused(tools, activated, rows=5, region_choices=(("*gelu*", False),))
    assert not names(gm) and graph_notes(gm).declined == ["fuse: fused_gelu_mul: fuse says no"]


@pytest.mark.usefixtures("_fewest")
def test_of_sizes_that_are_not_known_it_is_a_region(tools):
    ctx = tools.context(regions="aten", device="cuda", by_size=True)
    assert names(tools.rewritten(tools.traced(activated), ctx, until="fuse")) == ["fused_gelu_mul"]


def test_only_where_a_gpu_chooses_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "why_no_kernels", lambda device: "")  # nothing is launched

    def by_size(device, **options):
        found = settings.Settings(Policy.preset("O1"), torch.bfloat16, device=device, **options)
        return found.context().by_size

    assert by_size("cuda") and by_size("cuda", fuse={"*gelu*": False})
    assert not by_size("cuda", fuse=True) and not by_size("cuda", fuse=False) and not by_size("cuda", fuse="aten")
    assert not by_size("cpu") and not by_size("cpu", fuse="aten")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return F.gelu(self.linear(x)) * 2


def captures(model) -> int:
    return fxprec.report(model).headline.captures


def regions(model) -> list[list[str]]:
    return [[n for n, each in gm.named_modules() if isinstance(each, FusedRegion)] for gm in fxprec.graphs(model)]


@pytest.mark.usefixtures("_by_size")
def test_more_elements_make_a_graph_with_regions_which_serves_all_from_then_on():
    block = Block()
    model, _ = fxprec.convert(block, (X,), fuse="aten")
    assert regions(model) == [[]]
    assert "32 elements are few" in str(fxprec.report(model))
    model(X)
    model(torch.randn(2, 8))
    assert regions(model) == [[]]
    model(torch.randn(5, 8))
    assert regions(model) == [["fused_gelu_mul"]]
    for rows in (4, 100, 1):
        x = torch.randn(rows, 8)
        wanted = F.gelu(F.linear(x.bfloat16(), block.linear.weight.bfloat16(), block.linear.bias.bfloat16())) * 2
        assert torch.allclose(model(x), wanted.float(), atol=0.02)
    assert captures(model) == 2  # nothing was captured for these


@pytest.mark.usefixtures("_by_size")
def test_without_example_inputs_the_first_call_decides():
    model, _ = fxprec.convert(Block(), fuse="aten")
    assert regions(model) == [["fused_gelu_mul"]]  # nobody knows of what size
    model(X)
    assert regions(model) == [[]]
    model(torch.randn(100, 8))
    assert regions(model) == [["fused_gelu_mul"]]
    model(X)
    assert captures(model) == 3
    large, _ = fxprec.convert(Block(), fuse="aten")
    large(torch.randn(100, 8))
    large(X)
    assert captures(large) == 2


class Scores(nn.Module):
    """A region of few elements that grows as the square of the input: 16 of 4 rows, of which 32 have 1,024."""

    def forward(self, x):
        return (x @ x.transpose(0, 1)).relu() * 2


class Cached(nn.Module):
    """One whose region does not grow with the second input."""

    def forward(self, x, cache):
        return F.gelu(x) * 2, cache.sum()


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, n=1):
        return F.gelu(self.weight) * n


@pytest.mark.usefixtures("_by_size")
def test_whatever_grows_two_graphs_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = fxprec.convert(Scores(), (torch.randn(4, 8),), fuse="aten")
    assert regions(model) == [[]]
    for rows in range(5, 40, 3):
        model(torch.randn(rows, 8))
        fused = regions(model) == [["fused_relu_mul"]]
        assert fused or rows * rows < FEWEST
    assert captures(model) == 2

    model, _ = fxprec.convert(Cached(), (X, torch.randn(10)), fuse="aten")
    for length in range(11, 60):
        model(X, torch.randn(length))
    assert captures(model) <= 2

    model, _ = fxprec.convert(Constant(), (1,), fuse="aten")
    for _ in range(20):
        model(1)
    assert captures(model) <= 2

    monkeypatch.setattr(sizes, "FEWEST", 1000)  # that 24 columns do not divide
    model, _ = fxprec.convert(
        nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Hardtanh()), (torch.randn(41, 8),), fuse="aten"
    )
    for _ in range(20):
        model(torch.randn(41, 8))
    assert captures(model) == 1


@pytest.mark.usefixtures("_by_size")
def test_an_input_that_stays_large_hides_no_growth():
    model, _ = fxprec.convert(Cached(), (torch.randn(1, 8), torch.randn(100_000)), fuse="aten")
    model(torch.randn(50, 8), torch.randn(100_000))
    assert regions(model) == [["fused_gelu_mul"]]


@pytest.mark.usefixtures("_by_size")
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_training_goes_on_where_batches_grow(capture):
    model, scaler = fxprec.convert(Block(), (torch.ones(2, 8),), fuse="aten", capture=capture)
    assert regions(model) == [[]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for rows in (2, 3, 5, 9, 2):
        optimizer.zero_grad()
        loss = model(torch.ones(rows, 8)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert ["fused_gelu_mul"] in regions(model)


@pytest.mark.gpu
@pytest.mark.skipif(not kernel_tools.CUDA, reason="no CUDA device")
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "FEWEST", 1 << 16)
    model, _ = fxprec.convert(Block().cuda(), (X.cuda(),), dtype=torch.bfloat16)
    model(X.cuda()).sum().backward()
    assert regions(model) == [[]]
    x = torch.randn(1 << 13, 8, device="cuda", requires_grad=True)
    y = model(x)
    y.sum().backward()
    (region,) = [each for gm in fxprec.graphs(model) for each in gm.modules() if isinstance(each, FusedRegion)]
    assert region.path == "triton"
    wide = [each.detach().double().requires_grad_() for each in (x, model.linear.weight, model.linear.bias)]
    wanted = F.gelu(F.linear(*wide)) * 2
    wanted.sum().backward()
    assert torch.allclose(y.double(), wanted, atol=0.1) and torch.allclose(x.grad.double(), wide[0].grad, atol=0.1)
