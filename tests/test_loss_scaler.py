import copy
import pickle

import pytest
import torch

from fxprec.default_scaler import make_scaler
from fxprec.loss_scaler import LossScaler


def problem(value: float = 2.0, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Parameter, torch.optim.SGD]:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -1.0], dtype=dtype) * value)
    return parameter, torch.optim.SGD([parameter], lr=0.25)


def train_step(
    scaler: LossScaler, parameter: torch.nn.Parameter, optimizer: torch.optim.SGD, poison: float = 0.0
) -> None:
    optimizer.zero_grad()
    scaler.scale((parameter * parameter).sum() / 2).backward()
    assert parameter.grad is not None
    parameter.grad += poison
    scaler.step(optimizer)
    scaler.update()


def test_a_scaled_step_is_the_plain_step():
    parameter, optimizer = problem()
    scaler = LossScaler("cpu", init_scale=1024.0)
    scaled = scaler.scale((parameter * parameter).sum() / 2)
    assert scaled.item() == 4 * 1024
    scaled.backward()
    assert torch.equal(parameter.grad, parameter.detach() * 1024)
    scaler.unscale_(optimizer)
    assert torch.equal(parameter.grad, parameter.detach())
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter.detach(), torch.tensor([1.5, -1.5]))
    assert scaler.get_scale() == 1024


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_inf_skips_the_step_and_backs_off(poison):
    parameter, optimizer = problem()
    scaler = LossScaler("cpu", init_scale=1024.0)
    train_step(scaler, parameter, optimizer, poison)
    assert torch.equal(parameter.detach(), torch.tensor([2.0, -2.0]))
    assert scaler.get_scale() == 512
    train_step(scaler, parameter, optimizer)
    assert torch.equal(parameter.detach(), torch.tensor([1.5, -1.5]))


def test_dynamic_grows_after_the_interval():
    parameter, optimizer = problem()
    scaler = LossScaler("cpu", init_scale=4.0, growth_interval=2)
    scales = []
    for _ in range(4):
        train_step(scaler, parameter, optimizer)
        scales.append(scaler.get_scale())
    assert scales == [4, 8, 8, 16]


def test_static_neither_grows_nor_backs_off_but_skips():
    parameter, optimizer = problem()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1, dynamic=False)
    train_step(scaler, parameter, optimizer)
    assert torch.equal(parameter.detach(), torch.tensor([1.5, -1.5]))
    train_step(scaler, parameter, optimizer, float("inf"))
    assert torch.equal(parameter.detach(), torch.tensor([1.5, -1.5]))
    assert scaler.get_scale() == 8


def test_static_stays_static_when_saved_and_loaded():
    parameter, optimizer = problem()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1, dynamic=False)
    train_step(scaler, parameter, optimizer)
    fresh = LossScaler("cpu")
    fresh.load_state_dict(scaler.state_dict())
    for again in (fresh, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        train_step(again, parameter, optimizer)
        train_step(again, parameter, optimizer, float("nan"))
        assert again.get_scale() == 8


def test_disabled_is_the_plain_loop_with_the_same_calls():
    parameter, optimizer = problem()
    scaler = LossScaler("cpu", enabled=False)
    loss = (parameter * parameter).sum()
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    train_step(scaler, parameter, optimizer)
    assert torch.equal(parameter.detach(), torch.tensor([1.5, -1.5]))
    assert not scaler.is_enabled() and scaler.get_scale() == 1 and scaler.state_dict() == {}


def test_float16_gradients_are_refused_unless_the_parameters_are_meant_to_be_low():
    parameter, optimizer = problem(dtype=torch.float16)
    with pytest.raises(ValueError, match="FP16 gradients"):
        train_step(LossScaler("cpu", init_scale=8.0), parameter, optimizer)
    train_step(LossScaler("cpu", init_scale=8.0, fp16_gradients=True), parameter, optimizer)
    assert torch.equal(parameter.detach(), torch.tensor([1.5, -1.5], dtype=torch.float16))


def test_the_default_device_is_one_that_exists():
    assert LossScaler().is_enabled()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_must_be_finite_and_positive(scale):
    with pytest.raises(ValueError, match="finite and greater than 0"):
        LossScaler("cpu", init_scale=scale)
    with pytest.raises(ValueError, match="finite and greater than 0"):
        make_scaler(scale, torch.float16, "O1", "cpu")


@pytest.mark.parametrize(
    ("argument", "dtype", "level", "enabled", "scale", "static"),
    [
        (None, torch.float16, "O1", True, 65536.0, False),
        (None, torch.float16, "O2", True, 65536.0, False),
        (None, torch.bfloat16, "O1", False, 1.0, False),
        (None, torch.float16, "O0", False, 1.0, False),
        (None, torch.float16, "O3", True, 1.0, True),
        (None, torch.bfloat16, "O3", True, 1.0, True),
        (False, torch.float16, "O1", False, 1.0, False),
        (128, torch.float16, "O1", True, 128.0, True),
        (128.0, torch.bfloat16, "O1", True, 128.0, True),
    ],
)
def test_what_convert_is_given_back(argument, dtype, level, enabled, scale, static):
    scaler = make_scaler(argument, dtype, level, "cpu")
    assert scaler.is_enabled() is enabled
    assert scaler.get_scale() == scale
    if enabled:
        assert (scaler.get_growth_factor() == 1.0 and scaler.get_backoff_factor() == 1.0) is static


def test_level_o3_trains_float16_parameters():
    parameter, optimizer = problem(dtype=torch.float16)
    train_step(make_scaler(None, torch.float16, "O3", "cpu"), parameter, optimizer)
    assert torch.equal(parameter.detach(), torch.tensor([1.5, -1.5], dtype=torch.float16))


def test_a_scaler_is_taken_as_it_is():
    scaler = LossScaler("cpu", init_scale=2.0)
    assert make_scaler(scaler, torch.bfloat16, "O1", "cpu") is scaler


@pytest.mark.parametrize("argument", [True, "dynamic", torch.amp.GradScaler("cpu")])
def test_anything_else_says_what_to_give(argument):
    with pytest.raises(TypeError, match=r"None .* False .* a number .* fxprec\.LossScaler"):
        make_scaler(argument, torch.float16, "O1", "cpu")
