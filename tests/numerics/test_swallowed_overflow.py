"""An overflow that an op makes finite again is found where it began; a mask that the model means is none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from as_it_was import unchanged
from fxprec.numerics import Finding, audit, locate

F16, BF16 = torch.float16, torch.bfloat16


class Net(nn.Module):
    """Two layers, and between them what overflows, or is masked."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(8, 8), nn.Linear(8, 4), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def made(middle: Callable[[Tensor], Tensor], dtype: torch.dtype = F16, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fxprec.convert(Net(middle), dtype=dtype, **options)[0]


def batch(size: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return size * torch.randn(4, 8, generator=generator), torch.randint(0, 4, (4,), generator=generator)


def scores(h: Tensor) -> Tensor:
    """1e5 to 1e6 of what comes in at 1e3."""
    return h @ h.T


FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "divided by": lambda h: h / (scores(h).diagonal() + 1).sqrt()[:, None],
    "reciprocal": lambda h: h * scores(h).diagonal().reciprocal()[:, None],
    "1 / x": lambda h: h * (1 / scores(h).diagonal())[:, None],
    "rsqrt": lambda h: h * (scores(h).diagonal() + 1e-5).rsqrt()[:, None],
    "a negative power": lambda h: h * (scores(h).diagonal() ** -0.5)[:, None],
    "exp": lambda h: h + (-scores(h).abs()).exp().sum(1, keepdim=True),
    "exp2": lambda h: h + torch.exp2(-scores(h).abs()).sum(1, keepdim=True),
    "softmax": lambda h: torch.cat([-scores(h).abs(), torch.zeros(4, 1)], 1).softmax(-1)[:, 4:] * h,
    "clamp": lambda h: h * scores(h).detach().clamp(-10, 10)[:, :1],
    "clamp_": lambda h: h * scores(h).detach().clamp_(max=10)[:, :1],
    "hardtanh": lambda h: h * F.hardtanh(scores(h))[:, :1],
    "minimum": lambda h: h * torch.minimum(scores(h), torch.ones(()))[:, :1],
    "maximum": lambda h: h * torch.maximum(-scores(h).abs(), torch.ones(()))[:, :1],
    "tanh": lambda h: h * scores(h).tanh()[:, :1],
    "sigmoid": lambda h: h * scores(h).sigmoid()[:, :1],
    "atan": lambda h: h * scores(h).atan()[:, :1],
    "erf": lambda h: h * scores(h).erf()[:, :1],
    "relu": lambda h: h + (-scores(h).abs()).relu()[:, :1],
    "nan_to_num": lambda h: h + scores(h).detach().nan_to_num(posinf=1.0, neginf=-1.0)[:, :1],
    "where it is inf": lambda h: h + torch.where(scores(h).isinf(), 1.0, scores(h)).detach()[:, :1],
    "masked_fill where it is inf": lambda h: h + scores(h).masked_fill(scores(h).isinf(), 1.0).detach()[:, :1],
    "a comparison": lambda h: h * (scores(h).detach() > 1e5).float()[:, :1],
    "sign": lambda h: h * scores(h).sign()[:, :1],
    "argmax": lambda h: h[scores(h).argmax(1)],
    "topk": lambda h: h + scores(h).topk(2, 1).indices.float().sum(1, keepdim=True),
    "isfinite": lambda h: h + scores(h).isfinite().float().sum(),
    "softplus": lambda h: h + F.softplus(-scores(h).abs()).sum(1, keepdim=True),
    "logsigmoid": lambda h: h * F.logsigmoid(scores(h).abs()).sum(1, keepdim=True),
    "a norm": lambda h: h / (h * h).sum(1, keepdim=True).half().sqrt().float(),
    "a cast": lambda h: h / (h * h).sum(1, keepdim=True).half(),
    "log": lambda h: h + (scores(h).diagonal() + 1).reciprocal().log1p()[:, None],
    "a layer norm": lambda h: h + F.layer_norm(1 / (scores(h).abs() + 1), (4,))[:, :1],
    "floor division": lambda h: h + (h[:, :1].detach() // scores(h).detach()[:, :1].abs()),
}


#: What is done to a gradient.
BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda g: (g.half() * 1e9).clamp(-1, 1),
    "nan_to_num": lambda g: (g.half() * 1e9).nan_to_num(posinf=1.0, neginf=-1.0),
    "divided by": lambda g: g / (1 + (g.half() * 1e9).abs()).float(),
    "tanh": lambda g: (g.half() * 1e9).tanh(),
}
HIDDEN = torch.ones(4, 4).triu(1).bool()
LOWEST = torch.finfo(torch.float32).min, torch.finfo(torch.float16).min


def attends(h: Tensor, masked: Tensor) -> Tensor:
    return masked.softmax(-1) @ h


#: What is -inf in float16 alone, and meant to be; and what is discarded.
MEANT: dict[str, Callable[[Tensor], Tensor]] = {
    "-inf": lambda h: attends(h, scores(h).masked_fill(HIDDEN, -math.inf)),
    "lowest of float32": lambda h: attends(h, scores(h).masked_fill(HIDDEN, LOWEST[0])),
    "lowest of float16, scaled": lambda h: attends(h, scores(h).masked_fill(HIDDEN, LOWEST[1]) * 2),
    "-1e9": lambda h: attends(h, scores(h).masked_fill(HIDDEN, -1e9)),
    "-1e9 in place": lambda h: attends(h, scores(h).clone().masked_fill_(HIDDEN, -1e9)),
    "where, of a number": lambda h: attends(h, torch.where(HIDDEN, -1e9, scores(h))),
    "where, of a tensor": lambda h: attends(h, torch.where(HIDDEN, torch.tensor(-1e9), scores(h))),
    "1 - mask": lambda h: attends(h, scores(h) + (1 - (~HIDDEN).float()) * LOWEST[0]),
    "-1e5 and scores": lambda h: attends(h, scores(h) - 1e5 * HIDDEN.float()),
    "in float16": lambda h: attends(h, scores(h) + HIDDEN.half() * LOWEST[1] + HIDDEN.half() * LOWEST[1]),
    "triu": lambda h: attends(h, scores(h) + torch.full((4, 4), LOWEST[0]).triu(1)),
    "beside a bias": lambda h: attends(h, scores(h) - torch.arange(4) / 2 + HIDDEN.float() * LOWEST[0]),
    "of attention": lambda h: F.scaled_dot_product_attention(*[h[None, None]] * 3, attn_mask=HIDDEN * -1e9)[0, 0],
    "of a product": lambda h: attends(h, torch.addmm(HIDDEN.float() * -1e9, h, h.T)),
    "padded": lambda h: attends(torch.cat([h, h]), F.pad(scores(h), (0, 4), value=-1e9)),
    "joined": lambda h: attends(torch.cat([h, h]), torch.cat([scores(h), torch.full((4, 4), -1e9)], 1)),
    "the largest of a row": lambda h: h + scores(h).masked_fill(HIDDEN, -1e9).amax(-1, keepdim=True),
    "the smallest of a row": lambda h: h + scores(h).masked_fill(HIDDEN, 1e9).amin(-1, keepdim=True),
    "sigmoid": lambda h: scores(h).masked_fill(HIDDEN, -1e9).sigmoid() @ h,
    "few logits": lambda h: attends(h, torch.where(scores(h) < scores(h).amax(-1, True), -1e9, scores(h))),
    "clamped": lambda h: attends(h, scores(h).masked_fill(HIDDEN, -1e9).clamp(min=LOWEST[1])),
    "a log that is not chosen": lambda h: torch.where(h > 0, h.log(), h),
    "an overflow that is not chosen": lambda h: torch.where(h > 1e9, F.linear(h, torch.eye(8) * 6e4), h),
    "a sigmoid by hand": lambda h: h / (1 + (-40 * h).exp()),
    "infinity in both": lambda h: h + torch.minimum(torch.full_like(h, math.inf), h),
    "a shape": lambda h: h + torch.zeros_like(scores(1e4 * h.detach()))[:, :1],
}


def located(model: nn.Module, given: Any, loss: Any = F.cross_entropy) -> Finding | None:
    with unchanged(model):
        return locate(model, given, loss)


def checked(model: nn.Module, given: Any, **options: Any) -> tuple[str, ...]:
    """The remarks of an audit, whose rows are finite and add up."""
    with unchanged(model):
        ledger = audit(model, [given], F.cross_entropy, **options)
    numbers = [n for row in ledger.rows for n in (row.contribution, row.rounding, row.share, row.local_error)]
    assert all(map(math.isfinite, [ledger.bend, *numbers])) and "nan%" not in str(ledger)
    assert ledger.explained == pytest.approx(ledger.measured, rel=1e-9, abs=1e-12)
    return ledger.remarks


@pytest.mark.slow
@pytest.mark.parametrize("name", FORWARD)
def test_an_overflow_that_an_op_swallows_is_found_where_it_began(name: str) -> None:
    model, given = made(FORWARD[name]), batch(1e3)
    found = located(model, given)
    assert found is not None and (found.kind, found.phase, found.reached) == ("overflow", "forward", "")
    assert found.op == ("to" if name in ("a norm", "a cast") else "matmul") and found.dtype == "float16"
    assert found.magnitude > found.limit == 65504 and not found.fails_in_fp32
    assert found.swallowed and f"; {found.swallowed} made it finite again" in found.headline
    assert found.to_dict()["swallowed"] == found.swallowed
    (remark,) = checked(model, given)
    assert remark.startswith(f"{found.node} overflows, and {found.swallowed} makes that finite again")


@pytest.mark.parametrize("name", ["divided by", "tanh", "clamp", "argmax"])
def test_its_cure_can_be_pasted(name: str) -> None:
    model, given = made(FORWARD[name]), batch(1e3)
    found = located(model, given)
    assert found is not None and found.cure.startswith("fxprec.convert(")
    model = fxprec.revert(model)
    eval(found.cure, {"fxprec": fxprec, "torch": torch, "model": model})
    assert located(model, given) is None


def test_what_was_swallowed_is_told_beside_the_loss() -> None:
    found = located(made(FORWARD["divided by"]), batch(1e3))
    assert found is not None and found.swallowed == "truediv"
    gives, loss = found.remarks
    assert re.fullmatch(r"truediv \(.*test_swallowed_overflow.py:\d+\) gives 0 where the reference has 0\.\d+", gives)
    low, reference = map(float, re.fullmatch(r"the loss is (.*), and (.*) in the reference", loss).groups())  # type: ignore[union-attr]
    assert low == pytest.approx(1.3136, rel=1e-4) and reference == pytest.approx(1.27789, rel=1e-4)


def test_an_element_is_shown_that_the_overflow_came_into() -> None:
    """Of others roundings are larger."""
    found = located(made(lambda h: h / (1 + (h.abs() * 100).half() ** 3)), batch())
    assert found is not None and re.search(r"truediv \(.*\) gives -?0 where the reference has ", str(found))


def test_a_logarithm_of_what_became_0_is_found_where_it_is_clamped() -> None:
    model, given = made(lambda h: h + (1 - (h * 20).sigmoid()).log().clamp(min=-100)), batch()
    found = located(model, given)
    assert found is not None and (found.op, found.kind, found.swallowed) == ("log", "invalid", "clamp")
    assert any(re.search(r"gives -100 where the reference has -\d+\.", remark) for remark in found.remarks)
    assert checked(model, given)[0].startswith("log gives what is no number, and clamp makes that finite again")


def test_what_comes_of_it_later_is_not_blamed() -> None:
    model = made(lambda h: h + (1 / scores(h).diagonal()).log()[:, None])
    found = located(model, batch(1e3))
    assert found is not None and (found.op, found.kind, found.swallowed) == ("matmul", "overflow", "truediv")
    assert "later log is not finite, and loss got that" in found.remarks


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD)
def test_in_the_backward(name: str) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return BACKWARD[name](gradient).to(gradient.dtype)

    model = made(Own.apply)
    found = located(model, batch())
    assert found is not None and (found.kind, found.phase, found.op) == ("overflow", "backward", "mul")
    assert found.swallowed and "overflows: 9.53e+07 against 6.55e+04" in found.headline
    assert not checked(model, batch())
    assert len(checked(model, batch(), gradients=True)) == 1


@pytest.mark.parametrize(("dtype", "level"), [(F16, "O1"), (BF16, "O2")])
@pytest.mark.parametrize("name", MEANT)
def test_what_is_meant_is_no_fault(name: str, dtype: torch.dtype, level: str) -> None:
    model = made(MEANT[name], dtype, level=level)
    assert located(model, batch()) is None
    assert not checked(model, batch())


class Scored(nn.Module):
    """Scores and a mask that comes in, or that a buffer has."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", None if scale is None else torch.tensor([0.5, 1.0, 0.0, scale]))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        own = 0 if self.scale is None else self.scale.half()
        return (self.layer(x) + mask.half() + own).softmax(-1)


@pytest.mark.parametrize(("value", "told"), [(-1e9, False), (LOWEST[0], False), (1e9, True)])
@pytest.mark.parametrize("way", ["input", "buffer"])
def test_what_came_in_is_a_mask_where_it_looks_like_one(way: str, value: float, told: bool) -> None:
    torch.manual_seed(0)
    model = fxprec.convert(Scored(value if way == "buffer" else None), dtype=F16)[0]
    mask = torch.zeros(4, 4)
    mask[:, 3] = value if way == "input" else 0.0
    found = locate(model, (torch.randn(4, 4), mask, torch.zeros(4, 4)), F.mse_loss)
    assert (found is not None) is told


def test_an_outlier_of_the_data_is_no_mask() -> None:
    model, (x, y) = made(lambda h: 1 / (h * h + 1)), batch()
    x[1, 2] = -1e5
    found = located(model, (x, y))
    assert found is not None and found.kind == "overflow"


def test_sound_runs_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference takes as long as an audit: it runs where there is something to ask."""

    def compare(*args: Any) -> None:
        raise AssertionError("compared")

    monkeypatch.setattr("fxprec.numerics.step.compared", compare)
    assert located(made(torch.relu), batch()) is None
    assert located(made(MEANT["-inf"]), batch()) is None
    with pytest.raises(AssertionError, match="compared"):
        located(made(FORWARD["tanh"]), batch(1e3))
