"""The floor of a loss scale: noticed when reached, for almost nothing before."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import fxprec.scaling.scale as module
from fxprec.errors import LossScaleFloorError
from fxprec.host_reads import OnHost, reading_waits
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.scaling.scale import FloorWatch, LossScale, UpdateRule

pytestmark = pytest.mark.filterwarnings("error")


def iteration(scaler, overflow, num=1):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for loss_id in range(num):
        with scaler.scale_loss(parameter.sum() * (float("inf") if overflow else 1.0), optimizer, loss_id) as loss:
            loss.backward()
    scaler.step(optimizer)
    scaler.update()


def until_it_raises(scaler, overflows):
    for i, overflow in enumerate(overflows):
        try:
            iteration(scaler, overflow)
        except LossScaleFloorError:
            return i
    return None


@pytest.mark.parametrize("init", [4.0, 5.0, 1024.0, 3.0 * 2**20])
def test_raises_at_the_update_that_takes_the_scale_to_its_minimum(init):
    scaler, falls, scale = LossScaler("cpu", init, min_scale=1.0), 0, init
    while scale > 1:
        scale, falls = max(scale / 2, 1.0), falls + 1
    assert until_it_raises(scaler, [True] * 40) == falls - 1
    assert scaler.get_scale() == 1.0
    assert until_it_raises(scaler, [True]) == 0  # and at each overflow there
    assert until_it_raises(scaler, [False] * 5) is None


def test_good_steps_at_the_floor_are_good():
    scaler = LossScaler("cpu", 2.0, min_scale=2.0, growth_interval=2)
    assert until_it_raises(scaler, [False] * 4) is None
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("seed", range(8))
def test_falls_and_growth_in_any_order_are_counted_right(seed):
    """The watch sleeps while the scale cannot have come to the floor; it must never sleep too long."""
    generator = torch.Generator().manual_seed(seed)
    overflows = (torch.rand(300, generator=generator) < 0.4).tolist()
    scaler, scale, good = LossScaler("cpu", 64.0, min_scale=8.0, growth_interval=2, on_floor="warn"), 64.0, 0
    for overflow in overflows:
        if overflow:
            scale, good = max(scale / 2, 8.0), 0
        else:
            good = (good + 1) % 2
            scale *= 1 if good else 2
        if overflow and scale == 8.0:
            with pytest.warns(UserWarning, match=r"fell to its floor \(8\)"):
                iteration(scaler, overflow)
        else:
            iteration(scaler, overflow)  # a warning would be an error
        assert scaler.get_scale() == scale


def test_warn_and_none_go_on():
    scaler = LossScaler("cpu", 4.0, min_scale=2.0, on_floor="warn")
    for _ in range(3):
        with pytest.warns(UserWarning, match=r"fell to its floor \(2\) after \d skipped steps?:") as record:
            iteration(scaler, True)
        assert record[0].filename == __file__  # points at the caller of update
    silent = LossScaler("cpu", 4.0, min_scale=2.0, on_floor=None)
    for _ in range(3):
        iteration(silent, True)
    assert scaler.get_scale() == silent.get_scale() == 2.0


@pytest.mark.parametrize("on_floor", ["warn", None])
def test_without_a_minimum_the_scale_never_reaches_0(on_floor):
    scaler = LossScaler("cpu", 2.0**-120, on_floor=on_floor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(40):
            iteration(scaler, True)
    assert scaler.get_scale() == 2.0**-126
    parameter = nn.Parameter(torch.ones(2))
    scaler.scale(parameter.sum() * 4).backward()
    scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))
    assert parameter.grad.tolist() == [4, 4]  # its reciprocal is a number


def test_hysteresis_delays_the_floor():
    scaler = LossScaler("cpu", 4.0, min_scale=2.0, hysteresis=3)
    assert until_it_raises(scaler, [True] * 9) == 2
    fresh = LossScaler("cpu", 2.0, min_scale=2.0, hysteresis=3)
    assert until_it_raises(fresh, [True, True, False, True]) == 3


def test_a_static_scale_has_no_floor():
    assert until_it_raises(LossScaler("cpu", 2.0, min_scale=2.0, dynamic=False), [True] * 3) is None


def test_any_of_several_losses_may_fall():
    scaler = LossScaler("cpu", 4.0, min_scale=2.0, num_losses=3)
    with pytest.raises(LossScaleFloorError, match=r"floor \(4, 2, 4\)"):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for loss_id, factor in enumerate((1.0, float("nan"), 1.0)):
            with scaler.scale_loss(parameter.sum() * factor, optimizer, loss_id) as loss:
                loss.backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("change", ["update", "load", "backoff"])
def test_a_changed_scale_wakes_the_watch(change):
    scaler = LossScaler("cpu", 2.0**20, min_scale=1.0)
    iteration(scaler, False)
    assert not scaler._records.floor.near  # sleeps for 19 updates
    if change == "update":
        scaler.update(2.0)
    elif change == "load":
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    else:
        scaler.set_backoff_factor(2.0**-30)
    assert until_it_raises(scaler, [True]) == 0


class Later:
    """Stands in for a copy from CUDA that takes a while."""

    def __init__(self, monkeypatch, polls):
        self.copies, self.polls = 0, polls
        monkeypatch.setattr(module, "OnHost", self)

    def of(self, values):
        self.copies += 1
        countdown = itertools.count(-self.polls)
        return OnHost(values.clone(), lambda: next(countdown) >= 0, lambda: None)


@pytest.mark.parametrize("polls", [0, 1, 2])
def test_on_cuda_it_is_noticed_an_update_or_two_later(monkeypatch, polls):
    Later(monkeypatch, polls)
    scaler = LossScaler("cpu", 8.0, min_scale=2.0)
    assert until_it_raises(scaler, [True] * 9) == 1 + polls
    scaler.load_state_dict(scaler.state_dict())  # copies on their way are of the run before
    assert until_it_raises(scaler, [False] * 5) is None


def test_updates_far_from_the_floor_copy_nothing(monkeypatch):
    later = Later(monkeypatch, 1)
    scaler = LossScaler("cpu", 2.0**16, min_scale=1.0, growth_interval=10**6)
    for _ in range(60):
        iteration(scaler, False)
    assert later.copies <= 60 / 15 * 2 + 2  # until a copy is there each update makes one


def test_nothing_is_noted_while_a_cuda_graph_is_captured(monkeypatch):
    later = Later(monkeypatch, 0)
    monkeypatch.setattr(module, "capturing", lambda device: True)
    iteration(LossScaler("cpu", 2.0, min_scale=1.0), True)
    assert later.copies == 0


def test_only_cuda_waits():
    assert reading_waits(torch.device("cuda")) and not reading_waits(torch.device("cpu"))


def test_the_tolerated_overflow_is_seen_on_the_device():
    rule, found = UpdateRule(2.0, 0.5, 9, hysteresis=2), torch.ones(())
    watch, loss = FloorWatch(4.0), LossScale(4.0, 0, 2)
    loss.place(torch.device("cpu"))
    fallen = []
    for _ in range(2):
        loss.update(found, rule)
        watch.note([(loss, found)], [loss], rule)
        fallen.append(watch.fallen(0.5))
    assert fallen == [False, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_copies_from_cuda_are_noticed():
    parameter = nn.Parameter(torch.ones(2, device="cuda"))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), LossScaler("cuda", 8.0, min_scale=2.0)
    with pytest.raises(LossScaleFloorError):
        for _ in range(10):
            optimizer.zero_grad()
            scaler.scale(parameter.sum() * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
            torch.cuda.synchronize()
