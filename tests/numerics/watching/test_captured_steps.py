"""The watch of captured steps: what a watched loop does, bit for bit, with graphs that are recorded operators."""

from __future__ import annotations

import copy
import gc
import importlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import captured_tools as tools
import fxprec
from fxprec.host_reads import OnHost
from fxprec.numerics import watch
from fxprec.whole_step.put_back import KeptIteration

OPTIMIZERS, batches, recorder, same = tools.OPTIMIZERS, tools.batches, tools.recorder, tools.same
F16, BF16 = torch.float16, torch.bfloat16
#: Not the function.
module = importlib.import_module("fxprec.numerics.watching.watch")

pytestmark = pytest.mark.filterwarnings("ignore::fxprec.SlowDtypeWarning")


class Faulty(nn.Module):
    """Batch norm, dropout, a count of calls, and faults for some inputs: see ``FAULTS``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        h = self.drop(self.norm(self.first(x)).tanh())
        h = h / (x[:, :1] - 7).abs()
        h = h + 0.1 * (h * 0 + (x[:, 1:2] - 9).square()).sqrt()
        return self.last(h) * (1 + x[:, 2:3].relu())


#: Name -> column of the input and the number that it must not be; phase, op, and kind of the finding.
FAULTS: dict[str, tuple[int, float, str, str, str]] = {
    "forward": (0, 7.0, "forward", "div", "invalid"),
    "backward": (1, 9.0, "backward", "sqrt", "invalid"),
    "input": (3, math.nan, "input", "", "came in"),
}


def faulty(fault: str, rows: int = 4) -> tuple[Tensor, Tensor]:
    ((x, y),) = batches(1, rows)
    x[1, FAULTS[fault][0]] = FAULTS[fault][1]
    return x, y


class Training(tools.Training):
    """That of ``Faulty``."""

    def __init__(self, optimizer: str = tools.OURS, dtype: torch.dtype = BF16, **scaler: Any) -> None:
        super().__init__(optimizer, dtype, **scaler)
        torch.manual_seed(0)
        self.model = fxprec.convert(Faulty(), dtype=dtype, scaler=self.scaler).module
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def watched(self, optimizer: bool = True, **options: Any) -> fxprec.numerics.Watcher:
        return watch(self.model, self.optimizer if optimizer else None, self.scaler, **options)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxprec.NonFiniteWarning)
        yield


class Slow:
    """A number comes to the host so many ticks later, or when somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ticks: int) -> None:
        self.ticks, self.now = ticks, 0
        monkeypatch.setattr("fxprec.numerics.watching.watch.OnHost", self)
        monkeypatch.setattr(module, "reading_waits", lambda device: True)
        monkeypatch.setattr("fxprec.numerics.watching.verdicts.reading_waits", lambda device: True)

    def of(self, values: Tensor) -> OnHost:
        comes = self.now + self.ticks
        return OnHost(values.clone(), lambda: self.now >= comes, lambda: None)


def side_by_side(
    eager: Training, captured: Training, data: list[tuple[Tensor, Tensor]], parts: int = 1
) -> list[fxprec.numerics.Trip]:
    """Watch both, and compare all there is after every step, and what is told."""
    with eager.watched() as usual, captured.watched() as watcher, quiet():
        step = captured.captured(data[0], accumulate=parts)
        state = torch.get_rng_state()
        for x, y in data:
            torch.set_rng_state(state)
            expected, after = eager.eager(x, y, parts), torch.get_rng_state()
            torch.set_rng_state(state)
            loss, state = step(x, y), torch.get_rng_state()
            assert torch.equal(state, after) and same(loss, expected)
            assert same(captured.state(), eager.state()) and same(captured.seen(x), eager.seen(x))
    assert [*map(str, watcher.trips)] == [*map(str, usual.trips)] and watcher.steps == usual.steps == len(data)
    return watcher.trips


# -- steps that are sound ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sound_steps_are_those_of_a_graph_that_nobody_watches(name: str, recorder: Any) -> None:
    ends = []
    for watched in (False, True):
        training = Training(name)
        with training.watched() if watched else nullcontext() as watcher:
            step = training.captured(batches(1)[0])
            ends.append([[step(*each) for each in batches(5)], training.state(), torch.get_rng_state()])
        assert watcher is None or (watcher.trips == [] and watcher.steps == 5)
    assert same(*ends) and recorder.recordings == 2


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name"),
    [(f, name) for f in FAULTS for name in OPTIMIZERS if f == "forward" or name in (tools.OURS, tools.THEIRS)],
)
def test_a_fault_is_skipped_and_explained_as_in_a_loop(fault: str, name: str, recorder: Any) -> None:
    data = [*batches(3), faulty(fault), *batches(2)]
    (trip,) = side_by_side(Training(name), Training(name), data)
    _, _, phase, op, kind = FAULTS[fault]
    found = trip.finding
    assert found is not None and (trip.step, trip.skipped, found.phase, found.kind) == (3, True, phase, kind)
    assert found.op == op or not op
    assert recorder.recordings == 1  # no change of anything that a graph takes as given


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_under_a_loss_scaler(fault: str, recorder: Any) -> None:
    data = [*batches(3), faulty(fault), *batches(2)]
    (trip,) = side_by_side(*(Training(dtype=F16, init_scale=2.0**8) for _ in range(2)), data)
    assert trip.finding is not None and trip.finding.phase == FAULTS[fault][2] and trip.finding.scale == 1.0


@pytest.mark.slow
def test_what_float16_cannot_hold(recorder: Any) -> None:
    data = batches(3)
    data[1][0][:, 2] = 6e4
    (trip,) = side_by_side(*(Training(dtype=F16, init_scale=2.0**8) for _ in range(2)), data)
    assert trip.finding is not None and (trip.finding.kind, trip.finding.fails_in_fp32) == ("overflow", False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fxprec.GradientsWarning")
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_loss_scale_that_is_too_large(dynamic: bool, recorder: Any) -> None:
    both = [Training(dtype=F16, init_scale=2.0**30, dynamic=dynamic) for _ in range(2)]
    for training in both:  # a loop makes the optimizer's state in the first step that runs
        torch.manual_seed(0)
        F.cross_entropy(training.model(batches(1)[0][0]), batches(1)[0][1]).backward()
        training.optimizer.step()
    trips = side_by_side(*both, batches(5))
    kinds = [trip.finding and (trip.finding.kind, trip.finding.scale) for trip in trips]
    assert kinds == ([] if dynamic else [("scale too large", 2.0**30)] * 3 + [None] * 2)


@pytest.mark.slow
def test_the_micro_batch_is_named(recorder: Any) -> None:
    data = [*batches(2, 8), faulty("forward", 8), *batches(1, 8)]
    (trip,) = side_by_side(Training(), Training(), data, parts=4)
    assert (trip.call, trip.calls) == (0, 4) and trip.finding is not None


@pytest.mark.slow
def test_faults_in_a_row(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    again, runs = KeptIteration.run_again, []
    monkeypatch.setattr(KeptIteration, "run_again", lambda *args: (runs.append(args), again(*args)))
    trips = side_by_side(Training(), Training(), [*batches(1), *[faulty("forward")] * 5, *batches(2)])
    assert [trip.finding is None for trip in trips] == [False] * 3 + [True] * 2 and {t.calls for t in trips} == {1}
    assert len(runs) == 3


# -- the host hears of it later ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ticks"),
    # at once, before the next step, after it: all of the first optimizer, one of each other
    [(next(iter(OPTIMIZERS)), ticks) for ticks in range(3)] + [(name, i % 3) for i, name in enumerate(OPTIMIZERS) if i],
)
def test_nothing_moves_until_the_host_has_heard_of_it(
    name: str, ticks: int, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, ticks)
    training, moved = Training(name), []
    with training.watched() as watcher, quiet():
        step = training.captured(batches(1)[0])
        for number, each in enumerate([*batches(2), faulty("forward"), *batches(3)]):
            before = copy.deepcopy((training.optimizer.state_dict()["state"], dict(training.model.named_parameters())))
            step(*each)
            slow.now += 1
            after = training.optimizer.state_dict()["state"], dict(training.model.named_parameters())
            moved.append(not same(before, after))
            with fxprec.testing.check_shadows(training.model):
                training.seen(each[0])
            assert [trip.step for trip in watcher.trips] == ([2] if number >= 2 + bool(ticks) else [])
    assert moved == [True, True, False, ticks < 2, True, True]
    assert watcher.findings[0].op == "div" and watcher.steps == 6 and recorder.recordings == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "loss"])
def test_a_late_replay_has_the_batch_the_random_numbers_and_the_buffers_of_the_step(
    where: str, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is there for one dropout mask, one row of the batch and one value of a buffer only."""

    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("count", torch.zeros(()))
            self.count: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1  # dynamo captures it
            drawn = F.dropout(torch.ones(64), 0.5).sum()
            return self.layer(x) / ((drawn - x[0, 1]).abs() + (self.count - x[0, 0]).abs())

    class Loss(nn.Module):
        """Has a buffer, and nobody watches it."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(()))
            self.seen: Tensor

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.seen *= 2
            return F.cross_entropy(output, target) / (self.seen - (16 if where == "loss" else 0))

    slow = Slow(monkeypatch, 2)
    torch.manual_seed(0)
    model, scaler = fxprec.convert(Rare())
    optimizer, loss = fxprec.optim.AdamW(model.parameters(), lr=0.1), Loss()
    data = batches(6)
    with watch(model, optimizer, scaler) as watcher, quiet():
        step = fxprec.capture_step(model, loss, optimizer, scaler, data[0])
        for number, (x, y) in enumerate(data):
            if number == 3 and where == "forward":
                state = torch.get_rng_state()
                x[0, :2] = torch.stack([torch.tensor(4.0), F.dropout(torch.ones(64), 0.5).sum()])
                torch.set_rng_state(state)
            expected = [int(model.count) + 1, float(loss.seen) * 2]
            step(x, y)
            slow.now += 1
            x.fill_(100.0)  # who loads data may use the memory again
            assert [int(model.count), float(loss.seen)] == expected
            kept = [each for each in gc.get_objects() if type(each) is KeptIteration]
            assert len(kept) <= 2
            del kept
    (trip,) = watcher.trips
    assert trip.step == 3 and trip.finding is not None and trip.finding.phase == where


# -- graphs, and who watches -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [True, False], ids=["of one optimizer", "of all"])
def test_a_graph_for_those_who_watch_and_one_for_those_who_do_not(optimizer: bool, recorder: Any) -> None:
    eager, captured = Training(), Training()
    step = captured.captured(batches(1)[0])
    data, found = batches(3), []
    for number, recordings in ((0, 1), (1, 2), (2, 3)):
        for training, run in ((eager, eager.eager), (captured, step)):
            with training.watched(optimizer) if number == 1 else nullcontext() as watcher, quiet():
                for each in (*data, *([faulty("backward")] if number == 1 else ())):
                    torch.manual_seed(1)
                    run(*each)
            if watcher is not None:
                found.append([*map(str, watcher.trips)])
        assert recorder.recordings == recordings and same(captured.state(), eager.state())
    assert found[0] == found[1] and len(found[0]) == 1


@pytest.mark.slow
def test_steps_of_a_loop_between_those_of_a_graph(recorder: Any) -> None:
    eager, captured, told = Training(), Training(), []
    for training, graphs in ((eager, False), (captured, True)):
        with training.watched() as watcher, quiet():
            step = training.captured(batches(1)[0]) if graphs else training.eager
            torch.manual_seed(1)
            for run, each in (
                (step, batches(2)[1]),
                (training.eager, faulty("backward")),
                (step, faulty("forward")),
                (training.eager, batches(1)[0]),
                (step, batches(2)[1]),
            ):
                run(*each)
        told.append([*map(str, watcher.trips)])
    assert told[0] == told[1] and len(told[0]) == 2 and same(eager.state(), captured.state())


@pytest.mark.slow
def test_graphs_of_dynamo(recorder: Any) -> None:
    eager, captured = Training(), Training()
    for training in (eager, captured):
        training.model = fxprec.convert(fxprec.revert(training.model), capture="dynamo").module
    (trip,) = side_by_side(eager, captured, [*batches(2), faulty("backward"), *batches(1)])
    assert trip.finding is not None and trip.finding.op == "sqrt"
    assert recorder.recordings == 1 and not captured.model.__dict__["_fxprec"].net


@pytest.mark.slow
def test_two_models_in_one_step(recorder: Any) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (fxprec.convert(Faulty()).module for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.two(x.clamp(max=2))

    torch.manual_seed(0)
    model = Both()
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=0.1)
    with watch(model.one, optimizer) as first, watch(model.two, optimizer) as second, quiet():
        step = fxprec.capture_step(model, F.cross_entropy, optimizer, None, batches(1)[0])
        moved = []
        for each in (batches(1)[0], faulty("backward"), batches(1)[0], faulty("forward")):
            before = copy.deepcopy(dict(model.named_parameters()))
            step(*each)
            moved.append(not same(before, dict(model.named_parameters())))
    assert moved == [True, False, True, False] and recorder.recordings == 1
    assert [found.op for found in first.findings] == ["sqrt", "div"] and second.findings[0].phase == "loss"
    assert first.steps == second.steps == 4 and {trip.calls for trip in (*first.trips, *second.trips)} == {1}


@pytest.mark.parametrize("fault", ["forward", "backward"])
@pytest.mark.parametrize("name", [tools.OURS, tools.THEIRS, "our SGD"])
def test_a_capture_on_a_bad_batch_is_no_step(name: str, fault: str, recorder: Any) -> None:
    training = Training(name)
    before, parameters = training.state(), copy.deepcopy(dict(training.model.named_parameters()))
    with training.watched() as watcher:
        step = training.captured(faulty(fault))
        assert watcher.steps == 0 and same(training.state()["model"], before["model"])
        step(*batches(1)[0])
        assert not same(dict(training.model.named_parameters()), parameters)  # nothing is held
        step(*batches(1, 3)[0])
    assert watcher.trips == [] and watcher.steps == 2 and recorder.recordings == 2


def test_outputs_that_hold_inf_are_not_looked_at_by_the_next_graph(recorder: Any) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).masked_fill(torch.tensor([True, False, False]), torch.inf)

    model, scaler = fxprec.convert(Masked())
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=0.1)
    x, y = batches(1)[0][0], torch.tensor([1, 2, 1, 2])
    moved = []
    with watch(model, optimizer, scaler) as watcher, quiet():
        step = fxprec.capture_step(model, lambda out, y: F.cross_entropy(-out, y), optimizer, scaler, (x, y))
        for _ in range(3):
            before = copy.deepcopy(model.state_dict())
            step(x, y)
            moved.append(not same(before, {**model.state_dict()}))
    assert moved == [False, True, True] and [trip.step for trip in watcher.trips] == [0]
    assert "inf that is meant to be there" in watcher.trips[0].why and recorder.recordings == 2


@pytest.mark.parametrize("rows", [4, 3], ids=["the same graph", "another graph"])
def test_the_optimizer_that_spoiled_a_weight_is_named(rows: int, recorder: Any) -> None:
    model, scaler = fxprec.convert(nn.Sequential(nn.Linear(6, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True, eps=0.0)
    still, sound, after = batches(3)[0], batches(3)[1], batches(1, rows)[0]
    still[0][:, 0] = 0  # whose weights get no gradient
    with watch(model, optimizer, scaler) as watcher, quiet():
        step = fxprec.capture_step(model, F.cross_entropy, optimizer, scaler, sound)
        for each in (still, after):
            step(*each)
    (found,) = watcher.findings
    assert (found.phase, found.node, found.step) == ("optimizer", "0.weight", 0) and "eps" in found.cure


def test_a_replay_that_fails_is_told(recorder: Any) -> None:
    training, runs = Training(), [0]

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        runs[0] += 1
        if runs[0] > 4:
            raise KeyError("gone")
        return F.cross_entropy(output, target)

    with training.watched() as watcher, quiet():
        step = fxprec.capture_step(training.model, loss_of, training.optimizer, training.scaler, batches(1)[0])
        assert runs == [4]
        step(*batches(1)[0])
        before = training.state()["optimizer"]
        step(*faulty("forward"))
        assert same(training.state()["optimizer"], before)
    (trip,) = watcher.trips
    assert (trip.finding, trip.why, trip.calls) == (None, "the replay failed: 'gone'", 1)


@pytest.mark.slow
def test_an_error_comes_out_of_the_step(recorder: Any) -> None:
    training = Training()
    with training.watched(on_finding="raise"):
        step = training.captured(batches(1)[0])
        step(*batches(1)[0])
        with pytest.raises(fxprec.NonFiniteError, match=r"step 1 was not finite, and was skipped: forward: .* div "):
            step(*faulty("forward"))
        assert all(parameter.grad is None for parameter in training.model.parameters())
        step(*batches(1)[0])


def test_what_was_held_is_not_held_by_the_next_watch(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow(monkeypatch, 2)
    training = Training()
    watcher, before = training.watched(), copy.deepcopy(dict(training.model.named_parameters()))
    with pytest.raises(KeyboardInterrupt), watcher:
        step = training.captured(batches(1)[0])
        step(*faulty("forward"))
        raise KeyboardInterrupt
    with watcher:
        assert same(dict(training.model.named_parameters()), before)
        step(*batches(1)[0])
        assert not same(dict(training.model.named_parameters()), before)


@pytest.mark.slow
def test_a_replay_leaves_a_loss_as_it_was(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody watches it: its attributes, gradients and hooks."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.ones(())), 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return F.cross_entropy(output, target) * self.weight

    slow, training, loss, heard = Slow(monkeypatch, 2), Training(), Loss(), []
    for parameter in (training.model.first.weight, loss.weight):
        parameter.register_post_accumulate_grad_hook(heard.append)
    with training.watched() as watcher, quiet():
        step = fxprec.capture_step(training.model, loss, training.optimizer, training.scaler, batches(1)[0])
        step(*faulty("forward"))
        heard.clear()
        loss.weight.grad = torch.ones(())
        assert slow.now == 0 and len(watcher.check()) == len(watcher.findings) == 1
    assert not heard and loss.calls == 0 and loss.weight.grad == 1
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_an_optimizer_that_cannot_skip_is_refused(recorder: Any) -> None:
    training = Training()
    training.optimizer = torch.optim.Adam(training.model.parameters(), capturable=True)
    with training.watched(), pytest.raises(fxprec.CaptureError, match=r"Adam cannot skip .* what watch finds has to"):
        training.captured(batches(1)[0])
