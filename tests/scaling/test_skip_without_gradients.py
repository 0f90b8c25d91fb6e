"""A scaler that passes over optimizers without gradients: several that take turns, parts that no batch reaches."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fxprec
import fxprec.optim
from fxprec.errors import NoGradientsError
from fxprec.scaling.loss_scaler import LossScaler

OVERFLOWED = ["param_groups[0]['params'][1] of shape (2,)", "param_groups[0]['params'][0] of shape (2, 3)"]
OPTIMIZERS = {
    "torch": lambda p: torch.optim.SGD(p, lr=0.1),
    "torch_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fxprec": lambda p: fxprec.optim.AdamW(p, lr=0.1),
    "fxprec_clipping": lambda p: fxprec.optim.SGD(p, lr=0.1, max_norm=1.0),
}


class TakesScaler(torch.optim.SGD):
    """An optimizer whose step takes the scaler, as torch's deprecated door has it."""

    def step(self, closure=None, *, grad_scaler=None):
        grad_scaler.unscale_(self)
        assert grad_scaler._per_optimizer_states[id(self)]["found_inf_per_device"]
        return super().step(closure)


def made(name: str = "torch", **options):
    torch.manual_seed(0)
    parts = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizers = [OPTIMIZERS[name](part.parameters()) for part in parts]
    options = {"init_scale": 8.0, "growth_interval": 2, "skip_without_gradients": True, **options}
    return parts, optimizers, LossScaler("cpu", **options)


def bits(module: nn.Module):
    return [p.detach().clone() for p in module.parameters()]


def iteration(parts, optimizers, scaler, which: list[int], factor: float = 1.0, unscale: bool = False):
    for optimizer in optimizers:
        optimizer.zero_grad()
    for i in which:
        scaler.scale(factor * parts[i](torch.ones(4, 3)).square().mean()).backward()
    for optimizer in optimizers:
        if unscale:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_take_turns(name: str, unscale: bool):
    parts, optimizers, scaler = made(name)
    before = [bits(part) for part in parts]
    iteration(parts, optimizers, scaler, [0], unscale=unscale)
    assert not any(map(torch.equal, bits(parts[0]), before[0])) and all(map(torch.equal, bits(parts[1]), before[1]))
    assert not optimizers[1].state
    assert (scaler.step_was_skipped, scaler.skipped_steps, scaler.steps_without_gradients) == (True, 1, 1)
    iteration(parts, optimizers, scaler, [0, 1], unscale=unscale)
    assert (scaler.step_was_skipped, scaler.skipped_steps, scaler.steps_without_gradients) == (False, 1, 1)
    assert scaler.get_scale() == 16.0  # two good iterations


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_being_asked_it_raises(name: str):
    parts, optimizers, scaler = made(name, skip_without_gradients=False)
    with pytest.raises(NoGradientsError, match="skip_without_gradients=True"):
        iteration(parts, optimizers, scaler, [0])


def test_where_all_are_passed_over_the_scale_stays():
    _, optimizers, scaler = made()
    for _ in range(5):
        scaler.scale(torch.ones(1, requires_grad=True)).backward()
        for optimizer in optimizers:
            assert scaler.step(optimizer) is None
        scaler.update()
    assert (scaler.get_scale(), scaler.skipped_steps, scaler.steps_without_gradients) == (8.0, 10, 10)
    assert scaler.state_dict()["_growth_tracker"] == 0


def test_an_overflow_beside_it_is_told_apart():
    parts, optimizers, scaler = made()
    iteration(parts, optimizers, scaler, [1], factor=float("inf"))
    assert (scaler.get_scale(), scaler.skipped_steps, scaler.steps_without_gradients) == (4.0, 2, 1)
    assert scaler.overflow_parameters() == OVERFLOWED
    iteration(parts, optimizers, scaler, [1])
    assert scaler.overflow_parameters() == OVERFLOWED and scaler.step_was_skipped


def test_update_without_any_step_still_raises():
    _, _, scaler = made()
    scaler.scale(torch.ones(1, requires_grad=True)).backward()
    with pytest.raises(NoGradientsError, match="no optimizer was stepped"):
        scaler.update()


def test_a_second_step_still_raises():
    _, optimizers, scaler = made()
    scaler.scale(torch.ones(1, requires_grad=True)).backward()
    scaler.step(optimizers[0])
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizers[0])


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_an_optimizer_that_takes_the_scaler():
    part = nn.Linear(3, 2)
    optimizer, scaler = TakesScaler(part.parameters(), lr=0.1), LossScaler("cpu", skip_without_gradients=True)
    before = bits(part)
    scaler.scale(torch.ones(1, requires_grad=True)).backward()
    assert scaler.step(optimizer) is None and scaler.step_was_skipped
    scaler.update()
    assert all(map(torch.equal, bits(part), before))


def test_the_counts_are_saved_and_copied():
    parts, optimizers, scaler = made()
    iteration(parts, optimizers, scaler, [0])
    iteration(parts, optimizers, scaler, [0], factor=float("inf"))
    other = LossScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    for each in (other, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert (each.skipped_steps, each.steps_without_gradients) == (3, 2)
    again = copy.deepcopy(scaler)
    iteration(parts, optimizers, again, [0])
    assert again.steps_without_gradients == 3
    torch.amp.GradScaler("cpu").load_state_dict(scaler.state_dict())


def test_converted_models_take_it():
    model, scaler = fxprec.convert(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)),
        dtype=torch.bfloat16,
        scaler=LossScaler("cpu", skip_without_gradients=True),
    )
    first, last = (fxprec.optim.SGD(part.parameters(), lr=0.1) for part in model)
    model[0].requires_grad_(False)
    before = bits(model)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    for optimizer in (first, last):
        scaler.step(optimizer)
    scaler.update()
    same = [*map(torch.equal, bits(model), before)]
    assert same == [True, True, False, False] and scaler.steps_without_gradients == 1
