"""What scripts set and read of apex's internals: it acts as there, or is refused; never without effect."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxprec import amp
from fxprec.amp._amp_state import AmpState, state


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    before = dict(vars(state))
    vars(state).update(vars(AmpState()))
    yield
    vars(state).update(before)


def started(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, **{"verbosity": 0, **options})


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 4)).square().sum()


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, overflow: bool = False, loss_id: int = 0) -> float:
    """A ``scale_loss``; by how much the loss was scaled."""
    optimizer.zero_grad()
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
        (scaled_loss * float("inf") if overflow else scaled_loss).backward()
    return (scaled_loss / loss).item()


# -- the loss scale ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the first step", "after it"])
@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_the_loss_scale_that_a_script_sets_scales(loss_scale: float | str, when: str) -> None:
    model, optimizer = started(loss_scale=loss_scale)
    expected = torch.autograd.grad(loss_of(model), [*model.parameters()])
    if when == "after it":
        scaled(model, optimizer)
    (scaler,) = amp._amp_state.loss_scalers
    scaler._loss_scale = 2**20
    assert scaler.loss_scale() == scaler._loss_scale == 2**20
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2**20
    assert scaled(model, optimizer) == 2**20
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_it_moves_on_from_there_and_each_loss_has_its_own() -> None:
    model, optimizer = started(num_losses=2)
    first, second = amp._amp_state.loss_scalers
    first._loss_scale, second._loss_scale = 5, 4.0
    assert scaled(model, optimizer, overflow=True) == pytest.approx(5, rel=1e-6)
    assert scaled(model, optimizer, loss_id=1) == 4.0
    assert (first.loss_scale(), second.loss_scale()) == (2.5, 4.0)


def test_growth_can_be_set() -> None:
    model, optimizer = started()
    (scaler,) = amp._amp_state.loss_scalers
    scaler._scale_seq_len = 10
    scaler._unskipped = 8
    scales = [(scaled(model, optimizer), scaler.loss_scale(), scaler._unskipped)[1:] for _ in range(3)]
    assert scales == [(2.0**16, 9), (2.0**17, 0), (2.0**17, 1)]


def test_bounds_can_be_set() -> None:
    model, optimizer = started()
    (scaler,) = amp._amp_state.loss_scalers
    assert (scaler._min_loss_scale, scaler._max_loss_scale) == (None, 2.0**24)
    scaler._min_loss_scale = 2.0**15
    scaler._max_loss_scale = 2.0**16
    assert [scaled(model, optimizer, overflow=True) and scaler.loss_scale() for _ in range(3)] == [2.0**15] * 3
    scaler._unskipped = 1998
    assert [scaled(model, optimizer) and scaler.loss_scale() for _ in range(3)] == [2.0**15, 2.0**16, 2.0**16]
    scaler._min_loss_scale = None
    with pytest.raises(ValueError, match="not between"):
        scaler._loss_scale = 2.0**17


def test_a_dynamic_scale_can_be_stopped_and_started() -> None:
    model, optimizer = started()
    (scaler,) = amp._amp_state.loss_scalers
    scaler._unskipped = 7
    scaler.dynamic = False
    scaled(model, optimizer, overflow=True)
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**16, 8)
    scaler.dynamic = True
    scaled(model, optimizer, overflow=True)
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**15, 0)


def test_an_overflow_is_read() -> None:
    model, optimizer = started()
    (scaler,) = amp._amp_state.loss_scalers
    found = []
    for overflow in (False, True, False):
        scaled(model, optimizer, overflow=overflow)
        found.append(scaler._has_overflow)
    assert found == [False, True, False]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "4.0", None, True])
def test_a_scale_that_cannot_serve_is_refused(value: Any) -> None:
    started()
    (scaler,) = amp._amp_state.loss_scalers
    with pytest.raises(ValueError, match="loss_scale must be finite and greater than 0"):
        scaler._loss_scale = value
    assert scaler.loss_scale() == 2.0**16


@pytest.mark.parametrize("name", ["_loss_scale", "dynamic", "_max_loss_scale"])
def test_nothing_is_set_while_gradients_are_scaled(name: str) -> None:
    model, optimizer = started()
    (scaler,) = amp._amp_state.loss_scalers
    value = {"_loss_scale": 4.0, "dynamic": False, "_max_loss_scale": 2.0**20}[name]
    with amp.scale_loss(loss_of(model), optimizer, delay_unscale=True) as loss:
        with pytest.raises(RuntimeError, match="gradients are scaled by it"):
            setattr(scaler, name, value)
        loss.backward()
    with pytest.raises(RuntimeError, match="gradients are scaled by it"):
        setattr(scaler, name, value)
    scaled(model, optimizer)
    setattr(scaler, name, value)


@pytest.mark.parametrize("name", ["_dynamic", "_overflow_buf", "cur_scale", "loss_scale_"])
def test_what_is_not_there_is_neither_set_nor_read_in_silence(name: str) -> None:
    started()
    (scaler,) = amp._amp_state.loss_scalers
    with pytest.raises(AttributeError, match=rf"no '{name}'; of apex's internals it has _loss_scale"):
        setattr(scaler, name, 1.0)
    with pytest.raises(AttributeError, match=rf"no '{name}'.*fxprec\.LossScaler has unscale_"):
        getattr(scaler, name)
    assert copy.deepcopy(scaler).loss_scale() == 2.0**16


# -- the state ---------------------------------------------------------------------------------------------------------


def test_the_module_of_the_state() -> None:
    module = importlib.import_module("fxprec.amp._amp_state")
    assert module._amp_state is amp._amp_state is state
    assert module.master_params is amp.master_params and isinstance(state, module.AmpState)


def test_properties_are_read_as_options_too() -> None:
    started(opt_level="O2", cast_model_type=torch.bfloat16)
    options = amp._amp_state.opt_properties.options
    assert options["cast_model_type"] is torch.bfloat16 and options.get("cast_model_outputs") is None
    assert set(options) == {
        *("enabled", "opt_level", "cast_model_type", "patch_torch_functions"),
        *("keep_batchnorm_fp32", "master_weights", "loss_scale"),
    }
    with pytest.raises(TypeError):
        options["enabled"] = False
    with pytest.raises(AttributeError):
        amp._amp_state.opt_properties.enabled = False


def test_bounds_as_they_were_given() -> None:
    started(min_loss_scale=2.0, max_loss_scale=2.0**18)
    assert (amp._amp_state.min_loss_scale, amp._amp_state.max_loss_scale) == (2.0, 2.0**18)


@pytest.mark.parametrize("name", ["hard_override", "half_override", "loss_scale", "handle"])
def test_an_unknown_part_of_the_state_is_not_set_in_silence(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(amp._amp_state, name, True)


def test_the_handle_says_whether_functions_cast() -> None:
    handle = amp._amp_state.handle
    assert not handle.is_active()
    started(opt_level="O1")
    assert handle.is_active() and amp._amp_state.handle.has_cache is False
    with amp.disable_casts():
        assert not handle.is_active()
    handle._clear_cache()
    with pytest.raises(AttributeError, match=r"no 'wrap_optimizer'.*amp\.scale_loss"):
        handle.wrap_optimizer(None)


def test_models_with_low_parameters_are_taken_where_the_script_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).bfloat16())
    with pytest.raises(RuntimeError, match=r"Found param 1\.weight"):
        amp.initialize(model, opt_level="O1", verbosity=0)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    loss_of(model).backward()


# -- the optimizer -----------------------------------------------------------------------------------------------------


def test_scripts_that_restore_an_optimizer_with_its_masters() -> None:
    """As NVIDIA's examples do: initialize what is late, load the state, then copy the saved masters."""
    model, optimizer = started(opt_level="O2")
    scaled(model, optimizer)
    optimizer.step()
    saved = copy.deepcopy([optimizer.state_dict(), [*amp.master_params(optimizer)]])
    model, optimizer = started(opt_level="O2")
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_lazy_init()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(saved[0])
    for parameter, master in zip(amp.master_params(optimizer), saved[1], strict=True):
        parameter.data.copy_(master.data)
    for parameter, master in zip(model.parameters(), saved[1], strict=True):
        assert torch.equal(parameter, master)


def test_the_stash_tells_what_the_optimizer_owns() -> None:
    model, optimizer = started(opt_level="O2")
    stash = optimizer._amp_stash
    assert stash.all_fp16_params == stash.all_fp32_from_fp16_params == []
    assert [*map(id, stash.all_fp32_from_fp32_params)] == [*map(id, model.parameters())]
    with amp.scale_loss(loss_of(model), optimizer, delay_unscale=True) as loss:
        loss.backward()
    assert stash.params_have_scaled_gradients
    scaled(model, optimizer)
    assert not stash.params_have_scaled_gradients
    for name in ("params_have_scaled_gradients", "fp16_groups"):
        with pytest.raises(AttributeError):
            setattr(stash, name, [])
