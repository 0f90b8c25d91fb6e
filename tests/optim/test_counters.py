"""Step counters in one piece of memory: each keeps its own value, and its place in states and checkpoints."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from fxprec import optim
from fxprec.optim.torch_update import Counters


def steps_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [state["step"] for state in optimizer.state.values()]


def lie_together(steps: list[Tensor]) -> bool:
    return [step.data_ptr() for step in steps] == [steps[0].data_ptr() + 4 * i for i in range(len(steps))]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, without: tuple[int, ...] = ()) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        for i, parameter in enumerate(model.parameters()):
            if i in without:
                parameter.grad = None
        optimizer.step()


def test_they_are_moved_once_and_keep_their_values():
    counters, steps = Counters(), [torch.tensor(float(i)) for i in (3, 1, 4)]
    (together,) = counters.of("key", steps)
    together.add_(1)
    assert [step.item() for step in steps] == [4, 2, 5] and all(step.dim() == 0 for step in steps)
    assert counters.of("key", steps)[0] is together
    assert counters.of("another", steps[:2])[0] is not together


def test_a_counter_that_lies_elsewhere_moves_them_all():
    counters, steps = Counters(), [torch.tensor(1.0), torch.tensor(2.0)]
    (before,) = counters.of("key", steps)
    steps[1] = torch.tensor(7.0)
    counters.of("key", steps)[0].add_(1)
    assert [step.item() for step in steps] == [2, 8] and before.tolist() == [1, 2]
    few = steps[1:]
    counters.of("key", few)[0].add_(1)
    assert [step.item() for step in steps] == [2, 9]


def test_an_optimizer_counts_each_parameter_alone():
    model = network()
    ours = optim.AdamW(model.parameters(), lr=0.1)
    train(model, ours, 2)
    objects = steps_of(ours)
    assert lie_together(objects)
    train(model, ours, 3, without=(1, 2))
    assert [step.item() for step in objects] == [5, 2, 2, 5]
    train(model, ours)
    assert [step.item() for step in objects] == [6, 3, 3, 6] and lie_together(objects)
    assert all(map(lambda a, b: a is b, objects, steps_of(ours)))


@pytest.mark.parametrize("there", [optim.AdamW, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)])
def test_states_go_to_torch_and_come_back_through_a_file(there):
    """Torch adds to the counters one by one: had they one place for all, each would count for every parameter."""
    model, other = network(), network()
    ours = optim.AdamW(model.parameters(), lr=0.1)
    train(model, ours, 2)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    theirs = there(other.parameters(), lr=0.1)
    theirs.load_state_dict(torch.load(file))
    other.load_state_dict(model.state_dict())
    train(other, theirs, 2)
    train(model, ours, 2)
    assert [step.item() for step in steps_of(theirs)] == [4] * 4
    ours.load_state_dict(theirs.state_dict())
    train(model, ours)
    train(other, theirs)
    assert [step.item() for step in steps_of(ours)] == [step.item() for step in steps_of(theirs)] == [5] * 4
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_parameter_that_is_there_twice_counts_twice_as_torchs_does():
    ours, theirs = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizers = optim.AdamW([ours, ours]), torch.optim.AdamW([theirs, theirs], fused=True)
    for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
        parameter.grad = torch.arange(4.0)
        optimizer.step()
        optimizer.step()
        assert optimizer.state[parameter]["step"].item() == 4
    assert torch.equal(ours, theirs)


def test_counters_in_shared_memory_stay_there():
    model = network()
    ours = optim.AdamW(model.parameters(), lr=0.1)
    train(model, ours)
    for step in steps_of(ours):
        step.share_memory_()
    train(model, ours)
    assert all(step.is_shared() and step.item() == 2 for step in steps_of(ours))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_counters_are_float32_whatever_the_default_is(dtype: torch.dtype):
    model = network()
    ours = optim.AdamW(model.parameters(), lr=0.1)
    train(model, ours)
    states = copy.deepcopy(ours.state_dict())
    for state in states["state"].values():
        state["step"] = torch.full((1,), 300.0, dtype=torch.float64)  # old ones have one dimension
    torch.set_default_dtype(dtype)
    try:
        ours.load_state_dict(states)
    finally:
        torch.set_default_dtype(torch.float32)
    train(model, ours)
    assert [(step.item(), step.dtype, step.dim()) for step in steps_of(ours)] == [(301, torch.float32, 0)] * 4


@pytest.mark.slow
def test_a_compiled_step_counts():
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    compiled, plain = (optim.AdamW([parameter]) for parameter in parameters)
    step = torch.compile(lambda: compiled.step(), backend="eager")
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.ones(4)
        step()
        plain.step()
    assert torch.equal(*parameters) and compiled.state[parameters[0]]["step"].item() == 4


def test_a_copy_counts_on_its_own():
    model = network()
    ours = optim.AdamW(model.parameters(), lr=0.1)
    train(model, ours)
    both = copy.deepcopy((model, ours))
    train(*both)
    assert [step.item() for step in steps_of(ours)] == [1] * 4
    assert [step.item() for step in steps_of(both[1])] == [2] * 4


def test_a_skipped_step_does_not_count():
    model = network()
    ours = optim.AdamW(model.parameters(), lr=0.1)
    train(model, ours)
    ours.found_inf = torch.tensor(1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ours.step()
    assert [step.item() for step in steps_of(ours)] == [1] * 4
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
