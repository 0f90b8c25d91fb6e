"""Scale, growth tracker and hysteresis against the rules of torch, Megatron-LM and DeepSpeed, told in plain Python."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxprec.scaling.scale import LossScale, UpdateRule

OVERFLOWS = st.lists(st.booleans(), max_size=30)
COUNT = st.integers(1, 4)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def moved(overflows, rule, scale=2.0**10):
    """The scale after each update."""
    loss = LossScale(scale, 0, rule.hysteresis)
    loss.place(torch.device("cpu"))
    scales = []
    for overflow in overflows:
        loss.update(torch.tensor(float(overflow)), rule)
        scales.append(loss.number())
    return scales


def megatron(overflows, interval, hysteresis, low=0.0, scale=2.0**10):
    """Megatron-LM, core/optimizer/grad_scaler.py, DynamicGradScaler.update."""
    growth, left, scales = 0, hysteresis, []
    for overflow in overflows:
        if overflow:
            growth, left = 0, left - 1
            if left <= 0:
                scale = max(scale * 0.5, low)
        else:
            growth += 1
            if growth == interval:
                growth, left, scale = 0, hysteresis, scale * 2.0
        scales.append(scale)
    return scales


def deepspeed(overflows, window, shift, consecutive, low=1.0, scale=2.0**10):
    """DeepSpeed, runtime/fp16/loss_scaler.py, DynamicLossScaler.update_scale (which does not raise here)."""
    left, last, scales = shift, -1, []
    for i, overflow in enumerate(overflows):
        if overflow:
            if shift == 1 or left == 1:
                scale = max(scale / 2.0, low)
            else:
                left -= 1
            last = i
        else:
            if consecutive:
                left = shift
            if (i - last) % window == 0:
                if not consecutive:
                    left = shift
                scale *= 2.0
        scales.append(scale)
    return scales


@quick
@given(overflows=OVERFLOWS, interval=COUNT, hysteresis=COUNT)
def test_hysteresis_as_megatron_has_it(overflows, interval, hysteresis):
    rule = UpdateRule(2.0, 0.5, interval, hysteresis, min_scale=256.0)
    assert moved(overflows, rule) == megatron(overflows, interval, hysteresis, 256.0)


@quick
@given(overflows=OVERFLOWS, interval=COUNT, hysteresis=COUNT, consecutive=st.booleans())
def test_hysteresis_as_deepspeed_has_it(overflows, interval, hysteresis, consecutive):
    rule = UpdateRule(2.0, 0.5, interval, hysteresis, consecutive, min_scale=1.0)
    assert moved(overflows, rule) == deepspeed(overflows, interval, hysteresis, consecutive)


@quick
@given(overflows=OVERFLOWS, interval=COUNT, growth=st.sampled_from([2.0, 1.5]), backoff=st.sampled_from([0.5, 0.3]))
def test_without_hysteresis_as_torch_has_it(overflows, interval, growth, backoff):
    scale, tracker = torch.tensor(2.0**10), torch.tensor(0, dtype=torch.int32)
    expected = []
    for overflow in overflows:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), growth, backoff, interval)
        expected.append(scale.item())
    for consecutive in (False, True):
        assert moved(overflows, UpdateRule(growth, backoff, interval, 1, consecutive)) == expected


@quick
@given(overflows=OVERFLOWS, interval=COUNT, hysteresis=COUNT)
def test_bounds_hold_and_are_left_again(overflows, interval, hysteresis):
    low, high = 2.0**9, 2.0**11
    scales = moved(overflows, UpdateRule(2.0, 0.5, interval, hysteresis, False, low, high))
    assert all(low <= scale <= high for scale in scales)
    bounded, left, growth, scale = [], hysteresis, 0, 2.0**10
    for overflow in overflows:
        if overflow:
            growth, left = 0, max(left - 1, 0)
            scale = max(low, scale / 2) if left == 0 else scale
        else:
            growth += 1
            if growth == interval:
                growth, left, scale = 0, hysteresis, min(high, scale * 2)
        bounded.append(scale)
    assert scales == bounded


def test_two_overflows_are_tolerated_and_the_third_backs_off():
    rule = UpdateRule(2.0, 0.5, 3, hysteresis=3)
    assert moved([1, 1, 1, 1, 0, 0, 1, 0, 0, 0, 1], rule, 64.0) == [64, 64, 32, 16, 16, 16, 8, 8, 8, 16, 16]
    rule = UpdateRule(2.0, 0.5, 3, hysteresis=3, consecutive=True)
    assert moved([1, 1, 0, 1, 1, 1, 1, 0, 1], rule, 64.0) == [64, 64, 64, 64, 64, 32, 16, 16, 16]


def test_set_before_and_after_the_tensors_are_there():
    loss = LossScale(4.0, 0, 1)
    loss.set(8.0, 2, 3)
    assert loss.numbers() == (8.0, 2, 3) and loss.number() == 8.0
    loss.place(torch.device("cpu"))
    scale, tracker, left = loss.scale, loss.growth_tracker, loss.hysteresis_left
    loss.set(16.0, 1, 2)
    assert loss.numbers() == (16.0, 1, 2)
    assert loss.scale is scale and loss.growth_tracker is tracker and loss.hysteresis_left is left
