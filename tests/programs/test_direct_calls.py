"""Direct calls: a frozen model's loops by the shortest way give what they gave, for whatever comes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
from fxprec.kernels.calls import rope as rope_calls
from fxprec.kernels.cpu import attention
from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.kernels.cpu.packed import can_pack
from fxprec.kernels.rows.program.prices import SlowerThanOps
from fxprec.kernels.rows.run import region
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.settings import Settings

pytestmark = pytest.mark.skipif(
    bool(why_not()) or not can_pack(torch.bfloat16), reason=why_not() or "no oneDNN with bfloat16 here"
)


class Layer(nn.Module):
    """Norms, a gate, and queries that turn: (N, T, 32), heads first or last in memory."""

    def __init__(self, heads_last: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.up, self.gate, self.down = (nn.Linear(32, 32) for _ in range(5))
        self.first, self.second = nn.RMSNorm(32), nn.LayerNorm(32)
        angles = torch.arange(64)[:, None] * 10.0 ** -(torch.arange(4) / 4)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))
        self.heads_last = heads_last

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        y = self.first(x)
        q, k = (layer(y).view(n, t, 4, 8).transpose(1, 2) for layer in (self.q, self.k))
        cos, sin = self.cos[:t], self.sin[:t]
        q, k = (each * cos + torch.cat((-each[..., 4:], each[..., :4]), -1) * sin for each in (q, k))
        y = F.scaled_dot_product_attention(q, k, k).transpose(1, 2).reshape(n, t, 32)
        y = self.second(y + x)
        return self.down(F.silu(self.gate(y)) * self.up(y)) + y


@pytest.fixture(autouse=True)
def always_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sizes that are too small to gain."""
    monkeypatch.setattr(region, "check_gain", lambda *_: None)


def frozen(model: nn.Module, x: Tensor) -> nn.Module:
    fxprec.convert(model.eval(), fuse=True)
    with torch.no_grad():
        model(x)
        fxprec.freeze(model)
        model(x)
    return model


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who went the long way."""
    calls: list[str] = []
    forward, rope = FusedRegion.forward, rope_calls._as_the_kernel_takes

    def called(self: FusedRegion, *inputs: Any) -> Any:
        calls.append(self.name)
        return forward(self, *inputs)

    def tables(*args: Any) -> Any:
        calls.append("rope")
        return rope(*args)

    monkeypatch.setattr(FusedRegion, "forward", called)
    monkeypatch.setattr(rope_calls, "_as_the_kernel_takes", tables)
    return calls


class Attends(nn.Module):
    """(N, T, 64) -> (N, T, 64): 8 heads, of keys 8 or 2, causal or not."""

    def __init__(self, groups: int, causal: bool) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 16 * groups)
        self.groups, self.causal = groups, causal

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q = self.q(x).view(n, t, 8, 8).transpose(1, 2)
        k, v = self.kv(x).view(n, t, 2, self.groups, 8).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=0.3, enable_gqa=True)
        return y.transpose(1, 2).reshape(n, t, 64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [8, 2])
def test_attention_goes_the_shortest_way_and_gives_the_same(
    groups: int, causal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(Settings, "_attention", ("compiled", 0.0, 0.0))
    long: list[bool] = []
    serves = attention.serves

    def asked(*given: Any, **named: Any) -> bool:
        long.append(True)
        return serves(*given, **named)

    monkeypatch.setattr(attention, "serves", asked)
    plain = Attends(groups, causal)
    x, z = torch.randn(2, 48, 64), torch.randn(3, 17, 64)
    model = frozen(copy.deepcopy(plain), x)
    exact = copy.deepcopy(plain).double()
    with torch.no_grad():
        low = copy.deepcopy(plain).bfloat16()
        for each in (x, z):
            model(each), model(each)
            long.clear()
            ours, right = model(each), exact(each.double())
            assert not long
            assert (ours - right).norm() <= 2 * (low(each.bfloat16()) - right).norm()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            names = [event.name for event in _profiled(model, x)]
        assert "aten::_safe_softmax" in names or "aten::_softmax" in names or "aten::softmax" in names
        assert "aten::softmax" not in [event.name for event in _profiled(model, x)]


def _profiled(model: nn.Module, x: Tensor) -> Any:
    with torch.profiler.profile() as profiler:
        model(x)
    return profiler.events() or ()


def test_the_second_call_goes_the_shortest_way_and_gives_the_same(counted: list[str]) -> None:
    torch.manual_seed(0)
    plain = Layer()
    x, z = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    model = frozen(copy.deepcopy(plain), x)
    with torch.no_grad():
        model(x), model(x)
        counted.clear()
        ours = model(z)
        assert not counted
    own = fxprec.convert(copy.deepcopy(plain).eval(), fuse=True).module
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=False):
        long = own(z)
    assert counted
    right = plain.double()(z.double())
    assert (ours - right).norm() <= 2 * (long - right).norm()


def test_other_sizes_and_layouts_are_looked_at_anew(counted: list[str]) -> None:
    torch.manual_seed(0)
    model = frozen(Layer(), torch.randn(2, 16, 32))
    sizes = [torch.randn(n, t, 32) for n, t in ((2, 16), (1, 16), (2, 7), (3, 1), (0, 5))]
    sizes += [torch.randn(16, 2, 32).transpose(0, 1), torch.randn(2, 32, 16).mT, torch.randn(2, 16, 64)[..., ::2]]
    with torch.no_grad():
        first = [model(each) for each in sizes]
        for _ in range(2):
            again = [model(each) for each in sizes]
        counted.clear()
        last = [model(each) for each in sizes]
        same = [model(each.contiguous()) for each in sizes]
    for each in zip(first, again, last, same, strict=True):
        assert all(torch.equal(each[0], other) for other in each[1:])


def test_whoever_looks_on_sees_the_ops(counted: list[str]) -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 16, 32)
    model = frozen(Layer(), x)
    with torch.no_grad():
        right = model(x)
        for _ in range(2):
            with Seen() as seen:
                assert torch.allclose(model(x), right, rtol=2e-2, atol=2e-2)
            assert any("region_forward" in each for each in seen.ops) and counted
        each = torch.func.vmap(model)(x[None])[0]
    assert torch.allclose(each, right, rtol=2e-2, atol=2e-2)
    negated = torch.complex(torch.zeros(2, 16, 32), x).conj().imag
    assert negated.is_neg()
    with torch.no_grad():
        assert torch.allclose(model(negated), model(-x), rtol=2e-2, atol=2e-2)
    y = x.clone().requires_grad_()
    model(y).sum().backward()
    assert y.grad is not None and y.grad.abs().sum() > 0


def test_changed_weights_and_copies() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32)
    model = frozen(Layer(), x)
    with torch.no_grad():
        before = model(x)
        other = copy.deepcopy(model)
        model.second.weight.mul_(2)
        assert not torch.equal(model(x), before) and torch.equal(model(x), model(x))
        assert torch.equal(other(x), before)


def test_programs_that_users_see_keep_their_modules() -> None:
    x = torch.randn(2, 16, 32)
    model = frozen(Layer(), x)
    assert fxprec.graph_module(model).graph.find_nodes(op="call_module")


class Force(nn.Module):
    """Makes a leaf of its own, for whose gradient its caller asks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(32), nn.Linear(32, 32)
        angles = torch.arange(16)[:, None] * 10.0 ** -(torch.arange(4) / 4)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        y = self.norm(leaf + 1).view(2, 16, 4, 8).transpose(1, 2)
        y = y * self.cos + torch.cat((-y[..., 4:], y[..., :4]), -1) * self.sin
        return (y.float() ** 3).sum(), leaf, self.last(x)


def test_gradients_of_leaves_that_a_frozen_graph_makes() -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(2, 16, 32), Force()
    energy, leaf, _ = plain(x)
    (right,) = torch.autograd.grad(energy, leaf)
    model = frozen(copy.deepcopy(plain), x)
    for _ in range(2):
        with torch.no_grad():
            model(x)
        for _ in range(3):
            energy, leaf, _ = model(x)
            torch.testing.assert_close(torch.autograd.grad(energy, leaf)[0], right, rtol=0.05, atol=0.05)


def test_a_buffer_that_is_negated_later_and_what_the_report_says(counted: list[str]) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
            self.register_buffer("shift", torch.randn(32, dtype=torch.complex64).imag)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.silu(self.first(x)) * self.shift)

    torch.manual_seed(0)
    x = torch.randn(4, 32)
    model = frozen(Shifted(), x)
    with torch.no_grad():
        before = [model(x) for _ in range(3)][-1]
        real = torch.complex(torch.zeros(32), -model.shift)
        model.shift = real.conj().imag
        assert model.shift.is_neg()
        for _ in range(3):
            torch.testing.assert_close(model(x), before, rtol=0.02, atol=0.02)


def test_a_region_says_what_ran_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def dear(_: Any, plan: Any, __: Any) -> None:
        if plan.inputs[0].shape[0] < 8:
            raise SlowerThanOps("too small")

    monkeypatch.setattr(region, "check_gain", dear)
    x = torch.randn(16, 16, 32)
    model = frozen(Layer(), x)
    regions = [each for gm in fxprec.graphs(model) for each in gm.modules() if isinstance(each, FusedRegion)]
    for _ in range(3):
        for given, path in ((x, {"loops"}), (x[:2], {"aten"})):
            with torch.no_grad():
                model(given)
            assert {each.path for each in regions} == path
