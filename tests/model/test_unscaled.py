"""A float16 model whose loss no scaler scaled: one warning at the first step, and no false alarm."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec import amp
from fxprec.amp._amp_state import AmpState, state
from fxprec.errors import GradientsWarning
from fxprec.model import unscaled
from fxprec.model.conversion import conversion_of

HALF = torch.float16
WARNED = r"SGD steps on float16 gradients of Net whose loss no loss scaler has scaled"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the scalers that other tests left behind."""
    find = unscaled._living_scalers
    left = find()
    monkeypatch.setattr(unscaled, "_living_scalers", lambda: [s for s in find() if all(s is not old for old in left)])
    handed_back: weakref.WeakSet[fxprec.LossScaler] = weakref.WeakSet()
    monkeypatch.setattr(unscaled, "_handed_back", lambda: handed_back)


@pytest.fixture
def fresh_amp() -> Iterator[None]:
    before = dict(vars(state))
    vars(state).update(vars(AmpState()))
    yield
    vars(state).update(before)


def said(train: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [str(w.message) for w in caught if issubclass(w.category, GradientsWarning)]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def plain_steps(model: nn.Module, factor: float = 1.0, count: int = 1) -> None:
    optimizer = sgd(model)
    for _ in range(count):
        optimizer.zero_grad()
        (model(torch.randn(2, 3)).square().mean() * factor).backward()
        optimizer.step()


def dropped(**options: Any) -> nn.Module:
    return fxprec.convert(Net(), dtype=HALF, **options)[0]


def test_a_dropped_scaler_is_missed_once_with_the_share_of_zeros() -> None:
    model = dropped()
    with pytest.warns(GradientsWarning, match=WARNED) as caught:
        plain_steps(model, factor=1e-7)
    (warning,) = caught
    assert warning.filename == __file__
    gradients = [model.get_parameter(n).grad for n in ("first.weight", "first.bias", "last.weight", "last.bias")]
    zeros = sum((g == 0).sum().item() for g in gradients) / sum(g.numel() for g in gradients)
    assert 0.2 < zeros <= 1 and f": {zeros:.1%} of the gradients of its lowered weights" in str(warning.message)
    assert not said(lambda: plain_steps(model, factor=1e-7))


@pytest.mark.parametrize("options", [{"scaler": 128.0}, {"scaler": fxprec.LossScaler("cpu")}, {"level": "O2"}])
def test_every_scaler_that_would_scale_is_missed(options: dict[str, Any]) -> None:
    model = dropped(**options)
    with pytest.warns(GradientsWarning, match=WARNED):
        plain_steps(model)


@pytest.mark.parametrize(
    "options",
    [
        {"scaler": False},
        {"scaler": 1.0},
        {"scaler": fxprec.LossScaler("cpu", enabled=False)},
        {"level": "O0"},
        {"level": "O3"},  # a static scale of 1
    ],
    ids=["False", "1.0", "disabled", "O0", "O3"],
)
def test_where_nothing_would_be_scaled_nothing_is_missed(options: dict[str, Any]) -> None:
    model = dropped(**options)
    assert not said(lambda: plain_steps(model))


def test_bfloat16_needs_none() -> None:
    model = fxprec.convert(Net(), dtype=torch.bfloat16, scaler=fxprec.LossScaler("cpu"))[0]
    assert not said(lambda: plain_steps(model))


# -- no false alarm ----------------------------------------------------------------------------------------------------


def by_the_scaler_of_convert() -> None:
    model, scaler = fxprec.convert(Net(), dtype=HALF)
    scaled_step(model, scaler)


def by_torch_s() -> None:
    scaled_step(dropped(), torch.amp.GradScaler("cpu"))


def by_a_method_that_unscales_and_steps_apart() -> None:
    model, scaler = dropped(), torch.amp.GradScaler("cpu")
    optimizer = sgd(model)
    scaler.scale(model(torch.randn(2, 3)).sum()).backward()
    scaler.unscale_(optimizer)
    optimizer.step()


def by_hand_from_a_scaler() -> None:
    model, scaler = dropped(), fxprec.LossScaler("cpu")
    optimizer = sgd(model)
    scaler.scale(model(torch.randn(2, 3)).sum()).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= scaler.get_scale()
    optimizer.step()


def by_scale_loss() -> None:
    model, scaler = fxprec.convert(Net(), dtype=HALF)
    optimizer = sgd(model)
    with scaler.scale_loss(model(torch.randn(2, 3)).sum(), optimizer) as loss:
        loss.backward()
    scaler.step(optimizer)
    scaler.update()


def by_a_captured_step() -> None:
    model, scaler = fxprec.convert(Net(), dtype=HALF)
    optimizer = fxprec.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(2, 3), torch.randn(2, 2)
    fxprec.capture_step(model, lambda out, y: (out - y).square().mean(), optimizer, scaler, batch)(*batch)


def by_nothing_since_it_was_reverted() -> None:
    model = fxprec.revert(dropped())
    plain_steps(model)


def another_model_s_step() -> None:
    model = dropped()
    optimizer = sgd(nn.Linear(2, 2))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    sgd(model).step()  # without gradients


def scaled_step(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    optimizer = sgd(model)
    scaler.scale(model(torch.randn(2, 3)).sum() * 1e-3).backward()  # which does not overflow: the step is taken
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    "train",
    [
        by_the_scaler_of_convert,
        by_torch_s,
        by_a_method_that_unscales_and_steps_apart,
        by_hand_from_a_scaler,
        by_scale_loss,
        by_a_captured_step,
        by_nothing_since_it_was_reverted,
        another_model_s_step,
    ],
)
def test_no_alarm(train: Callable[[], None]) -> None:
    assert not said(train)


def test_a_step_without_gradients_and_of_others_is_not_the_first() -> None:
    model = dropped()
    other = sgd(nn.Linear(2, 2))
    sgd(model).step()
    other.step()
    with pytest.warns(GradientsWarning, match=WARNED):
        plain_steps(model)


def test_a_closure_and_a_disabled_scaler() -> None:
    model, off = dropped(), torch.amp.GradScaler("cpu", enabled=False)
    optimizer = sgd(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = off.scale(model(torch.randn(2, 3)).sum())
        loss.backward()
        return loss

    with pytest.warns(GradientsWarning, match=WARNED):
        optimizer.step(closure)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: torch.load(saved(model), weights_only=False)])
def test_copies_are_watched_too(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = copied(dropped())
    with pytest.warns(GradientsWarning, match=WARNED):
        plain_steps(model)


def saved(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


def test_later_steps_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of a model that was looked at, nor those beside a copy that nobody trains."""
    gc.collect()
    for conversion in list(unscaled._expecting()):
        unscaled.stop_expecting(conversion)
    model = dropped(scaler=64.0)
    kept = copy.deepcopy(model)
    looks: list[Any] = []
    look = unscaled._look
    monkeypatch.setattr(unscaled, "_look", lambda *a: (looks.append(a[0]), look(*a)))
    optimizer = sgd(model)
    with pytest.warns(GradientsWarning, match=WARNED):
        for _ in range(5):
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
    assert len(looks) == 2
    with pytest.warns(GradientsWarning, match=WARNED):
        plain_steps(kept)


# -- apex's interface --------------------------------------------------------------------------------------------------


def amp_model(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    optimizer = sgd(model)
    return amp.initialize(model, optimizer, cast_model_type=HALF, verbosity=0, **options)


def amp_step(scaled: bool, **options: Any) -> None:
    model, optimizer = amp_model(**options)
    loss = model(torch.randn(2, 3)).sum()
    if scaled:
        with amp.scale_loss(loss, optimizer) as loss:
            loss.backward()
    else:
        loss.backward()
    optimizer.step()


@pytest.mark.usefixtures("fresh_amp")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_amp_without_scale_loss(level: str) -> None:
    with pytest.warns(GradientsWarning, match=WARNED + ".*amp.scale_loss"):
        amp_step(False, opt_level=level)


@pytest.mark.usefixtures("fresh_amp")
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("options", [{"opt_level": "O2", "loss_scale": 1.0}, {"opt_level": "O3"}], ids=str)
def test_amp_with_a_scale_of_1(options: dict[str, Any], scaled: bool) -> None:
    assert not said(lambda: amp_step(scaled, **options))


@pytest.mark.usefixtures("fresh_amp")
@pytest.mark.parametrize("options", [{"opt_level": "O1"}, {"opt_level": "O2", "loss_scale": 64.0}], ids=str)
def test_amp_with_scale_loss(options: dict[str, Any]) -> None:
    assert not said(lambda: amp_step(True, **options))


def test_where_the_scaler_of_convert_scales_no_other_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, scaler = fxprec.convert(Net(), dtype=HALF)
    monkeypatch.setattr(unscaled, "_living_scalers", lambda: pytest.fail("looked at every object of the process"))
    optimizer = sgd(model)
    scaler.scale(model(torch.randn(2, 3)).square().mean()).backward()
    scaler.step(optimizer)
    assert conversion_of(model) not in unscaled._expecting()
