"""The error ledger: its columns add up to the measured error, its reference is float64, and it leaves no trace."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec
from as_it_was import unchanged
from fxprec.model.conversion import conversion_of
from fxprec.numerics import audit, locate, ranges, tune
from fxprec.numerics.audit import InputErrors, ledger_of
from fxprec.numerics.problem import Problem


class Net(nn.Module):
    """A linear layer, something in the middle, and a linear layer."""

    def __init__(self, middle: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 5)
        self.parts = nn.ModuleDict(parts)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x), **self.parts))


def in_place(h: Tensor) -> Tensor:
    h = h * 2
    h[:, ::2] += 1
    h[:, 3].mul_(h[:, 4].clone())
    return h.relu_()


def overlapping(h: Tensor) -> Tensor:
    return h.unfold(1, 4, 2).mean(-1).repeat_interleave(2, 1)[:, :16].expand(3, -1, -1).sum(0).repeat(1, 2)[:, :16]


def several_results(h: Tensor) -> Tensor:
    low, high = h.chunk(2, 1)
    values, order = high.sort(1)
    return torch.cat([low.cumsum(1), values.gather(1, order)], 1)


def routed(h: Tensor, a: nn.Module, b: nn.Module) -> Tensor:
    chosen = h.mean(1, keepdim=True) > 0
    return torch.where(chosen, a(h), b(h)) * h.topk(1).values


def counted(h: Tensor) -> Tensor:
    position = torch.zeros(h.shape[0], dtype=torch.int64)
    position += torch.arange(h.shape[0])
    position[1:].add_(position[:-1].clone())
    return h + F.one_hot(position % 16, 16) * h.sigmoid()


def as_complex(h: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(h)
    return torch.fft.irfft(spectrum * torch.polar(torch.ones(9), torch.arange(9.0)), n=16)


def without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().amax().exp()
    return h / scale + h.detach().square()


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def broken(h: Tensor, norm: nn.Module) -> Tensor:
    h = norm(h)
    torch._dynamo.graph_break()
    return h.tanh() * 3 if h.abs().max().item() > 0 else h


def attention(h: Tensor, dropout: float) -> Tensor:
    """Causal where nothing is dropped: [8, 16] is 2 of batch, 2 heads, 4 tokens, 8 features."""
    heads = h.view(2, 2, 4, 8)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout, is_causal=not dropout).reshape(8, 16)


def masked_attention(h: Tensor, mask: Tensor) -> Tensor:
    """A mask and no dropout: [8, 16] is 2 of batch, 2 heads, 4 tokens, 8 features."""
    heads = h.view(2, 2, 4, 8)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).reshape(8, 16)


def norms(h: Tensor, a: nn.Module, b: nn.Module, c: nn.Module) -> Tensor:
    return c(b(a(h)).unsqueeze(2)).squeeze(2)


def convolution(h: Tensor, a: nn.Module) -> Tensor:
    return F.max_pool2d(a(h.view(8, 1, 4, 4)), 2).flatten(1)


def recurrent(h: Tensor, a: nn.Module) -> Tensor:
    out, (hidden, cell) = a(h.view(8, 4, 4))
    return out.mean(1) * hidden[-1].repeat(1, 2) + cell[0].repeat(1, 2)


def recomputed(h: Tensor, a: nn.Module) -> Tensor:
    return checkpoint(lambda v: torch.tanh(a(v)), h, use_reentrant=False)


CASES: dict[str, Callable[[], Net]] = {
    "in place": lambda: Net(in_place),
    "overlapping": lambda: Net(overlapping),
    "several results": lambda: Net(several_results),
    "routed": lambda: Net(routed, a=nn.Linear(16, 16), b=nn.Linear(16, 16)),
    "counted": lambda: Net(counted),
    "complex": lambda: Net(as_complex),
    "norms": lambda: Net(norms, a=nn.LayerNorm(16), b=nn.RMSNorm(16), c=nn.GroupNorm(4, 16)),
    "batch norm": lambda: Net(lambda h, a: F.gelu(a(h)), a=nn.BatchNorm1d(16)),
    "dropout": lambda: Net(lambda h: F.dropout(F.silu(h), 0.3)),
    "random": lambda: Net(lambda h: h + torch.rand_like(h) * torch.randn(16)),
    "rrelu": lambda: Net(lambda h: F.rrelu(h, training=True)),
    "attention": lambda: Net(lambda h: attention(h, 0.0)),
    "attention with a mask": lambda: Net(lambda h: masked_attention(h, torch.tensor([[True, True, False, True]]))),
    "attention with a bias": lambda: Net(lambda h: masked_attention(h, torch.tensor([[0.3, -0.1, 0.2, 0.7]]))),
    "attention with dropout": lambda: Net(lambda h: attention(h, 0.2)),
    "convolution": lambda: Net(convolution, a=nn.Conv2d(1, 4, 3, padding=1)),
    "recurrent": lambda: Net(recurrent, a=nn.LSTM(4, 8, 2, batch_first=True, bidirectional=True)),
    "recurrent, by views in place": lambda: Net(recurrent, a=nn.GRU(4, 8, batch_first=True, bidirectional=True)),
    "checkpoint": lambda: Net(recomputed, a=nn.Linear(16, 16)),
    "function": lambda: Net(lambda h: Squared.apply(h)),
    "broken": lambda: Net(broken, norm=nn.LayerNorm(16)),
    "no grad": lambda: Net(without_gradient),
}
every_case = pytest.mark.parametrize("name", CASES)


def converted(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A converted model, and a copy of it from before."""
    torch.manual_seed(0)
    model = CASES[name]().train()
    before = copy.deepcopy(model)
    return fxprec.convert(model, **options)[0], before


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 12, generator=generator), torch.randint(0, 5, (8,), generator=generator)


@every_case
@pytest.mark.parametrize("gradients", [False, True])
def test_the_columns_add_up_to_the_measured_error(name: str, gradients: bool) -> None:
    model, _ = converted(name)
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    torch.manual_seed(3)
    with unchanged(model):
        ledger = audit(model, [(x, y)], F.cross_entropy, gradients=gradients)
    (sample,) = ledger.samples
    assert sample.low == F.cross_entropy(model(x), y).item(), "it explains what runs, random numbers and all"
    assert sample.measured != 0 and abs(sample.explained - sample.measured) <= 1e-10 * abs(sample.measured)
    assert ledger.explained == pytest.approx(sum(row.contribution for row in ledger.rows), rel=1e-10)
    assert sum(row.share for row in ledger.rows) == pytest.approx(1)
    assert any(row.backward for row in ledger.rows) == gradients
    assert not ledger.remarks


RANDOM = ("dropout", "random", "rrelu", "attention with dropout")


@pytest.mark.parametrize(
    ("name", "level"), zip([name for name in CASES if name not in RANDOM], itertools.cycle(["O1", "O2"]), strict=False)
)
def test_the_reference_is_the_model_in_float64(name: str, level: str) -> None:
    model, original = converted(name, level=level)
    x, y = batch()
    original = original.double()
    expected = F.cross_entropy(original(x.double()), y)
    expected.backward()
    ledger = audit(model, [(x, y)], F.cross_entropy)
    sample, error = ledger.samples[0], F.cross_entropy(model(x), y).item() - expected.item()
    assert sample.reference == pytest.approx(expected.item(), rel=1e-12, abs=1e-6 * abs(error)), "errors are in FP32"
    gradients = audit(model, [(x, y)], F.cross_entropy, gradients=True).parameters
    for path, parameter in original.named_parameters():
        assert parameter.grad is not None
        assert gradients[path].norm == pytest.approx(parameter.grad.norm().item(), rel=1e-6, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("made_within", [False, True])
def test_inference_mode_is_left_for_what_is_asked(made_within: bool) -> None:
    """It has no derivatives: all errors of the rows before were the loss's bend."""
    model, _ = converted("batch norm")
    model.eval()
    x, y = batch()

    def rows(*batches: Any) -> dict[str, float]:
        return {row.node: row.contribution for row in audit(model, batches, F.cross_entropy).rows}

    with torch.no_grad():
        expected = rows((x, y))
    with torch.inference_mode():
        own = (x.clone(), y.clone()) if made_within else (x, y)
        assert own[0].is_inference() is made_within
        assert rows(own) == expected and len(expected) > 3
        assert locate(model, own, F.cross_entropy) is None
        assert ranges(model, [own], F.cross_entropy).rows
        assert tune(model, [own] * 2, F.cross_entropy, time=2.0).start.measured_error > 0
        assert torch.is_inference_mode_enabled()
    with torch.no_grad():
        assert rows(own) == expected


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_that_were_asked_for_are_made_where_none_are_recorded(mode: Any) -> None:
    model, _ = converted("norms")
    expected = audit(model, [batch()], F.cross_entropy, gradients=True)
    with mode():
        found = audit(model, [batch()], F.cross_entropy, gradients=True)
    assert found.measured == expected.measured and found.parameters == expected.parameters

    class Detached(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    detached = fxprec.convert(Detached(torch.tanh))[0]
    with pytest.raises(ValueError, match="depends on no parameter that wants a gradient"):
        audit(detached, [batch()], F.cross_entropy, gradients=True)


@torch.library.custom_op("test_audit::scaled", mutates_args=())
def scaled(x: Tensor, factor: Tensor, unused: Tensor | None = None) -> Tensor:
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: Tensor, unused: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.factor, None, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@pytest.mark.parametrize("several", [False, True])
def test_a_derivative_that_an_op_does_not_have_is_remarked_on(several: bool) -> None:
    """What comes in there would be its bend, and nobody would know."""
    torch.manual_seed(0)
    made = Net(lambda h, a: torch.ops.test_audit.scaled(h, a(h), h.detach()), a=nn.Linear(16, 16))
    model, inputs = fxprec.convert(made)[0], [batch(seed) for seed in range(1 + several)]
    (remark,) = audit(model, inputs, F.cross_entropy).remarks
    assert remark.startswith("test_audit::scaled has no derivative in factor: errors that came in there are its bend")


def test_the_verdict_names_what_it_is_about() -> None:
    """Losses stand beside the error of a loss only: that of gradients is of another size."""
    model, _ = converted("norms")
    of_loss, of_gradients = (audit(model, [batch()], F.cross_entropy, gradients=each) for each in (False, True))
    assert of_loss.headline.startswith(f"loss {of_loss.samples[0].low:.6g}, reference ")
    length = math.sqrt(sum(each.norm**2 for each in of_gradients.parameters.values()))
    error = f"error of the gradients: {of_gradients.measured:.3e}, of a length of {length:.4g}; "
    assert of_gradients.headline.startswith(error)


class Branches(nn.Module):
    """A value that several nodes read: one of them through a view, one in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) * self.c(h.transpose(0, 1)).transpose(0, 1) + h * h


def test_what_each_reader_would_lose_is_told_where_it_is_asked_for() -> None:
    torch.manual_seed(0)
    original = Branches()
    model = fxprec.convert(copy.deepcopy(original), dtype=torch.bfloat16)[0]
    inputs = [(torch.randn(16, 16), torch.randn(16, 16)) for _ in range(2)]
    reads = InputErrors(torch.bfloat16)
    asked, unasked = (ledger_of(Problem(model, F.mse_loss), inputs, reads=each) for each in (reads, None))
    assert [row.node for row in asked.rows] == [row.node for row in unasked.rows]
    assert [row.rounding for row in asked.rows] == pytest.approx([row.rounding for row in unasked.rows], rel=1e-6)
    double = original.double()
    for found, (x, y) in zip(reads.batches, inputs, strict=True):
        h = double.a(x.double()).detach()
        rounding = h.bfloat16().double() - h
        ways = [h.clone().requires_grad_() for _ in range(4)]
        F.mse_loss(double.b(ways[0]) * double.c(ways[1].T).T + ways[2] * ways[3], y.double()).backward()
        *parts, one, other = [float((each.grad * rounding).sum()) for each in ways]
        for key, part in {
            (0, "linear_1", 0): parts[0],
            (0, "linear_2", 0): parts[1],
            (0, "mul_1", 0): one + other,
        }.items():
            assert found[key] == pytest.approx(part, rel=0.05, abs=1e-6)
        assert (0, "linear_1", 1) in found, "weights are read as well"


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("cuda", torch.float32)])
def test_by_default_the_reference_is_float64_where_that_is_fast_enough(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    def stop(model: nn.Module, run: object, reference: torch.dtype, *_: object) -> None:
        raise Stopped(reference)

    model, _ = converted("norms")
    monkeypatch.setitem(ledger_of.__globals__, "record", stop)
    object.__setattr__(conversion_of(model).settings, "device", device)
    for wish, expected in ((None, dtype), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        with pytest.raises(Stopped) as stopped:
            audit(model, [batch()], F.cross_entropy, reference=wish)
        assert stopped.value.args == (expected,)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.first(x)
        return {"logits": self.last(h), "rest": [h, {"own": h * 2}, (h,)]}


def test_a_loss_may_write_to_what_the_model_gives() -> None:
    seen: list[Any] = []

    def loss(output: dict[str, Any], target: Tensor) -> Tensor:
        seen.append((type(output), *map(type, output["rest"])))
        output["rest"].append(1)
        output["rest"][1].clear()
        del output["rest"]
        return F.cross_entropy(output.pop("logits"), target)

    model = fxprec.convert(Named()).module
    x, y = batch()
    loss(model(x), y)
    assert audit(model, [(x, y)], loss).samples[0].measured != 0
    assert locate(model, (x, y), loss) is None
    assert set(seen) == {(dict, Tensor, dict, tuple)}
