"""Checkpoints of ``FP16_Optimizer`` hold the masters and resume bit for bit; its accessors are the wrapped one's."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from fxprec.amp import FP16_Optimizer

BF16 = torch.bfloat16


def made(dynamic=True, sizes=(4, 3), **options):
    model = nn.Linear(*sizes).to(BF16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    args = {"scale_window": 3} if dynamic else None
    return model, FP16_Optimizer(optimizer, 8.0, dynamic, args, verbose=False, **options)


def train(model, optimizer, seeds, overflow_at=None):
    for seed in seeds:
        optimizer.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        loss = model(x.to(BF16)).float().square().mean()
        optimizer.backward(loss * float("inf") if seed == overflow_at else loss)
        optimizer.step()


def everything(model, optimizer):
    state = optimizer.optimizer.state_dict()["state"]
    tensors = [*model.parameters(), *optimizer.param_groups[0]["params"]]
    tensors += [value for entry in state.values() for value in entry.values()]
    return [t.detach().clone() for t in tensors], optimizer.loss_scaler.state_dict(), optimizer.overflow


def assert_same(a, b):
    assert all(map(torch.equal, a[0], b[0])) and a[1:] == b[1:]


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_training_resumes_bit_for_bit(stop, dynamic):
    model, optimizer = made(dynamic)
    train(model, optimizer, range(stop), overflow_at=2 if dynamic else None)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(stop, 8), overflow_at=6 if dynamic else None)

    torch.manual_seed(1)
    other, resumed = made(dynamic)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, range(stop, 8), overflow_at=6 if dynamic else None)
    assert_same(everything(other, resumed), everything(model, optimizer))


def test_the_masters_are_saved_and_the_model_follows_them():
    model, optimizer = made()
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    assert [m.dtype for m in saved["fp32_from_fp16"][0]] == [torch.float32] * 2
    assert not torch.equal(saved["fp32_from_fp16"][0][0], model.weight.float())  # more digits
    other, resumed = made()
    resumed.load_state_dict(saved)
    assert torch.equal(other.weight, model.weight)


def test_a_state_between_backward_and_step_remembers_the_overflow():
    model, optimizer = made()
    optimizer.backward(model(torch.ones(1, 4, dtype=BF16)).float().sum() * float("inf"))
    _, resumed = made()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.step()
    assert (resumed.loss_scale, resumed.state) == (2.0**15, {})


@pytest.mark.parametrize(
    "spoil, error, words",
    [
        (lambda s: s.pop("fp32_from_fp16"), RuntimeError, r"lacks \['fp32_from_fp16'\]"),
        (lambda s: s.update(dynamic_loss_scale=False), RuntimeError, "dynamic_loss_scale=False"),
        (lambda s: s["loss_scaler"].update(loss_scale=-1.0), ValueError, "greater than 0"),
        (lambda s: s["loss_scaler"].pop("unskipped"), RuntimeError, "unskipped"),
        (lambda s: s["fp32_from_fp16"][0].pop(), RuntimeError, "saved masters"),
        (lambda s: s["optimizer_state_dict"]["param_groups"].clear(), ValueError, "parameter group"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(spoil, error, words):
    model, optimizer = made()
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    before = everything(model, optimizer)
    spoil(state)
    with pytest.raises(error, match=words):
        optimizer.load_state_dict(state)
    assert_same(everything(model, optimizer), before)


def test_it_is_saved_by_state_dict_only():
    _, optimizer = made()
    with pytest.raises(RuntimeError, match=r"serialized using state_dict\(\)"):
        pickle.dumps(optimizer)
    with pytest.raises(RuntimeError, match=r"deserialized using load_state_dict\(\)"):
        optimizer.__setstate__({})


def test_the_scale_can_be_read_and_set():
    _, optimizer = made(dynamic=False)
    assert optimizer.loss_scale == 8.0
    optimizer.loss_scale = 32
    assert optimizer.loss_scale == 32.0
    with pytest.raises(ValueError, match="finite and greater than 0"):
        optimizer.loss_scale = float("nan")
    assert optimizer.loss_scale == 32.0


def test_state_and_groups_are_those_of_the_wrapped_optimizer():
    _, optimizer = made()
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    optimizer.param_groups, optimizer.state = [*optimizer.param_groups], {}
    assert optimizer.optimizer.state == {} and len(optimizer.optimizer.param_groups) == 1
