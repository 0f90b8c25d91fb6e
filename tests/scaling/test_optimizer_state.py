"""States of an optimizer between two updates: typed here, items of a dict for torch."""

import pytest
import torch
from torch.amp.grad_scaler import OptState

from fxprec.scaling.loss_scaler import LossScaler
from fxprec.scaling.optimizer_state import Block, OptimizerState


def test_torchs_items_are_attributes():
    state, flags = OptimizerState(), {torch.device("cpu"): torch.ones(())}
    state["stage"], state["found_inf_per_device"] = OptState.STEPPED, flags
    assert state.stage is state["stage"] is OptState.STEPPED and state.found_inf_per_device is flags
    with pytest.raises(AttributeError):
        state["stagee"] = OptState.READY


def test_stages_and_blocks_of_one_iteration():
    parameter, scaler = torch.nn.Parameter(torch.ones(2)), LossScaler("cpu", 4.0, num_losses=2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def seen():
        state = scaler._records.states[id(optimizer)]
        return state.stage, state.block, state.delayed, state.holds_scaled

    found = []
    with scaler.scale_loss(parameter.sum(), optimizer, 1, delay_unscale=True) as scaled:
        found.append(seen())
        scaled.backward()
    found.append(seen())
    with scaler.scale_loss(parameter.sum(), optimizer, 1) as scaled:
        found.append(seen())
        scaled.backward()
    found.append(seen())
    scaler.step(optimizer)
    found.append(seen())
    scaler.update()
    assert found == [
        (OptState.READY, Block.OPEN, None, True),
        (OptState.READY, Block.CLOSED, 1, True),
        (OptState.READY, Block.OPEN, 1, True),
        (OptState.UNSCALED, Block.CLOSED, None, False),
        (OptState.STEPPED, Block.CLOSED, None, False),
    ]
    assert seen() == (OptState.READY, Block.NONE, None, False)
    assert torch.allclose(parameter, torch.full((2,), 0.8))


def test_flags_of_an_optimizer_add_up():
    cpu, state = torch.device("cpu"), OptimizerState()
    state.record([0], {cpu: torch.tensor(0.0)})
    state.record([1], {cpu: torch.tensor(1.0)})
    assert state.found_inf_per_device[cpu] == 1
    assert {loss: [flag.item() for flag in flags] for loss, flags in state.found_inf_by_loss.items()} == {
        0: [0.0],
        1: [1.0],
    }
