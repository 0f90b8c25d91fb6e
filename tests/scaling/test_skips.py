"""Skipped steps are counted and named, whether the host or only the device knows of them."""

import pytest
import torch
from torch import nn

import fxprec
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.scaling.skips import Skips

INF, NAN = float("inf"), float("nan")


def made(fused, names=("a", "b")):
    parameters = [nn.Parameter(torch.ones(3)) for _ in names]
    return parameters, torch.optim.SGD([*zip(names, parameters, strict=True)], lr=0.1, fused=fused)


def iteration(scaler, optimizers, owned, bad=()):
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(sum(p.sum() for parameters in owned for p in parameters)).backward()
    for parameter in bad:
        parameter.grad[1] = NAN
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [True, False])
def test_the_last_iteration_is_reported_the_count_goes_on(fused):
    parameters, optimizer = made(fused)
    scaler, seen = LossScaler("cpu"), []
    for bad in ((), (parameters[0],), parameters, (), (parameters[1],)):
        iteration(scaler, [optimizer], [parameters], bad)
        seen.append((scaler.step_was_skipped, scaler.skipped_steps, scaler.overflow_parameters()))
    assert seen == [
        (False, 0, []),
        (True, 1, ["a"]),
        (True, 2, ["b", "a"]),
        (False, 2, ["b", "a"]),
        (True, 3, ["b"]),
    ]


@pytest.mark.parametrize("fused", [(True, True), (False, False), (True, False), (False, True)])
@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 1)])
def test_two_optimizers_in_an_iteration(fused, bad):
    """A skip of any of them counts as one; names are of all of them."""
    owned, optimizers = zip(*(made(f, (f"{i}.a", f"{i}.b")) for i, f in enumerate(fused)), strict=True)
    scaler = LossScaler("cpu")
    iteration(scaler, optimizers, owned, [owned[0][0], owned[1][1]])  # names of an older overflow
    assert set(scaler.overflow_parameters()) == {"0.a", "1.b"}
    iteration(scaler, optimizers, owned, [owned[i][1] for i in bad])
    assert scaler.step_was_skipped is bool(bad) and scaler.skipped_steps == 2 + len(bad)
    assert set(scaler.overflow_parameters()) == ({f"{i}.b" for i in bad} if bad else {"0.a", "1.b"})


@pytest.mark.parametrize("fused", [True, False])
def test_the_layer_where_an_overflow_began_comes_first(fused):
    layers = [nn.Linear(2, 2) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = LossScaler("cpu", 4.0)
    scaler.name_parameters(model)
    hook = layers[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * INF,))
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    hook.remove()
    scaler.step(optimizer)
    assert scaler.overflow_parameters() == ["1.bias", "1.weight", "0.bias", "0.weight"]


def test_an_overflow_on_the_device_that_nobody_asked_about_has_no_names_rather_than_old_ones():
    parameters, optimizer = made(True)
    scaler = LossScaler("cpu")
    iteration(scaler, [optimizer], [parameters], parameters[:1])
    assert scaler.overflow_parameters() == ["a"]
    iteration(scaler, [optimizer], [parameters], parameters[1:])
    iteration(scaler, [optimizer], [parameters])
    assert scaler.skipped_steps == 2 and scaler.overflow_parameters() == []


def test_it_is_reported_between_step_and_update_too():
    parameters, optimizer = made(False)
    scaler = LossScaler("cpu")
    scaler.scale(parameters[0].sum() * INF).backward()
    assert not scaler.step_was_skipped
    scaler.step(optimizer)
    assert scaler.step_was_skipped and scaler.overflow_parameters() == ["a"]
    scaler.update()
    scaler.scale(parameters[0].sum()).backward()
    assert scaler.step_was_skipped  # of the last iteration that stepped


def test_many_steps_on_the_device_are_counted_right():
    skips, (_, optimizer) = Skips(7), made(True)
    device = torch.device("cpu")
    for i in range(1000):
        skips.begin()
        skips.note_on_device(optimizer, {device: torch.tensor(float(i % 3 == 0))})
    assert skips.count == 7 + 334
    assert sum(map(len, skips._flags.values())) < 257


def test_a_rank_that_skips_without_gradients_has_no_names():
    skips = Skips()
    skips.note_skip(made(False)[1], {})
    assert skips.last and skips.count == 1 and skips.parameters(lambda optimizer: {}) == []


@pytest.mark.parametrize("layout", ["sparse", "csr"])
def test_sparse_gradients_are_named_too(layout):
    bad = torch.tensor([[0.0, INF], [0.0, 0.0], [1.0, 0.0]])
    bad = bad.to_sparse() if layout == "sparse" else bad.to_sparse_csr()
    parameter = nn.Parameter(bad.clone() if layout == "csr" else torch.ones(3, 2))
    parameter.grad = bad
    optimizer, scaler = torch.optim.SGD([("table", parameter)], lr=0.1), LossScaler("cpu", 4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert scaler.overflow_parameters() == ["table"]


def test_names_come_from_named_groups_then_from_the_model_then_from_the_place():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    converted = fxprec.convert(model, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stranger = nn.Parameter(torch.ones(5))
    optimizer.add_param_group({"params": [stranger]})
    scaler = LossScaler("cpu", 4.0)
    place = "param_groups[1]['params'][0] of shape (5,)"
    assert scaler.parameter_names(optimizer)[id(stranger)] == place
    assert scaler.parameter_names(optimizer)[id(model[1].bias)] == "param_groups[0]['params'][3] of shape (2,)"
    scaler.name_parameters(model)
    names = scaler.parameter_names(optimizer)
    assert names[id(model[1].bias)] == "1.bias" and names[id(stranger)] == place
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    model[0].weight.grad.fill_(INF)
    scaler.step(optimizer)
    assert scaler.overflow_parameters() == ["0.weight"]
    assert converted is not None
    named = torch.optim.SGD([("mine", model[0].weight)], lr=0.1)
    assert scaler.parameter_names(named) == {id(model[0].weight): "mine"}
