"""A weight that an optimizer's step made inf or nan: the step, the optimizer and the weight are named, with a cure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.numerics import Finding, Watcher, locate, watch

pytestmark = pytest.mark.filterwarnings("ignore::fxprec.SlowDtypeWarning", "ignore::fxprec.NonFiniteWarning")


def model_of(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, fxprec.LossScaler]:
    torch.manual_seed(0)
    return fxprec.convert(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), dtype=dtype)


def batch() -> tuple[Tensor, Tensor]:
    """The first feature is 0, and so are gradients of the first weight."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
    x[:, 0] = 0
    return x, y


def train(model: nn.Module, opt: Any, steps: int, scaler: Any = None, factor: float = 100.0) -> None:
    x, y = batch()
    scaler = scaler or fxprec.LossScaler("cpu", enabled=False)
    for _ in range(steps):
        opt.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
        scaler.step(opt)
        scaler.update()


def only(watcher: Watcher, step: int) -> Finding:
    """The finding of the only trip, of this step."""
    (trip,) = watcher.trips
    assert trip.step == step and trip.finding is not None and "\n  cure: " in str(trip)
    return trip.finding


#: Optimizer of parameters -> what is known of its fault: kind, words of the state, of the cure.
ZERO = "exp_avg = 0, exp_avg_sq = 0"
FAULTS: dict[str, tuple[Callable[[Any], Any], str, str, str]] = {
    "AdamW": (lambda p: torch.optim.AdamW(p, eps=0.0), "invalid", ZERO, r"AdamW\(\.\.\., eps=1e-08\): where exp_av"),
    "AdamW, fused": (lambda p: torch.optim.AdamW(p, eps=0.0, fused=True), "invalid", ZERO, "divides by 0, as eps=0"),
    "Adam, amsgrad": (lambda p: torch.optim.Adam(p, eps=0.0, amsgrad=True), "invalid", ZERO, "divides by 0"),
    "ours": (lambda p: fxprec.optim.AdamW(p, eps=0.0), "invalid", ZERO, "divides by 0, as eps=0"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, eps=0.0), "invalid", "square_avg = 0", "where square_avg is 0"),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, eps=0.0), "invalid", "sum = 0", "where sum is 0"),
    "a rate": (lambda p: torch.optim.SGD(p, lr=3e38), "overflow", "", r"a smaller lr, which is 3e\+38"),
    "ours, a rate": (lambda p: fxprec.optim.SGD(p, lr=3e38), "overflow", "", r"a smaller lr, which is 3e\+38"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_next_step_tells_who_wrote_it(name: str) -> None:
    make, kind, example, cure = FAULTS[name]
    model, _ = model_of()
    opt = make(model.parameters())
    with watch(model, opt) as watcher:
        train(model, opt, 2)
    found = only(watcher, 1)
    assert watcher.trips[0].skipped
    assert (found.phase, found.kind, found.node, found.module) == ("optimizer", kind, "0.weight", "0")
    assert (found.op, found.step, found.reached) == (type(opt).__name__, 0, "outputs")
    assert found.example.startswith(example)
    weight = model.get_parameter("0.weight")
    assert found.index == tuple((~weight.isfinite()).nonzero()[0].tolist())
    assert f"optimizer: {found.op} in step 0 " in str(found) and "of finite weights and gradients" in str(found)
    torch.testing.assert_close(found.share, float((~weight.isfinite()).float().mean()))
    assert re.search(cure, found.cure)
    assert found.cure.endswith("load weights and optimizer of before step 0") and not found.fails_in_fp32
    own = locate(model, batch(), F.cross_entropy)
    assert own is not None and own.cure.endswith("fxprec.numerics.watch finds the step that wrote it")


def test_the_last_step_of_a_loop() -> None:
    """No call reads what it wrote: told at the end, and by ``check``, once."""
    model, _ = model_of()
    opt = torch.optim.AdamW(model.parameters(), eps=0.0)
    with watch(model, opt) as watcher:
        train(model, opt, 1)
        assert watcher.trips == []
        watcher.check()
        found = only(watcher, 0)
        watcher.check()
    assert only(watcher, 0) is found and found.step == 0 and not watcher.trips[0].skipped
    assert "nothing has read it yet" in str(found)
    opt = torch.optim.AdamW(model.parameters())
    with watch(model, opt) as watcher:  # it was so before
        pass
    assert watcher.trips == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_within_a_scaler(dtype: torch.dtype) -> None:
    model, scaler = model_of(dtype)
    opt = torch.optim.AdamW(model.parameters(), eps=0.0)
    scaler = fxprec.LossScaler("cpu", 256.0)
    with watch(model, opt, scaler) as watcher:
        train(model, opt, 2, scaler, factor=1.0)
    found = only(watcher, 1)
    assert (found.phase, found.step, found.node) == ("optimizer", 0, "0.weight")


def test_a_state_that_overflows() -> None:
    """Squares of gradients are infinite where the gradients are not."""
    model, _ = model_of()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with watch(model, opt) as watcher:
        train(model, opt, 2)
        for each in opt.state.values():
            each["momentum_buffer"].fill_(3e38)
        opt.param_groups[0]["momentum"] = 2.0
        train(model, opt, 2)
    found = only(watcher, 3)
    assert (found.kind, found.step, found.example) == ("overflow", 2, "momentum_buffer = inf")
    assert "as momentum_buffer overflowed" in found.cure and "clip_grad_norm_(model.parameters(), 1.0)" in found.cure
    assert "if no call of step 2 read it, this was earlier: watch began with step 0" in found.remarks
    assert "not finite now are 0.bias, 2.weight, 2.bias as well" in found.remarks


def test_eps_that_is_0_in_the_dtype() -> None:
    torch.manual_seed(0)
    model, _ = fxprec.convert(nn.Sequential(nn.Linear(4, 3)), dtype=torch.float16, level="O3")
    opt = torch.optim.AdamW(model.parameters(), foreach=False)
    with watch(model, opt) as watcher:
        train(model, opt, 2, factor=1.0)
    found = only(watcher, 1)
    assert found.cure.startswith("AdamW(..., eps=6.1e-05): where exp_avg_sq is 0 it divides by 0, as eps=1e-08 is 0")


def test_other_code_wrote_it() -> None:
    model, _ = model_of()
    opt = torch.optim.AdamW(model.parameters())
    weight = model.get_parameter("0.weight")
    value = weight.detach().clone()

    def came(fault: Callable[[], object], mend: Callable[[], object] = lambda: weight.detach().copy_(value)) -> str:
        with watch(model, opt) as watcher:
            train(model, opt, 2)
            fault()
            train(model, opt, 1)
            mend()
            train(model, opt, 1)
        found = only(watcher, 2)
        assert (found.phase, found.kind, found.node, found.step) == ("weight", "came in", "0.weight", None)
        return found.cure

    by_hand = "load a checkpoint from before; other code than an optimizer wrote it, before the optimizer's step 2"
    assert came(lambda: weight.detach()[0].fill_(torch.nan)) == by_hand
    with torch.no_grad():
        weight[0] = torch.inf
    with watch(model, opt) as watcher:
        train(model, opt, 1)
    assert only(watcher, 0).cure == "load a checkpoint from before; it was so when watch began"


def test_a_weight_that_is_clamped_in_each_step_is_no_optimizers_alone() -> None:
    model, _ = model_of()
    opt = torch.optim.AdamW(model.parameters(), eps=0.0)
    with watch(model, opt) as watcher:
        train(model, opt, 1)
        for parameter in model.parameters():
            parameter.detach().clamp_(-1, 1)
        train(model, opt, 1)
    assert "other code than an optimizer wrote it, before the optimizer's step 1" in only(watcher, 1).cure


def test_a_row_that_is_not_read() -> None:
    """It may be long ago that it became nan; the step that was last finite is told with that remark."""
    torch.manual_seed(0)
    model, _ = fxprec.convert(nn.Sequential(nn.Embedding(4, 3)))
    opt = torch.optim.AdamW(model.parameters(), eps=0.0)
    with watch(model, opt) as watcher:
        for row in (0, 0, 0, 1):
            opt.zero_grad()
            model(torch.tensor([row])).square().sum().backward()
            opt.step()
    found = only(watcher, 3)
    assert (found.phase, found.step, found.index) == ("optimizer", 2, (1, 0))
    assert found.remarks == ("if no call of step 2 read it, this was earlier: watch began with step 0",)


def test_two_optimizers() -> None:
    model, _ = model_of()
    first, last = model[0], model[2]  # type: ignore[index]
    sound, faulty = torch.optim.SGD(last.parameters(), lr=0.1), torch.optim.AdamW(first.parameters(), eps=0.0)
    x, y = batch()
    with watch(model) as watcher:
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
            for opt in (sound, faulty):
                opt.step()
    found = only(watcher, 1)
    assert (found.op, found.step, found.node) == ("AdamW", 0, "0.weight")


def test_a_device_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is read a step later: who wrote is known all the same."""
    for name in ("watch", "verdicts"):
        monkeypatch.setattr(f"fxprec.numerics.watching.{name}.reading_waits", lambda device: True)
    model, _ = model_of()
    opt = torch.optim.AdamW(model.parameters(), fused=True)
    with watch(model, opt) as watcher:
        train(model, opt, 2)
        opt.param_groups[0]["eps"] = 0.0
        for each in opt.state.values():
            each["exp_avg"].zero_(), each["exp_avg_sq"].zero_()
        train(model, opt, 3)
    assert [(trip.step, trip.finding and trip.finding.step) for trip in watcher.trips] == [(3, 2), (4, 2)]
