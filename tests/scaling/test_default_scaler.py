import pytest
import torch

from fxprec.errors import ConversionError
from fxprec.scaling.loss_scaler import LossScaler, make_scaler


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
    parameter = torch.nn.Parameter(torch.tensor([2.0, -2.0], dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    scaler = make_scaler(None, torch.float16, "O3", "cpu")
    scaler.scale((parameter * parameter).sum() / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter.detach(), torch.tensor([1.5, -1.5], dtype=torch.float16))


def test_a_scaler_is_taken_as_it_is():
    scaler = LossScaler("cpu", init_scale=2.0)
    assert make_scaler(scaler, torch.bfloat16, "O1", "cpu") is scaler


@pytest.mark.parametrize("argument", [True, "dynamic", torch.amp.GradScaler("cpu")])
def test_anything_else_says_what_to_give(argument):
    with pytest.raises(TypeError, match=r"None .* False .* a number .* fxprec\.LossScaler"):
        make_scaler(argument, torch.float16, "O1", "cpu")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_static_scale_must_be_finite_and_positive(scale):
    with pytest.raises(ValueError, match="finite and greater than 0"):
        make_scaler(scale, torch.float16, "O1", "cpu")


def test_float16_on_cuda_without_cuda_is_refused_not_disabled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConversionError, match="torch sees no CUDA device: the gradients would not be scaled"):
        make_scaler(None, torch.float16, "O1", "cuda")
    assert not make_scaler(None, torch.float16, "O0", "cuda").is_enabled()
    assert not make_scaler(None, torch.bfloat16, "O1", "cuda").is_enabled()
