"""One loss's scale moves as apex's: against a reference in plain Python, for any sequence of overflows."""

from __future__ import annotations

import random

import pytest
import torch

from fxprec.amp._amp_state import AmpLossScaler, checked_entry, properties_of
from fxprec.errors import LossScaleFloorError


def made(loss_scale: object = "dynamic", low: float | None = None, high: float | None = 2.0**24) -> AmpLossScaler:
    return AmpLossScaler(properties_of("O1", torch.bfloat16, {"loss_scale": loss_scale}), "cpu", low, high)


class Loop:
    """One parameter, and iterations that overflow or not."""

    def __init__(self, scaler: AmpLossScaler) -> None:
        self.scaler = scaler
        self.parameter = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)

    def run(self, overflow: bool) -> bool:
        with self.scaler.scaler.scale_loss(self.parameter.sum(), self.optimizer) as loss:
            loss.backward()
            if overflow:
                self.parameter.grad[0] = float("inf")
        found = self.scaler.found_inf()
        self.scaler.update()
        self.parameter.grad = None
        return found


@pytest.mark.parametrize("low, high", [(None, 2.0**24), (2.0**14, 2.0**17), (None, 2.0**10)])
def test_a_dynamic_scale_halves_doubles_and_stays_within_its_bounds(low, high):
    loop = Loop(made(low=low, high=high))
    loop.scaler._scale_seq_len = 3
    scale, unskipped = min(2.0**16, high), 0
    chance = random.Random(0)
    for _ in range(40):
        overflow = chance.random() < 0.3
        assert loop.run(overflow) == overflow
        if overflow:
            scale, unskipped = max(scale / 2, low or 0), 0
        else:
            unskipped += 1
        if unskipped == 3:
            scale, unskipped = min(high, scale * 2), 0
        assert (loop.scaler.loss_scale(), loop.scaler._unskipped) == (scale, unskipped)


def test_it_starts_at_65536_and_doubles_after_2000_good_steps():
    loop = Loop(made())
    loop.scaler.load(2.0**16, 1998)
    loop.run(False)
    assert (loop.scaler.loss_scale(), loop.scaler._unskipped) == (2.0**16, 1999)
    loop.run(False)
    assert (loop.scaler.loss_scale(), loop.scaler._unskipped) == (2.0**17, 0)


def test_a_static_scale_stays_and_never_reports_an_overflow():
    loop = Loop(made("128.0", low=256.0, high=512.0))  # the bounds are for dynamic scales
    assert [loop.run(overflow) for overflow in (False, True, False)] == [False] * 3
    assert (loop.scaler.loss_scale(), loop.scaler._unskipped) == (128.0, 3)


def test_gradients_are_unscaled_exactly():
    scaler = made()
    loop = Loop(scaler)
    with scaler.scaler.scale_loss(loop.parameter.sum(), loop.optimizer) as loss:
        assert loss.item() == 2 * 65536
        loss.backward()
        assert loop.parameter.grad.tolist() == [65536, 65536]
    assert loop.parameter.grad.tolist() == [1, 1]


def test_a_block_without_gradients_moves_nothing():
    scaler = made()
    loop = Loop(scaler)
    with scaler.scaler.scale_loss(loop.parameter.sum(), loop.optimizer) as loss:
        (gradient,) = torch.autograd.grad(loss, loop.parameter)
    scaler.update()
    assert gradient.tolist() == [65536, 65536]
    assert (scaler.loss_scale(), scaler._unskipped) == (65536, 0)
    assert loop.run(False) is False and scaler._unskipped == 1


def test_without_a_floor_the_scale_does_not_reach_0_silently():
    loop = Loop(made())
    loop.scaler.load(2.0**-125, 0)
    with pytest.raises(LossScaleFloorError, match="fell to its floor"):
        loop.run(True)


def test_with_a_floor_it_stays_there():
    loop = Loop(made(low=2.0**15))
    for _ in range(3):
        loop.run(True)
    assert loop.scaler.loss_scale() == 2.0**15


def test_rules_that_are_set_are_those_of_the_scaler_that_the_model_has():
    loop = Loop(made())
    scaler = loop.scaler.scaler
    loop.scaler._scale_seq_len, loop.scaler._min_loss_scale = 2, 2.0**15
    with pytest.raises(ValueError, match="min_scale=32768 is above max_scale=1"):
        loop.scaler._max_loss_scale = 1.0
    with pytest.raises(ValueError, match="growth_interval must be a whole number of at least 1, not 0"):
        loop.scaler._scale_seq_len = 0
    for overflow in (True, True, False, False):
        loop.run(overflow)
    assert loop.scaler.scaler is scaler and scaler.get_scale() == 2.0**16  # to the floor, and up after two good steps
    loop.scaler.dynamic = False
    assert not loop.scaler.dynamic and (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (1.0, 1.0)


@pytest.mark.parametrize("loss_scale", ["dynamic", 8.0])
def test_loading_continues_from_the_saved_numbers(loss_scale):
    loop = Loop(made(loss_scale))
    loop.run(False)
    loop.scaler.load(512.0, 17)
    assert (loop.scaler.loss_scale(), loop.scaler._unskipped) == (512.0, 17)
    loop.run(False)
    assert (loop.scaler.loss_scale(), loop.scaler._unskipped) == (512.0, 18)


@pytest.mark.parametrize(
    "entry, error",
    [
        ({"loss_scale": 1.0}, RuntimeError),
        ({"unskipped": 1}, RuntimeError),
        (3.0, RuntimeError),
        ({"loss_scale": float("nan"), "unskipped": 0}, ValueError),
        ({"loss_scale": -1.0, "unskipped": 0}, ValueError),
        ({"loss_scale": "8", "unskipped": 0}, ValueError),
        ({"loss_scale": 8.0, "unskipped": -1}, ValueError),
        ({"loss_scale": 8.0, "unskipped": 1.5}, ValueError),
    ],
)
def test_a_saved_entry_is_checked(entry, error):
    with pytest.raises(error, match="loss_scaler0"):
        checked_entry("loss_scaler0", entry)
    assert checked_entry("loss_scaler0", {"loss_scale": 8, "unskipped": 2}) == (8.0, 2)
