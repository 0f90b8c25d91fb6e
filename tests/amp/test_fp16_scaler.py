"""The static and the dynamic scale of half models, against counting by hand."""

from __future__ import annotations

import random

import pytest
import torch

from fxprec.amp.fp16_optimizer import DynamicLossScaler, StaticLossScaler
from fxprec.errors import LossScaleFloorError

INF = float("inf")


@pytest.mark.parametrize("low, high", [(None, None), (2.0**4, 2.0**9)])
def test_a_dynamic_scale_moves_by_its_window_and_factor_within_its_bounds(low, high):
    scaler = DynamicLossScaler(2.0**8, 4.0, 3, low, high)
    scale, good, chance = 2.0**8, 0, random.Random(1)
    for _ in range(60):
        overflow = chance.random() < 0.25
        scaler.update_scale(overflow)
        good = 0 if overflow else good + 1
        if overflow:
            scale = max(scale / 4, low or 0)
        elif good == 3:
            scale, good = min(scale * 4, high or INF), 0
        assert (scaler.loss_scale, scaler.unskipped) == (scale, good)


def test_its_defaults_are_those_of_apex():
    scaler = DynamicLossScaler()
    assert (scaler.loss_scale, scaler.scale_factor, scaler.scale_window) == (2.0**32, 2.0, 1000)
    for _ in range(40):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1.0


@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
def test_overflow_is_an_inf_or_nan_in_any_gradient(bad):
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float16, torch.float32)]
    scaler = DynamicLossScaler()
    assert not scaler.has_overflow(parameters)
    parameters[1].grad = torch.full((3,), 3e38)  # their sum is inf, they are not
    assert not scaler.has_overflow(iter(parameters))
    parameters[1].grad[2] = bad
    assert scaler.has_overflow(parameters)
    assert not StaticLossScaler().has_overflow(parameters)


def test_a_static_scale_stays():
    scaler = StaticLossScaler(8)
    scaler.update_scale(True)
    assert scaler.loss_scale == 8.0


def test_backward_scales_the_gradients():
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    loss = x.sum()
    StaticLossScaler(2.0**10).backward(loss, retain_graph=True)
    StaticLossScaler(2.0**10).backward(loss)
    assert x.grad.tolist() == [2.0**11] * 2
    hook = StaticLossScaler(4.0).scale_gradient(None, (torch.ones(1), torch.zeros(1)), None)
    assert [g.item() for g in hook] == [4.0, 0.0]


def test_the_scale_does_not_reach_0_silently():
    scaler = DynamicLossScaler(2.0**-125, min_loss_scale=None)
    scaler.update_scale(True)
    with pytest.raises(LossScaleFloorError, match="gradients hold inf or nan at every scale"):
        scaler.update_scale(True)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"init_scale": 0}, "init_scale"),
        ({"init_scale": INF}, "init_scale"),
        ({"scale_factor": 1.0}, "scale_factor"),
        ({"scale_window": 0}, "scale_window"),
        ({"scale_window": 2.5}, "scale_window"),
        ({"min_loss_scale": -1}, "min_loss_scale"),
        ({"max_loss_scale": float("nan")}, "max_loss_scale"),
    ],
)
def test_numbers_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        DynamicLossScaler(**options)
    with pytest.raises(ValueError, match="scale"):
        StaticLossScaler(-2.0)


@pytest.mark.parametrize(
    "state, error",
    [
        ({"loss_scale": 2.0}, RuntimeError),
        (None, RuntimeError),
        ({"loss_scale": -2.0, "unskipped": 0}, ValueError),
        ({"loss_scale": 2.0, "unskipped": -1}, ValueError),
        ({"loss_scale": 2.0, "unskipped": True}, ValueError),
    ],
)
def test_a_saved_state_is_checked(state, error):
    with pytest.raises(error):
        DynamicLossScaler().checked(state)


def test_a_loaded_scale_goes_on_where_it_was():
    a, b = DynamicLossScaler(8.0, scale_window=2), DynamicLossScaler(scale_window=2)
    a.update_scale(False)
    b.load_state_dict(b.checked(a.state_dict()))
    for scaler in (a, b):
        scaler.update_scale(False)
        assert (scaler.loss_scale, scaler.unskipped) == (16.0, 0)
