"""The traps of the design, one test each: every one fails without its cure."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec

LOW = torch.bfloat16


def both(function, *inputs, tolerance=0.05, **settings):
    """Run a function or module and its conversion on the same inputs; return the converted module."""
    expected = function(*copy.deepcopy(inputs))
    module, _ = fxprec.convert(copy.deepcopy(function) if isinstance(function, nn.Module) else function, **settings)
    actual = module(*copy.deepcopy(inputs))
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    return module


# -- symbolic_trace


def test_batch_norm_statistics_move_at_run_time_not_at_trace_time():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    converted, _ = fxprec.convert(model, capture="symbolic")
    assert model[1].num_batches_tracked == 0 and torch.equal(model[1].running_mean, torch.zeros(4))
    for _ in range(3):
        converted(torch.randn(2, 1, 6, 6))
    assert model[1].num_batches_tracked == 3
    assert model[1].running_mean.abs().sum() > 0
    assert model[1].running_mean.dtype is torch.float32


class Mutating(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        self.last = x
        return self.fc(x)


def test_a_forward_that_writes_attributes_is_not_traced_and_leaves_no_proxy():
    model = Mutating()
    converted, _ = fxprec.convert(model)
    assert model.count == 0 and not hasattr(model, "last")
    x = torch.randn(2, 4)
    converted(x)
    assert model.count == 1
    assert isinstance(model.last, torch.Tensor) and not isinstance(model.last, torch.fx.Proxy)


class Protected(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        with torch.autocast("cpu", enabled=False):
            return self.fc(y.float())


def test_a_disabled_autocast_region_stays_fp32(tools):
    module = both(Protected(), torch.randn(2, 4))
    assert tools.matmul_dtypes(module, torch.randn(2, 4)) == {LOW: 1, torch.float32: 1}


def test_in_place_ops_whose_result_nobody_reads_survive():
    def f(x, w):
        y = F.linear(x, w)
        y.clamp_(0.1, 0.2)
        torch.relu_(y)
        z = y * 1
        z.add_(1.0)
        return z

    both(f, torch.randn(3, 4), torch.randn(4, 4))


# -- aliases and epochs


def test_writes_through_a_view_reach_its_base():
    def f(x, w):
        y = F.linear(x, w)
        view = y[:, :2]
        view.mul_(10.0)
        return F.linear(y, w)

    both(f, torch.randn(3, 4), torch.randn(4, 4), tolerance=0.3)


def test_reads_before_and_after_a_write_differ():
    def f(x, w):
        y = x.clone()
        before = F.linear(y, w)
        y.add_(5.0)
        return before, F.linear(y, w)

    both(f, torch.randn(3, 4), torch.randn(4, 4), tolerance=0.2)


def test_an_input_that_is_written_is_written_in_its_own_dtype():
    def f(x, w):
        x.add_(F.linear(x, w))
        return x.sum()

    w = torch.randn(4, 4)
    x = torch.randn(3, 4)
    ours, theirs = x.clone(), x.clone()
    f(theirs, w)
    module, _ = fxprec.convert(f)
    module(ours, w)
    assert ours.dtype is torch.float32
    torch.testing.assert_close(ours, theirs, atol=0.1, rtol=0.05)


# -- masks


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_masked_fill_with_the_lowest_fp32(capture):
    def f(q, k, mask):
        scores = q @ k.transpose(-1, -2)
        scores = scores.masked_fill(mask, torch.finfo(torch.float32).min)
        return scores.softmax(-1)

    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    both(f, torch.randn(2, 4, 8), torch.randn(2, 4, 8), mask, capture=capture, tolerance=0.02)


def test_masked_fill_with_the_lowest_of_the_tensors_own_dtype():
    def f(q, k, mask):
        scores = q @ k.transpose(-1, -2)
        return scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)

    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    both(f, torch.randn(2, 4, 8), torch.randn(2, 4, 8), mask, tolerance=0.02)


def test_float16_mask_constants_do_not_overflow():
    def f(q, k, mask):
        return (q @ k.transpose(-1, -2) + mask * -1e9).softmax(-1)

    mask = torch.ones(2, 2).triu(1)
    both(f, torch.randn(2, 2), torch.randn(2, 2), mask, dtype=torch.float16, tolerance=0.01)


# -- mixed dtypes that eager autocast refuses


def _index_put_(x, w):
    y = torch.zeros(3, 4)
    y.index_put_((torch.tensor([0, 1]),), F.linear(x, w)[:2])
    return y


def _setitem(x, w):
    y = torch.zeros(3, 4)
    y[1] = F.linear(x, w)[0]
    return y


def _setitem_low_target(x, w):
    y = F.linear(x, w)
    y[1] = x[0]
    return y


def _scatter(x, w):
    return x.scatter(0, torch.zeros(3, 4, dtype=torch.int64), F.linear(x, w))


def _scatter_add(x, w):
    return x.scatter_add(0, torch.zeros(3, 4, dtype=torch.int64), F.linear(x, w))


def _index_add(x, w):
    return x.index_add(0, torch.tensor([0, 0, 2]), F.linear(x, w))


def _index_copy(x, w):
    return x.index_copy(0, torch.tensor([2, 1, 0]), F.linear(x, w))


def _masked_scatter(x, w):
    return x.masked_scatter(x > 0, F.linear(x, w))


def _lerp(x, w):
    return x.lerp(F.linear(x, w), 0.3)


def _dot(x, w):
    return x[0].dot(F.linear(x, w)[0])


def _bilinear(x, w):
    return F.bilinear(x, F.linear(x, w), w.view(1, 4, 4))


def _tensordot(x, w):
    return torch.tensordot(x, F.linear(x, w), dims=([1], [1]))


def _addmm_(x, w):
    y = x.clone()
    y.addmm_(F.linear(x, w), w)
    return y


MIXED = [
    _index_put_, _setitem, _setitem_low_target, _scatter, _scatter_add, _index_add, _index_copy, _masked_scatter, _lerp,
    _dot, _bilinear, _tensordot, _addmm_,
]  # fmt: skip


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("function", MIXED, ids=lambda function: function.__name__)
def test_mixed_dtypes(function, capture):
    both(function, torch.randn(3, 4), torch.randn(4, 4), capture=capture, tolerance=0.15)


# -- free ports


def _stack(layers=4):
    class PreNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(layers))
            self.ups = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

        def forward(self, x):
            for norm, up in zip(self.norms, self.ups, strict=True):
                x = x + F.gelu(up(norm(x)))
            return x

    return PreNorm()


def test_norms_do_not_turn_a_low_stream_to_fp32(tools):
    module, _ = fxprec.convert(_stack(), (torch.randn(2, 8),), level="O2")
    activations = [
        node for node in module.graph.nodes
        if node.meta.get("inserted") and node.args[0].meta.get("kind") != "parameter"
    ]  # fmt: skip
    assert len(activations) == 2  # on entry, and the output back
    norms = [node for node in module.graph.nodes if node.meta.get("op") and node.meta["op"].name == "layer_norm"]
    assert {node.meta["precision"].output for node in norms} == {LOW}
    assert {node.meta["precision"].compute for node in norms} == {torch.float32}


def test_the_residual_stream_stays_fp32_at_o1():
    module, _ = fxprec.convert(_stack(), (torch.randn(2, 8),), level="O1")
    adds = [node for node in module.graph.nodes if node.meta.get("op") and node.meta["op"].name == "add"]
    assert {node.meta["precision"].output for node in adds} == {torch.float32}


# -- optimizers and shadows


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_is_seen_under_no_grad(kind, fused):
    """Fused optimizers leave ``_version`` alone."""
    model = nn.Linear(4, 4)
    converted, _ = fxprec.convert(model)
    optimizer = kind(model.parameters(), lr=0.5, fused=fused)
    x = torch.randn(2, 4)
    converted(x).sum().backward()
    with torch.no_grad():
        before = converted(x)
    optimizer.step()
    with torch.no_grad():
        after = converted(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, F.linear(x, model.weight, model.bias), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_first_then_training_gives_gradients(context):
    model = nn.Linear(4, 4)
    converted, _ = fxprec.convert(model)
    x = torch.randn(2, 4)
    with context():
        converted(x)
    converted(x).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.abs().sum() > 0


def test_frozen_then_unfrozen_gives_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    converted, _ = fxprec.convert(model)
    model[0].requires_grad_(False)
    x = torch.randn(2, 4)
    converted(x).sum().backward()
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    converted(x).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_explicit_casts_are_obeyed():
    def f(x, w):
        y = F.linear(x, w).float()
        z = y.to(torch.float64)
        return z * 2, y.half()

    module, _ = fxprec.convert(f)
    wide, narrow = module(torch.randn(2, 4), torch.randn(4, 4))
    assert wide.dtype is torch.float64 and narrow.dtype is torch.float16


def test_a_version_counter_is_asked_of_the_tensor_itself():
    """Not of a cast of it, whose counter is another."""

    class Versions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            before = h._version
            h.add_(1)
            return h * (h._version - before + 1)

    torch.manual_seed(0)
    both(Versions(), torch.ones(2, 4), tolerance=0.1)


def test_a_range_is_integers():
    """dynamo hands ``torch.as_tensor`` the range itself."""

    class Offsets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            return h + torch.as_tensor(range(4)).to(h) + torch.as_tensor(range(0), device=h.device).numel()

    both(Offsets(), torch.ones(2, 4), capture="dynamo")
