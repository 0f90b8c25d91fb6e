"""A whole step as one graph: the numbers of the usual loop, bit for bit, and capturing changes none of them."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import captured_tools as tools
import fxprec
from fxprec import optim

OPTIMIZERS, OURS, THEIRS, Net, Training = tools.OPTIMIZERS, tools.OURS, tools.THEIRS, tools.Net, tools.Training
batches, everything, recorder, same, side_by_side = (
    tools.batches,
    tools.everything,
    tools.recorder,
    tools.same,
    tools.side_by_side,
)


# -- the numbers of the usual loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_usual_loop(name: str, recorder: Any) -> None:
    step = side_by_side(Training(name), Training(name), batches(8))
    assert recorder.recordings == 1 and step.graphs == ("float32[4, 6], int64[4]",)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_is_skipped_on_the_device(name: str, recorder: Any) -> None:
    data = batches(7)
    data[4] = (data[4][0] * math.inf, data[4][1])
    eager, captured = (Training(name, torch.float16, init_scale=2.0**8, growth_interval=3) for _ in range(2))
    side_by_side(eager, captured, data)
    assert recorder.recordings == 1
    assert captured.scaler.skipped_steps == 1 and captured.scaler.get_scale() == 2.0**8


def test_an_overflow_in_the_first_steps_and_in_the_warm_up(recorder: Any) -> None:
    data = [(x * 1e4, y) for x, y in batches(4)]
    for name in (OURS, THEIRS, "our SGD"):
        eager, captured = (Training(name, torch.float16, init_scale=2.0**40, backoff_factor=2.0**-12) for _ in range(2))
        step = captured.captured(data[0])
        for x, y in data:
            assert same(step(x, y), eager.eager(x, y))
            assert captured.scaler.step_was_skipped == eager.scaler.step_was_skipped
        assert same(captured.state()["model"], eager.state()["model"])
        assert captured.scaler.skipped_steps == eager.scaler.skipped_steps > 0


def test_dropouts_are_drawn_anew_as_the_usual_loop_draws_them(recorder: Any) -> None:
    eager, captured = Training(dropout=0.4), Training(dropout=0.4)
    side_by_side(eager, captured, batches(4))
    step, (x, y) = captured.captured(batches(1)[0]), batches(1)[0]
    captured.optimizer.param_groups[0]["lr"] = 0.0
    assert len({float(step(x, y)) for _ in range(5)}) == 5


@pytest.mark.parametrize("name", ["torch's AdamW", "our SGD"])
def test_clipping(name: str, recorder: Any) -> None:
    plain = Training(name)
    plain.captured(batches(1)[0])(*batches(1)[0])
    clipped, eager = Training(name, torch.float16, init_scale=16.0), Training(name, torch.float16, init_scale=16.0)
    side_by_side(eager, clipped, batches(4), max_norm=0.01)
    assert not same(plain.state()["model"], clipped.state()["model"])


@pytest.mark.parametrize("name", [OURS, THEIRS])
def test_accumulation(name: str, recorder: Any) -> None:
    eager, captured = Training(name), Training(name)
    side_by_side(eager, captured, batches(4, rows=6), accumulate=3)


def test_weights_are_copied_once_a_step_whatever_the_micro_batches() -> None:
    training = Training(THEIRS)
    step, store = training.captured(batches(1, rows=6)[0], accumulate=3), training.model.__dict__["_fxprec"].store
    step(*batches(1, rows=6)[0])
    before = store.refreshes
    step(*batches(1, rows=6)[0])
    assert store.refreshes == before + 1


@pytest.mark.slow
def test_without_a_graph_the_call_is_the_usual_loop_too() -> None:
    for name in OPTIMIZERS:
        step = side_by_side(Training(name), Training(name), batches(2))
        assert step.graphs == () and "the device has none" in repr(step)
    side_by_side(Training(OURS), Training(OURS), batches(2), accumulate=2)
    options: dict[str, Any] = {"dtype": torch.float16, "init_scale": 2.0**8}
    data = [(batches(1)[0][0] * math.inf, batches(1)[0][1]), *batches(2)]
    side_by_side(Training(THEIRS, **options), Training(THEIRS, **options), data, max_norm=0.1)


def test_the_scaler_of_torch_and_none(recorder: Any) -> None:
    results = []
    for scaler in (torch.amp.GradScaler("cpu", 2.0**8), fxprec.LossScaler("cpu", 2.0**8)):
        training = Training(THEIRS)
        training.scaler = scaler
        step = training.captured(batches(1)[0])
        results.append([step(*batch) for batch in batches(3)])
        assert scaler.get_scale() == 2.0**8
    unscaled = Training(THEIRS)
    step = fxprec.capture_step(unscaled.model, F.cross_entropy, unscaled.optimizer, None, batches(1)[0])
    results.append([step(*batch) for batch in batches(3)])
    assert same(results[0], results[1]) and torch.allclose(results[0][2], results[2][2], rtol=1e-3)


def test_models_that_were_not_converted_and_losses_within_the_model(recorder: Any) -> None:
    class WithLoss(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> Tensor:
            return scale * F.cross_entropy(super().forward(x), labels)  # type: ignore[arg-type]

    x, y = batches(1)[0]
    losses = []
    for batch in ((x, y), {"x": x, "labels": y}, {"x": x, "labels": y, "scale": 1.0}):
        torch.manual_seed(0)
        model = WithLoss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        step = fxprec.capture_step(model, None, optimizer, None, batch)
        losses.append([step(**batch) if isinstance(batch, dict) else step(*batch) for _ in range(3)])
    assert same(losses[0], losses[1]) and same(losses[0], losses[2]) and losses[0][2] < losses[0][0]
    assert step.graphs == ("labels=int64[4], scale=1.0, x=float32[4, 6]",)
    half = step(x=x, labels=y, scale=0.5)  # a constant: another graph
    assert len(step.graphs) == 2 and half < 0.6 * losses[0][2]


def test_an_autocast_around_the_steps_keeps_no_cast_weight(recorder: Any) -> None:
    ends = []
    for graphs in (True, False):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, fused=True)
        with torch.autocast("cpu", torch.bfloat16):
            step = fxprec.capture_step(model, F.cross_entropy, optimizer, None, batches(1)[0]) if graphs else None
            for x, y in batches(3):
                if step is not None:
                    step(x, y)
                    continue
                torch.clear_autocast_cache()
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        ends.append(model.state_dict())
    assert same(*ends) and recorder.recordings == 1


def test_capturable_optimizers_of_torch(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("adam", "rmsprop"):
        module = sys.modules[f"torch.optim.{name}"]  # torch.optim deletes the attribute
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_args, **_kwargs: ["cpu"])
    for optimizer in (torch.optim.AdamW, torch.optim.RMSprop):
        ends = []
        for graphs in (True, False):
            training = Training()
            rate = torch.tensor(0.03)  # as a number it would be taken in FP64 by the usual loop
            training.optimizer = optimizer(training.model.parameters(), lr=rate, foreach=True, capturable=True)
            training.eager(*batches(1)[0])
            step = training.captured(batches(1)[0]) if graphs else training.eager
            for x, y in batches(4):
                step(x, y)
                rate.mul_(0.5)
            ends.append(training.state()["optimizer"] | training.model.state_dict())
        assert same(*ends)


def test_low_gradients(recorder: Any) -> None:
    ends = []
    for graphs in (True, False):
        training = Training(init_scale=8.0)
        training.optimizer = optim.AdamW(training.model.parameters(), lr=0.03, low_gradients=True)
        step = training.captured(batches(1)[0]) if graphs else None
        for x, y in batches(3):
            if step is not None:
                step(x, y)
                continue
            training.optimizer.zero_grad()
            training.scaler.scale(F.cross_entropy(training.model(x), y)).backward()
            assert training.model.up.weight.grad.dtype is torch.bfloat16
            training.scaler.step(training.optimizer)
            training.scaler.update()
        ends.append(training.state()["model"])
    assert same(*ends)


@pytest.mark.slow
def test_graphs_of_dynamo(recorder: Any) -> None:
    eager, captured = Training(THEIRS), Training(THEIRS)
    for training in (eager, captured):
        training.model = fxprec.convert(fxprec.revert(training.model), capture="dynamo").module
    step = captured.captured(batches(1)[0])
    for x, y in batches(3):
        assert same(step(x, y), eager.eager(x, y))
    assert recorder.recordings == 1 and not captured.model.__dict__["_fxprec"].net


def test_the_loss_of_a_step_stays_as_it_was(recorder: Any) -> None:
    training = Training()
    step = training.captured(batches(1)[0])
    first = step(*batches(1)[0])
    kept = float(first)
    step(*batches(1)[0])
    assert float(first) == kept and first.dtype is torch.float32 and not first.requires_grad


# -- capturing changes nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("begun", [False, True])
def test_capturing_changes_no_value(name: str, begun: bool, recorder: Any) -> None:
    training = Training(name, torch.float16, dropout=0.2, init_scale=2.0**4, growth_interval=1)
    x, y = batches(1)[0]
    if begun:
        training.eager(x, y)
        F.cross_entropy(training.model(x), y).backward()
    seen, before = training.seen(x), everything(training)
    gradients = [p.grad for p in training.model.parameters()]
    step = training.captured((x, y))
    assert same(everything(training), before) and torch.equal(training.seen(x), seen)
    assert all(now.grad is then for now, then in zip(training.model.parameters(), gradients, strict=True))
    step(*batches(1, rows=3)[0])
    before = everything(training)
    training.captured((x, y))
    assert same(everything(training), before)


def test_what_a_forward_writes_on_the_model_is_undone_and_kept_for_the_graph(recorder: Any) -> None:
    class Caching(Net):
        calls, table = 0, None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.table is None:
                self.table = torch.ones(6)
            return super().forward(x * self.table)

    torch.manual_seed(0)
    model = Caching()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = fxprec.capture_step(model, F.cross_entropy, optimizer, None, batches(1)[0])
    assert "table" not in model.__dict__ and "calls" not in model.__dict__
    step(*batches(1)[0])
    assert "calls" not in model.__dict__ and recorder.recordings == 1


@pytest.mark.parametrize("begun", [False, True])
def test_a_capture_that_fails_changes_nothing_and_names_the_line(begun: bool, recorder: Any) -> None:
    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        return loss * 2 if loss.item() > 1e9 else loss

    training, (x, y) = Training(init_scale=2.0**4), batches(1)[0]
    if begun:
        training.eager(x, y)
    before, seen = everything(training), training.seen(x)
    states = [*training.optimizer.state]
    with pytest.raises(fxprec.CaptureError, match=r"test_captured_step.py:\d+ in loss_of, `return .*\.item\(\)"):
        fxprec.capture_step(training.model, loss_of, training.optimizer, training.scaler, (x, y))
    assert same(everything(training), before) and torch.equal(training.seen(x), seen)
    assert [*training.optimizer.state] == states
    other = Training(init_scale=2.0**4)
    if begun:
        other.eager(x, y)
    assert same(training.eager(x, y), other.eager(x, y)) and same(training.state(), other.state())


def test_an_error_of_the_users_own_code_is_raised_as_it_is(recorder: Any) -> None:
    training = Training()
    before = everything(training)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        training.captured((torch.ones(4, 5), batches(1)[0][1]))
    assert same(everything(training), before)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("ours", [True, False], ids=["LossScaler", "GradScaler"])
def test_without_a_graph_an_error_within_a_step_is_forgotten(parts: int, ours: bool) -> None:
    results = []
    for fails in (True, False):
        training, ((x, y), after) = Training(init_scale=4.0), batches(2)
        if not ours:
            training.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        calls: list[Tensor] = []

        def loss_of(output: Tensor, target: Tensor, calls: list[Tensor] = calls, fails: bool = fails) -> Tensor:
            calls.append(output)
            if fails and len(calls) == parts:  # the last micro-batch
                output.register_hook(lambda gradient: 1 / 0)
            return F.cross_entropy(output, target)

        norm = {"max_norm": 1.0, "accumulate": parts}
        training.model.norm.eval()  # or its statistics would have seen the batch twice
        step = fxprec.capture_step(training.model, loss_of, training.optimizer, training.scaler, (x, y), **norm)
        if fails:
            with pytest.raises(ZeroDivisionError):
                step(x, y)
            assert all(p.grad is None for p in training.model.parameters())
        results.append([step(x, y), step(*after), training.scaler.get_scale(), training.model.state_dict()])
    assert same(*results)


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["alone", "beside those of a dropout"])
def test_random_numbers_of_the_host_are_refused(dropout: float, recorder: Any) -> None:
    training, before = Training(dropout=dropout), random.getstate()
    with pytest.raises(fxprec.CaptureError, match="draws random numbers from random on the host"):
        fxprec.capture_step(
            training.model,
            lambda o, y: F.cross_entropy(o, y) * random.random(),
            training.optimizer,
            None,
            batches(1)[0],
        )
    assert random.getstate() == before
