"""timm's NativeScaler with our scaler: one call for backward, clipping, step and update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprec
from fxprec.integrations.timm import NativeScaler


class Theirs:
    """What timm's does, on torch's scaler."""

    def __init__(self, scaler):
        self._scaler = scaler

    def __call__(self, loss, optimizer, clip_grad, parameters):
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_as_timms():
    weights = []
    for make in (lambda: Theirs(torch.amp.GradScaler("cpu", 8.0)), lambda: NativeScaler(fxprec.LossScaler("cpu", 8.0))):
        model, optimizer = model_and_optimizer()
        scaler = make()
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().sum() * factor
            scaler(loss, optimizer, clip_grad=0.5, parameters=model.parameters())
        assert scaler._scaler.get_scale() == 4.0  # halved once
        weights.append(model.weight)
    assert torch.equal(*weights)


def test_an_accumulation_steps_at_its_end_and_values_are_clipped():
    model, optimizer = model_and_optimizer()
    before = model.weight.detach().clone()
    scaler = NativeScaler(fxprec.LossScaler("cpu", 8.0))
    scaler(model(torch.ones(3, 4)).sum(), optimizer, need_update=False)
    assert torch.equal(model.weight, before)
    scaler(model(torch.ones(3, 4)).sum(), optimizer, clip_grad=0.25, clip_mode="value", parameters=model.parameters())
    torch.testing.assert_close(model.weight, before - 0.025)


def test_states_and_refusals():
    assert NativeScaler.state_dict_key == "amp_scaler"
    scaler = NativeScaler(fxprec.LossScaler("cpu", 8.0))
    other = torch.amp.GradScaler("cpu", 32.0)
    scaler.load_state_dict(other.state_dict())
    assert scaler.state_dict()["scale"] == 32.0
    model, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match=r"parameters=model\.parameters\(\)"):
        scaler(model(torch.ones(3, 4)).sum(), optimizer, clip_grad=1.0)
    assert model.weight.grad is None
    with pytest.raises(TypeError, match=r"give the LossScaler that fxprec\.convert returned"):
        NativeScaler(other)
