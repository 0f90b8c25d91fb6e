"""Shadows that the optimizer writes: right after every step, and not refreshed again."""

import pytest
import torch
from torch import nn

import fxprec
from fxprec import optim
from fxprec.errors import StaleShadowError
from fxprec.model.conversion import conversion_of


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(seed=0):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))


def step(model, optimizer, seed=0):
    optimizer.zero_grad()
    model(batch(seed)).square().mean().backward()
    optimizer.step()


def assert_fresh(model):
    store = conversion_of(model).store
    for parameter in model.parameters():
        assert torch.equal(store.shadow_of(parameter), parameter.detach().to(store.dtype))


@pytest.mark.parametrize("make", [optim.AdamW, optim.Adam, optim.SGD])
def test_after_a_step_the_shadows_are_the_new_weights_and_no_forward_copies_them(make):
    model, _ = fxprec.convert(net())
    optimizer = make(model.parameters(), lr=0.1)
    for seed in range(3):
        step(model, optimizer, seed)
        assert_fresh(model)
    assert conversion_of(model).store.refreshes == 0
    with torch.no_grad():
        model(batch())
    assert conversion_of(model).store.refreshes == 0


def test_training_is_bit_for_bit_that_of_torchs_optimizer():
    models = [fxprec.convert(net())[0] for _ in range(2)]
    optimizers = [
        optim.AdamW(models[0].parameters(), lr=0.1),
        torch.optim.AdamW(models[1].parameters(), 0.1, fused=True),
    ]
    for seed in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, seed)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert conversion_of(models[1]).store.refreshes == 3


def test_weights_of_another_optimizer_are_refreshed_as_ever():
    model, _ = fxprec.convert(net())
    ours, theirs = optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    step(model, ours)
    theirs.step()
    model(batch())
    assert_fresh(model)


def test_a_skipped_step_leaves_shadow_and_weight_equal():
    model, _ = fxprec.convert(net())
    scaler, optimizer = fxprec.LossScaler("cpu", 4.0), optim.AdamW(model.parameters(), lr=0.1)
    for bad in (0.0, float("nan"), 0.0):
        optimizer.zero_grad()
        scaler.scale(model(batch()).square().mean() + bad * model[0].bias.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        model(batch())
        assert_fresh(model)


def test_one_weight_in_two_converted_models():
    first, second = net(), net()
    second[0].weight = first[0].weight
    first, second = fxprec.convert(first)[0], fxprec.convert(second, dtype=torch.float16)[0]
    optimizer = optim.SGD(first.parameters(), lr=0.1)
    second(batch()[:1])
    step(first, optimizer)
    for model in (first, second):
        store = conversion_of(model).store
        assert torch.equal(store.shadow_of(first[0].weight), first[0].weight.detach().to(store.dtype))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
        lambda model: torch._foreach_mul_([*model.parameters()], 2.0),
        lambda model: setattr(model[0].weight, "data", model[0].weight.data + 1),
        lambda model: (model[0].weight.data.mul_(2), fxprec.refresh(model)),
        lambda model: (model[0].weight.data.mul_(2), model.eval(), model.train()),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(16, 8))),
    ],
)
def test_changes_after_the_step_are_seen_by_training_forwards(change):
    model, _ = fxprec.convert(net())
    step(model, optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        change(model)
    model(batch())
    assert_fresh(model)


def test_a_step_between_forward_and_backward_is_reported():
    model, _ = fxprec.convert(net())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    loss = model(batch()).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_debug_reports_a_write_through_data_that_the_written_shadow_hides():
    model, _ = fxprec.convert(net())
    store = conversion_of(model).store
    store.debug = True
    step(model, optim.SGD(model.parameters(), lr=0.1))
    model(batch())
    model[0].weight.data[1, 3] = 3.0  # one element, which is no sample
    with pytest.raises(StaleShadowError, match="refresh"):
        model(batch())


def test_a_weight_that_got_another_shape_at_its_address_is_left_to_the_next_forward():
    model, _ = fxprec.convert(nn.Linear(8, 8, bias=False))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    weight = model.weight
    weight.grad = None
    weight.data = weight.data.view(4, 16)
    weight.grad = torch.ones(4, 16)
    optimizer.step()
    weight.grad = None
    weight.data = weight.data.view(8, 8)
    model(batch())
    assert_fresh(model)


@pytest.mark.parametrize("grad", [True, False])
def test_a_step_that_fails_half_way_leaves_no_stale_shadow(grad):
    model, _ = fxprec.convert(net())
    optimizer = optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    step(model, optimizer)
    before = model[0].weight.detach().clone()
    optimizer.param_groups[1]["weight_decay"] = "none"
    with pytest.raises(TypeError):
        step(model, optimizer)
    assert not torch.equal(model[0].weight, before)
    with torch.set_grad_enabled(grad):
        model(batch())
    assert_fresh(model)
