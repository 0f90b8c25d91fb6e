"""What a loss scaler is given wrongly: type and message of each refusal, and that it changed nothing."""

import pickle
import re

import pytest
import torch
from torch import nn

import fxprec
from fxprec.errors import (
    ClosureError,
    LossScaleError,
    LossScaleFloorError,
    NoGradientsError,
    UnusedSettingWarning,
)
from fxprec.scaling.loss_scaler import LossScaler

INF, NAN = float("inf"), float("nan")
FINITE = r"must be finite and greater than 0 in float32 \(1\.18e-38 to 3\.4e\+38\), not "


def problem(count=1, dtype=torch.float32):
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(count)]
    return parameters, [torch.optim.SGD([parameter], lr=0.5) for parameter in parameters]


def everything(scaler, parameters=()):
    """All that a refused call must leave as it was."""
    values = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in parameters]
    return scaler.state_dict(), scaler._init_scale, scaler._records.scaled, str(values)


@pytest.mark.parametrize(
    "arguments, message",
    [
        *(({"init_scale": bad}, "init_scale " + FINITE) for bad in (0, -1, NAN, INF, -INF, "8", None, True, 1e39)),
        *(({"init_scale": bad}, "init_scale " + FINITE) for bad in (10**400, 1e-42, torch.tensor(8.0), 1j)),
        *(
            ({"growth_factor": bad}, "growth_factor must be finite and greater than 1")
            for bad in (1, 0.5, -2, INF, NAN)
        ),
        *(({"backoff_factor": bad}, "backoff_factor must be greater than 0 and less than 1") for bad in (0, 1, -1, 2)),
        *(({"backoff_factor": bad}, "backoff_factor must be greater than 0 and less than 1") for bad in (INF, NAN)),
        *(({"growth_interval": bad}, "growth_interval must be a whole number of at least 1") for bad in (0, -1, 1.5)),
        *(({"growth_interval": bad}, "growth_interval must be a whole number of") for bad in (True, NAN, "9", 2**31)),
        *(({"hysteresis": bad}, "hysteresis must be a whole number of at least 1") for bad in (0, -1, 1.5)),
        *(({"num_losses": bad}, "num_losses must be a whole number of at least 1") for bad in (0, -1, 1.5)),
        *(({"min_scale": bad}, "min_scale " + FINITE) for bad in (0, -1, NAN, INF)),
        *(({"max_scale": bad}, "max_scale " + FINITE) for bad in (0, -1, NAN, INF)),
        ({"init_scale": 4, "min_scale": 8}, "a scale of 4 is not between min_scale=8.0 and max_scale=None"),
        ({"init_scale": 4, "max_scale": 2}, "a scale of 4 is not between min_scale=None and max_scale=2.0"),
        ({"on_floor": "ignore"}, "on_floor must be one of 'raise', 'warn', None, not 'ignore'"),
    ],
)
def test_constructor(arguments, message):
    with pytest.raises(LossScaleError, match=message) as caught:
        LossScaler("cpu", **arguments)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, AssertionError)  # torch raises the latter


@pytest.mark.parametrize(
    "setter, value, message",
    [
        ("set_growth_factor", 1.0, "growth_factor must be"),
        ("set_backoff_factor", 1.0, "backoff_factor must be"),
        ("set_growth_interval", 0, "growth_interval must be"),
    ],
)
def test_setters(setter, value, message):
    scaler = LossScaler("cpu")
    before = everything(scaler)
    with pytest.raises(ValueError, match=message):
        getattr(scaler, setter)(value)
    assert everything(scaler) == before


@pytest.mark.parametrize(
    "new, message",
    [
        *((bad, "the new scale " + FINITE) for bad in (-3.0, 0, NAN, INF, "4", 1e300, 10**400, True, [4.0])),
        *((torch.tensor(bad), "the new scale " + FINITE) for bad in (-3.0, NAN, INF, 0)),
        (torch.ones(2), r"new_scale should be a number or a tensor of one element .* not one of shape \(2,\) on 'cpu'"),
        (torch.ones((), requires_grad=True), "without requires_grad, not one .* that requires grad"),
        (torch.ones((), device="meta"), "on 'cpu' without requires_grad, not one of shape .* on 'meta'"),
        (64.0, "a scale of 64 is not between min_scale=2.0 and max_scale=32.0"),
    ],
)
def test_update(new, message):
    (parameter,), (optimizer,) = problem()
    scaler = LossScaler("cpu", 4.0, min_scale=2.0, max_scale=32.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    before = everything(scaler, [parameter])
    with pytest.raises(LossScaleError, match=message):
        scaler.update(new)
    assert everything(scaler, [parameter]) == before
    scaler.update()  # the iteration is still open
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("new", [8, 8.0, torch.tensor(8), torch.tensor([[8.0]])])
def test_update_accepts_whole_numbers_and_tensors_of_one_element(new):
    scaler = LossScaler("cpu", 4.0)
    scaler.scale(torch.ones(()))
    scaler.update(new)
    assert scaler.get_scale() == 8.0


def changed(**changes):
    state = LossScaler("cpu", 4.0, num_losses=2).state_dict()
    extra = changes.pop("extra", {})
    return {**state, **changes, "fxprec": {**state["fxprec"], **extra}}


def without(*keys):
    return {key: value for key, value in changed().items() if key not in keys}


LOSS = {"scale": 4.0, "growth_tracker": 0, "hysteresis_left": 1}


@pytest.mark.parametrize(
    "state, error, message",
    [
        ([], TypeError, "a scaler's state is a dict, not list"),
        (None, TypeError, "a scaler's state is a dict, not NoneType"),
        ({}, RuntimeError, "The source state dict is empty, possibly because it was saved from a disabled instance"),
        (without("scale"), RuntimeError, r"lacks \['scale'\]; it has \['_growth_tracker', 'backoff_factor', 'fxprec'"),
        (without("growth_factor", "_growth_tracker"), RuntimeError, r"lacks \['growth_factor', '_growth_tracker'\]"),
        (
            changed(extra={"losses": [LOSS, {"scale": 4.0}]}),
            RuntimeError,
            r"lacks \['growth_tracker'\] of loss 1; it has",
        ),
        (changed(extra={"losses": None}), RuntimeError, "lacks the list 'losses' under 'fxprec'"),
        (changed(extra={"losses": [LOSS, 3]}), RuntimeError, "state of each loss under 'fxprec' is a dict"),
        ({**changed(), "fxprec": 5}, RuntimeError, "lacks the list 'losses' under 'fxprec'"),
        (changed(scale=NAN), ValueError, "the saved scale of loss 0 " + FINITE + "nan"),
        (changed(scale=-1.0), ValueError, "the saved scale of loss 0 " + FINITE + "-1.0"),
        (changed(scale=0.0), ValueError, "the saved scale of loss 0 " + FINITE + "0.0"),
        (changed(extra={"losses": [LOSS, {**LOSS, "scale": INF}]}), ValueError, "the saved scale of loss 1 " + FINITE),
        (
            changed(_growth_tracker=-1),
            ValueError,
            "the saved growth_tracker of loss 0 must be a whole number of at least",
        ),
        (changed(_growth_tracker=2**40), ValueError, "the saved growth_tracker of loss 0 must be a whole number"),
        (changed(extra={"losses": [LOSS, {**LOSS, "hysteresis_left": 0.5}]}), ValueError, "hysteresis_left of loss 1"),
        (changed(extra={"skipped_steps": -1}), ValueError, "the saved skipped_steps must be a whole number"),
        (changed(extra={"steps_without_gradients": 1.5}), ValueError, "the saved steps_without_gradients must be"),
        (changed(extra={"steps_without_gradients": 3}), ValueError, "3 steps without gradients, and fewer skipped"),
        (changed(extra={"blocks": [5]}), ValueError, "the saved blocks of scale_loss are malformed: 5"),
        (changed(extra={"blocks": 5}), ValueError, "the saved blocks of scale_loss are malformed"),
        (changed(extra={"blocks": [{"sizes": [1, 2], "delayed": 2, "overflow": {}}]}), ValueError, "are malformed"),
        (changed(extra={"blocks": [{"sizes": [1, 2], "delayed": 0, "overflow": {3: 1}}]}), ValueError, "are malformed"),
        (changed(growth_factor=0.5), ValueError, "growth_factor must be finite and greater than 1"),
        (changed(backoff_factor=NAN), ValueError, "backoff_factor must be greater than 0"),
        (changed(growth_interval=0), ValueError, "growth_interval must be a whole number"),
        (
            changed(extra={"losses": [LOSS]}),
            ValueError,
            "holds 1 losses, this scaler has num_losses=2: make it with num_",
        ),
        (changed(extra={"losses": [LOSS] * 3}), ValueError, "holds 3 losses, this scaler has num_losses=2"),
    ],
)
@pytest.mark.parametrize("used", [False, True])
def test_load_state_dict(state, error, message, used):
    (parameter,), (optimizer,) = problem()
    scaler = LossScaler("cpu", 16.0, growth_interval=3, num_losses=2)
    if used:
        scaler.scale(parameter.sum()).backward()
    before = everything(scaler, [parameter])
    with pytest.raises(error, match=message):
        scaler.load_state_dict(state)
    assert everything(scaler, [parameter]) == before
    if used:
        scaler.step(optimizer)


def test_backward_without_scale_after_scaled_ones():
    (parameter,), (optimizer,) = problem()
    scaler = LossScaler("cpu", 4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    parameter.sum().backward()
    before = everything(scaler, [parameter])
    for call in ("unscale_", "step", "clip_grad_norm_"):
        with pytest.raises(
            RuntimeError, match="gradients by a scale of 4, but nothing was scaled since the last update"
        ):
            getattr(scaler, call)(optimizer, *[1.0] * (call == "clip_grad_norm_"))
    assert everything(scaler, [parameter]) == before
    optimizer.step()  # as the message says


@pytest.mark.parametrize("known", [False, True])
def test_a_scale_set_while_gradients_of_the_old_scale_exist(known):
    (parameter,), (optimizer,) = problem()
    scaler = LossScaler("cpu", 4.0)
    if known:
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.update(8.0)
    scaler.scale(parameter.sum()).backward()
    before = everything(scaler, [parameter])
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(
            RuntimeError, match=r"gradient of param_groups\[0\]\['params'\]\[0\] of shape \(2,\) is a sum"
        ):
            call(optimizer)
    assert everything(scaler, [parameter]) == before
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_in_two_optimizers(fused):
    parameters, _ = problem(3)
    named = [[("left.weight", parameters[0]), ("shared", parameters[1])], [("shared", parameters[1])]]
    optimizers = [torch.optim.SGD(pairs, lr=0.5, fused=fused) for pairs in named]
    scaler = LossScaler("cpu", 4.0)
    scaler.scale((parameters[0] * parameters[1]).sum()).backward()
    scaler.step(optimizers[0])
    before = everything(scaler, parameters)
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(
            RuntimeError, match=r"^shared belongs to two optimizers, SGD and SGD: its gradient would be "
        ):
            call(optimizers[1])
    assert everything(scaler, parameters) == before
    scaler.update()


def test_the_scale_collapses():
    (parameter,), _ = problem()
    optimizer = torch.optim.SGD([("block.weight", parameter)], lr=0.5)
    scaler = LossScaler("cpu", 4.0)
    with pytest.raises(LossScaleFloorError) as caught:
        for _ in range(300):
            optimizer.zero_grad()
            scaler.scale(parameter.sum() * NAN).backward()
            scaler.step(optimizer)
            scaler.update()
    assert isinstance(caught.value, RuntimeError)
    assert re.match(
        r"the loss scale fell to its floor \(1.17549e-38\) after 128 skipped steps: gradients held inf "
        r"or nan at every scale above, .* The last overflow was in the gradients of block.weight. "
        r"fxprec\.numerics\.locate\(model, .* names the op .* fxprec\.numerics\.watch\(model, .* Look at the loss",
        str(caught.value),
    )
    assert scaler.get_scale() == 2.0**-126 and parameter.tolist() == [1, 1]
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()  # it can go on
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("fused", [False, True])
def test_no_gradients(fused):
    (parameter,), _ = problem()
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    scaler = LossScaler("cpu", 4.0)
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    with pytest.raises(
        NoGradientsError, match=r"none of the 1 parameters of AdamW has a gradient. Was backward\(\) call"
    ):
        scaler.step(optimizer)
    with pytest.raises(NoGradientsError, match=r"No inf checks were recorded prior to update: .*Call scaler.step"):
        scaler.update()
    assert issubclass(NoGradientsError, AssertionError)  # torch's


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_complex_gradients(call):
    real, (_,) = problem()
    odd = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([("head", real[0]), ("rotation", odd)], lr=0.5)
    scaler = LossScaler("cpu", 4.0)
    scaler.scale(real[0].sum() + odd.abs().sum()).backward()
    before = everything(scaler, [real[0], odd])
    with pytest.raises(
        TypeError, match=r"cannot be unscaled and checked for inf: rotation \(torch.complex64\). Keep such"
    ):
        getattr(scaler, call)(optimizer)
    assert everything(scaler, [real[0], odd]) == before


def test_float8_gradients():
    (parameter,), (optimizer,) = problem()
    scaler = LossScaler("cpu", 4.0)
    scaler.scale(parameter.sum()).backward()
    narrow = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))
    narrow.grad = torch.ones(2).to(torch.float8_e4m3fn)
    optimizer.add_param_group({"params": [narrow]})
    with pytest.raises(TypeError, match=r"param_groups\[1\]\['params'\]\[0\] of shape \(2,\) \(torch.float8_e4m3fn\)"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_float16_gradients(call):
    parameters = [nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(7)]
    optimizer = torch.optim.SGD([(f"layer{i}", parameter) for i, parameter in enumerate(parameters)], lr=0.5)
    scaler = LossScaler("cpu", 4.0)
    scaler.scale(sum(parameter.sum() for parameter in parameters)).backward()
    before = everything(scaler, parameters)
    message = (
        r"Attempting to unscale FP16 gradients. They belong to layer0, layer1, layer2, layer3, layer4 and 2 more\. .*"
        r"float32 as master weights.*FP16_Optimizer"
    )
    with pytest.raises(ValueError, match=message):
        getattr(scaler, call)(optimizer)
    assert everything(scaler, parameters) == before
    allowed = LossScaler("cpu", 4.0, fp16_gradients=True)
    allowed.scale(torch.ones(()))
    allowed.step(optimizer)
    assert all(parameter.tolist() == [0.5, 0.5] for parameter in parameters)


def test_closures():
    (parameter,), (optimizer,) = problem()
    scaler = LossScaler("cpu", 4.0)
    scaler.scale(parameter.sum()).backward()
    before = everything(scaler, [parameter])
    for arguments, options in (((lambda: None,), {}), ((), {"closure": lambda: None})):
        with pytest.raises(
            ClosureError, match=r"(?s)evaluates once, call it first:.*scaler.step\(optimizer\).*bfloat16"
        ):
            scaler.step(optimizer, *arguments, **options)
    assert issubclass(ClosureError, TypeError) and issubclass(ClosureError, RuntimeError)
    assert everything(scaler, [parameter]) == before
    scaler.step(optimizer, None)
    scaler.update()
    scaler.scale(parameter.sum())
    scaler.step(optimizer, closure=None)


@pytest.mark.parametrize(
    "outputs, message",
    [
        ("loss", "outputs must be a Tensor or an iterable of Tensors, not str"),
        (b"loss", "not bytes"),
        (3, "not int"),
        (None, "not NoneType"),
        ({"loss": torch.ones(())}, "not dict"),
        ([torch.ones(()), 3.0], "not float"),
        (torch.ones((), dtype=torch.int64), "a loss of torch.int64 has no gradient"),
        ((torch.ones((), dtype=torch.bool),), "a loss of torch.bool has no gradient"),
    ],
)
def test_losses(outputs, message):
    scaler = LossScaler("cpu", 4.0)
    with pytest.raises(TypeError, match=message):
        scaler.scale(outputs)
    assert not scaler._records.scaled
    with pytest.raises(TypeError, match=message):
        next(iter(scaler.scale(output for output in [outputs])))  # a generator's are refused when they come


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_raises_leaves_nothing_behind(fused):
    (parameter,), _ = problem()
    optimizer = torch.optim.AdamW([parameter], fused=fused, lr=0.5)
    scaler = LossScaler("cpu", 4.0)
    for _ in range(2):  # the second step is left to the fused optimizer
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        group, rate = optimizer.param_groups[0], optimizer.param_groups[0].pop("lr")
        before = parameter.detach().clone()
        with pytest.raises(KeyError, match="lr"):
            scaler.step(optimizer)
        assert not any(hasattr(optimizer, name) for name in ("grad_scale", "found_inf", "gradient_check"))
        group["lr"] = rate
        scaler.step(optimizer)
        assert not torch.equal(parameter, before)
        scaler.update()
        assert scaler.get_scale() == 4.0


def test_a_process_group_is_not_lost_in_a_pickle():
    scaler = LossScaler("cpu", process_group=object())
    with pytest.raises(TypeError, match=r"with a process_group cannot be pickled or copied: save its state_dict\(\)"):
        pickle.dumps(scaler)


def test_what_is_no_optimizer_is_refused_and_forgotten():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    for method in ("step", "unscale_"):
        with pytest.raises(
            TypeError, match=rf"{method} wants an optimizer, not a Linear: scaler.{method}\(optimizer\)"
        ):
            getattr(scaler, method)(model)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.step_was_skipped


def test_an_optimizer_of_another_model_is_told_as_such():
    model, scaler = fxprec.convert(torch.nn.Linear(2, 2), dtype=torch.bfloat16, scaler=LossScaler("cpu"))
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(NoGradientsError, match=r"none of the 2 parameters of SGD .* none of them is one of Linear's"):
        scaler.step(other)


def test_a_scaler_shows_whether_it_is_on():
    assert repr(LossScaler("cpu", enabled=False)) == "LossScaler(disabled)"
    assert repr(LossScaler("cpu")) == "LossScaler(dynamic, on cpu)"
    assert repr(LossScaler("cpu", dynamic=False)) == "LossScaler(static, on cpu)"


def test_a_state_that_has_no_effect_is_told():
    disabled = LossScaler("cpu", enabled=False)
    disabled.load_state_dict(disabled.state_dict())
    with pytest.warns(UnusedSettingWarning, match="no effect on one that is disabled"):
        disabled.load_state_dict(LossScaler("cpu").state_dict())
