"""What Accelerate, Lightning and torch's lr schedulers do with a scaler, emulated call by call on both scalers."""

import warnings

import pytest
import torch
from torch import nn

from fxprec.scaling.loss_scaler import LossScaler

BOTH = pytest.mark.parametrize("cls", [torch.amp.GradScaler, LossScaler])


class Accelerated:
    """Accelerate's AcceleratedOptimizer: it knows a skip by whether the ``step`` that it put in the instance ran."""

    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler, self.skipped = optimizer, scaler, False
        self.called = False
        self.original = optimizer.step

        def patched(*arguments, **options):
            self.called = True
            return self.original(*arguments, **options)

        self.patched = patched

    def step(self):
        self.optimizer.step = self.patched
        self.scaler.step(self.optimizer, None)
        self.scaler.update()
        self.skipped, self.called = not self.called, False
        self.optimizer.step = self.original


@pytest.mark.parametrize("scheduler", ["none", "before", "after"])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    ],
)
def test_accelerate_sees_each_skip(make, scheduler):
    parameter = nn.Parameter(torch.ones(3))
    optimizer, scaler = make([parameter]), LossScaler("cpu", 4.0)
    if scheduler == "before":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerated = Accelerated(optimizer, scaler)
    if scheduler == "after":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen = []
    for factor in (float("inf"), 1.0, float("nan"), 1.0):
        optimizer.zero_grad()
        before = parameter.detach().clone()
        scaler.scale((parameter * parameter).sum() * factor).backward()
        accelerated.step()
        assert torch.equal(parameter, before) is accelerated.skipped
        seen.append(accelerated.skipped)
    assert seen == [True, False, True, False] and scaler.get_scale() == 1.0


@BOTH
def test_the_private_names_that_are_read(cls):
    scaler = cls("cpu", 4.0, 3.0, 0.25, 7)
    names = ("_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval", "_enabled", "_device")
    assert [getattr(scaler, name) for name in names] == [4.0, 3.0, 0.25, 7, True, "cpu"]
    assert scaler._scale is None and scaler._growth_tracker is None
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._scale.item() == 4.0 and scaler._scale.dtype is torch.float32 and scaler._scale.shape == ()
    assert scaler._growth_tracker.item() == 0 and scaler._growth_tracker.dtype is torch.int32
    assert scaler._get_scale_async() is scaler._scale and scaler._get_growth_tracker() == 0
    scaler._scale = torch.tensor(8.0)
    parameter = nn.Parameter(torch.ones(2))
    assert scaler.scale(parameter.sum()).item() == 16.0


def test_a_scale_that_was_assigned_is_updated():
    scaler, parameter = LossScaler("cpu", 4.0, hysteresis=2, growth_interval=1), nn.Parameter(torch.ones(2))
    scaler._scale = torch.tensor(8.0)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0


@BOTH
@pytest.mark.parametrize("clip", [None, 0.5])
def test_lightnings_order_of_calls(cls, clip):
    """MixedPrecision.optimizer_step: closure, unscale_ unless the optimizer scales, clip, step, update."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), cls("cpu", 4.0)
    for factor, norm in ((1.0, 3**0.5), (float("inf"), None), (1.0, 3**0.5)):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * factor).backward()
        assert not getattr(optimizer, "_step_supports_amp_scaling", False)
        scaler.unscale_(optimizer)
        if clip is not None:
            found = nn.utils.clip_grad_norm_([parameter], clip)
            assert norm is None or found == pytest.approx(norm)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    step = 0.1 if clip is None else 0.1 * clip / 3**0.5
    assert torch.allclose(parameter, torch.full((3,), 1 - 2 * step))


@BOTH
def test_lightnings_manual_optimization_updates_after_each_optimizer(cls):
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
    scaler = cls("cpu", 4.0, growth_interval=1)
    for _ in range(3):
        for optimizer in optimizers:
            scaler.scale((parameters[0] * parameters[1]).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            for other in optimizers:
                other.zero_grad()
    assert scaler.get_scale() == 4.0 * 2**6


@BOTH
@pytest.mark.parametrize("fused", [False, True])
def test_lr_schedulers_count_the_steps(cls, fused):
    parameter = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1, fused=fused), cls("cpu", 4.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert optimizer._opt_called and torch.allclose(parameter, torch.full((3,), 1 - 0.1 - 0.05))


def test_a_scheduler_can_be_stepped_only_after_real_steps():
    """The loop that transformers and Lightning users ask for: no schedule step after a skip."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), LossScaler("cpu", 4.0)
    scheduler, rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), []
    for factor in (float("inf"), 1.0, float("nan"), 1.0):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if not scaler.step_was_skipped:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25]


class DuckTyped:
    """Not a torch optimizer, and neither hashable nor equal to itself; torch's scaler takes it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, parameters):
        self.param_groups, self.steps = [{"params": parameters}], 0

    def __eq__(self, other):
        return False

    def step(self):
        self.steps += 1


@BOTH
def test_anything_with_groups_and_a_step_is_an_optimizer(cls):
    parameter = nn.Parameter(torch.ones(3))
    optimizer, scaler = DuckTyped([parameter]), cls("cpu", 4.0)
    for _ in range(2):
        parameter.grad = None
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.steps == 2
