"""``scale_loss``: gradients of several losses, each with a scale of its own, add up to what they are without scales."""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fxprec.scaling.loss_scaler import LossScaler


def made(count=1, losses=3):
    parameters = [nn.Parameter(torch.linspace(0.5, 1.5 + i, 3)) for i in range(count)]
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
    scaler = LossScaler("cpu", 4.0, num_losses=losses)
    state = scaler.state_dict()
    for i, loss in enumerate(state["fxprec"]["losses"]):
        loss["scale"] = 4.0 ** (i + 1)
    scaler.load_state_dict(state)
    return parameters, optimizers, scaler


def loss_of(i, *parameters):
    return sum((parameter ** (i + 2)).sum() for parameter in parameters)


def expected(parameter, losses):
    """The sum of the gradients, added in this order."""
    gradients = [torch.autograd.grad(loss_of(i, parameter), parameter)[0] for i in losses]
    return functools.reduce(torch.add, gradients)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3)), (0, 0), (2, 1, 2), (1,)])
def test_gradients_are_the_sum_of_separate_ones_in_any_order(order):
    (parameter,), (optimizer,), scaler = made()
    for loss_id in order:
        with scaler.scale_loss(loss_of(loss_id, parameter), optimizer, loss_id) as scaled:
            assert torch.equal(scaled.detach(), loss_of(loss_id, parameter).detach() * 4.0 ** (loss_id + 1))
            scaled.backward()
    assert torch.equal(parameter.grad, expected(parameter, order))
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(parameter, torch.linspace(0.5, 1.5, 3) - 0.1 * parameter.grad)


def test_the_gradient_stays_in_the_tensor_where_it_was():
    (parameter,), (optimizer,), scaler = made()
    parameter.grad = torch.ones(3)
    tensor = parameter.grad
    with scaler.scale_loss(loss_of(0, parameter), optimizer) as scaled:
        assert parameter.grad is None
        scaled.backward()
    assert parameter.grad is tensor and torch.equal(tensor, 1 + 2 * parameter.detach())


@pytest.mark.parametrize("delays", [1, 2, 3])
@pytest.mark.parametrize("before", [True, False])
def test_delayed_unscaling_accumulates_scaled_gradients(delays, before):
    (parameter,), (optimizer,), scaler = made()
    order = [1] * (delays + 1)
    if before:
        order = [0, *order]
        with scaler.scale_loss(loss_of(0, parameter), optimizer, 0) as scaled:
            scaled.backward()
    for i in range(delays + 1):
        with scaler.scale_loss(loss_of(1, parameter), optimizer, 1, delay_unscale=i < delays) as scaled:
            scaled.backward()
        if i < delays:
            (gradient,) = torch.autograd.grad(loss_of(1, parameter), parameter)
            assert torch.equal(parameter.grad, gradient * 16 * (i + 1))
            with pytest.raises(RuntimeError, match="close the accumulation with a scale_loss that unscales"):
                scaler.update()
    assert torch.allclose(parameter.grad, expected(parameter, order), rtol=1e-6)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_"])
def test_delayed_gradients_are_unscaled_by_their_own_scale_later(call):
    (parameter,), (optimizer,), scaler = made()
    parameter.grad = torch.ones(3)
    start = parameter.detach().clone()
    with scaler.scale_loss(loss_of(2, parameter), optimizer, 2, delay_unscale=True) as scaled:
        scaled.backward()
    wanted = expected(parameter, [2]) + 1
    getattr(scaler, call)(optimizer, *[1e9] * (call == "clip_grad_norm_"))
    assert torch.allclose(parameter.grad, wanted, rtol=1e-6)
    if call != "step":
        scaler.step(optimizer)
    assert torch.allclose(parameter, start - 0.1 * wanted)
    scaler.update()


@pytest.mark.parametrize("fused", [True, False])
def test_delayed_gradients_of_another_loss_under_an_optimizer_that_unscales(fused):
    (parameter,), _, scaler = made()  # of other scales each
    with torch.no_grad():
        parameter.fill_(1.0)
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    with scaler.scale_loss(parameter.sum(), optimizer, 1, delay_unscale=True) as scaled:
        scaled.backward()
    scaler.step(optimizer)
    assert parameter.tolist() == [0.5] * 3


def test_several_optimizers_given_as_any_iterable_and_twice():
    parameters, optimizers, scaler = made(2)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    with scaler.scale_loss(loss_of(0, *parameters), iter([*optimizers, optimizers[0]])) as scaled:
        scaled.backward()
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        assert torch.equal(parameter.grad, 1 + 2 * parameter.detach())
        scaler.step(optimizer)
    scaler.update()


def test_losses_of_different_optimizers():
    parameters, optimizers, scaler = made(2)
    with scaler.scale_loss(loss_of(0, *parameters), optimizers, 0) as scaled:
        scaled.backward()
    with scaler.scale_loss(loss_of(1, parameters[1]), optimizers[1], 1) as scaled:
        scaled.backward()
    assert torch.equal(parameters[0].grad, expected(parameters[0], [0]))
    assert torch.equal(parameters[1].grad, expected(parameters[1], [0, 1]))


@pytest.mark.parametrize("dense", ["no", "first", "last"])
def test_sparse_gradients(dense):
    table = nn.Embedding(4, 2, sparse=True)
    optimizer, scaler = torch.optim.SGD(table.parameters(), lr=0.1), LossScaler("cpu", 4.0, num_losses=2)
    losses = [lambda: table(torch.tensor([1, 1, 2])).sum(), lambda: table(torch.tensor([2, 3])).sum() * 3]
    wanted = torch.tensor([[0.0] * 2, [2.0] * 2, [4.0] * 2, [3.0] * 2])
    if dense != "no":
        losses.insert(0 if dense == "first" else 2, lambda: table.weight.sum())
        wanted += 1
    for i, loss in enumerate(losses):
        with scaler.scale_loss(loss(), optimizer, i % 2) as scaled:
            scaled.backward()
    assert torch.equal(table.weight.grad.to_dense() if dense == "no" else table.weight.grad, wanted)


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_the_block_leaves_the_gradients_of_before(delayed, error):
    parameters, optimizers, scaler = made(2)
    if delayed:
        with scaler.scale_loss(loss_of(0, *parameters), optimizers, delay_unscale=True) as scaled:
            scaled.backward()
    else:
        parameters[0].grad = torch.ones(3)
    before = [None if p.grad is None else (p.grad, p.grad.clone()) for p in parameters]
    states = [copy.copy(scaler._per_optimizer_states[id(optimizer)]) for optimizer in optimizers]
    with pytest.raises(error), scaler.scale_loss(loss_of(0, *parameters), optimizers) as scaled:
        scaled.backward()
        raise error
    for parameter, was in zip(parameters, before, strict=True):
        assert parameter.grad is None if was is None else parameter.grad is was[0] and torch.equal(*was)
    assert [scaler._per_optimizer_states[id(optimizer)] for optimizer in optimizers] == states
    with scaler.scale_loss(loss_of(0, *parameters), optimizers) as scaled:
        scaled.backward()
    assert torch.allclose(parameters[1].grad, expected(parameters[1], [0, 0] if delayed else [0]))


@pytest.mark.parametrize("delayed", [True, False])
def test_gradients_that_are_refused_on_exit_leave_those_of_before(delayed):
    """The second optimizer's cannot be unscaled: the first one's are not, either."""
    good, bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in (good, bad)]
    scaler = LossScaler("cpu", 4.0)
    if delayed:
        with scaler.scale_loss(good.sum() + bad.sum(), optimizers, delay_unscale=True) as scaled:
            scaled.backward()
    else:
        good.grad = torch.ones(3)
    before = [None if p.grad is None else p.grad.clone() for p in (good, bad)]
    with pytest.raises(ValueError, match="FP16 gradients"):
        with scaler.scale_loss(good.sum() + bad.sum(), optimizers) as scaled:
            scaled.backward()
    for parameter, was in zip((good, bad), before, strict=True):
        assert parameter.grad is None if was is None else torch.equal(parameter.grad, was)


def test_a_parameter_of_two_of_its_optimizers_is_refused():
    (parameter,), (first,), scaler = made()
    second = torch.optim.SGD([("shared", parameter)], lr=0.1)
    parameter.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="shared belongs to two optimizers"):
        with scaler.scale_loss(loss_of(0, parameter), [first, second]) as scaled:
            scaled.backward()
    assert parameter.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("loss_id", [3, -1, 100])
def test_an_unknown_loss(loss_id):
    (parameter,), (optimizer,), scaler = made()
    with pytest.raises(
        IndexError, match=rf"loss_id={loss_id}: this scaler has 3 losses; LossScaler\(num_losses=...\) mak"
    ):
        with scaler.scale_loss(loss_of(0, parameter), optimizer, loss_id):
            pass


@pytest.mark.parametrize("optimizers, name", [(3, "int"), ([None], "NoneType"), ("sgd", "str")])
def test_something_else_than_an_optimizer(optimizers, name):
    (parameter,), _, scaler = made()
    with pytest.raises(TypeError, match=f"scale_loss takes an optimizer or a list of them, not {name}"):
        with scaler.scale_loss(loss_of(0, parameter), optimizers):
            pass


def test_what_does_not_go_together():
    (parameter,), (optimizer,), scaler = made()
    with scaler.scale_loss(loss_of(0, parameter), optimizer, 0, delay_unscale=True) as scaled:
        scaled.backward()
    before = parameter.grad.clone()
    with pytest.raises(
        RuntimeError, match=r"gradients of loss 0 are there, still scaled .* before the backward of loss 1"
    ):
        with scaler.scale_loss(loss_of(1, parameter), optimizer, 1):
            pass
    assert torch.equal(parameter.grad, before)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"SGD has stepped: scaler.update\(\) before the next scale_loss"):
        with scaler.scale_loss(loss_of(0, parameter), optimizer):
            pass
    scaler.update()


@pytest.mark.parametrize("inside", ["step", "unscale_", "clip_grad_norm_", "update", "scale_loss"])
def test_calls_within_the_block_are_refused(inside):
    (parameter,), (optimizer,), scaler = made()
    parameter.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="within"):
        with scaler.scale_loss(loss_of(0, parameter), optimizer) as scaled:
            scaled.backward()
            if inside == "scale_loss":
                with scaler.scale_loss(loss_of(1, parameter), optimizer, 1):
                    pass
            else:
                arguments = {"update": (), "clip_grad_norm_": (optimizer, 1.0)}.get(inside, (optimizer,))
                getattr(scaler, inside)(*arguments)
    assert parameter.grad.tolist() == [1, 1, 1]


def test_blocks_of_two_optimizers_may_be_nested():
    parameters, optimizers, scaler = made(2)
    first, second = (loss_of(i, parameters[i]) for i in (0, 1))
    with scaler.scale_loss(first, optimizers[0], 0) as a, scaler.scale_loss(second, optimizers[1], 1) as b:
        a.backward()
        b.backward()
    for i in (0, 1):
        assert torch.equal(parameters[i].grad, expected(parameters[i], [i]))


def test_gradients_scaled_by_scale_are_not_taken_for_unscaled_ones():
    (parameter,), (optimizer,), scaler = made()
    scaler.scale(loss_of(0, parameter)).backward()
    with pytest.raises(
        RuntimeError, match=r"SGD has gradients, and scale\(\) was called since the last update: they may"
    ):
        with scaler.scale_loss(loss_of(1, parameter), optimizer, 1):
            pass
    scaler.unscale_(optimizer)  # as the message says
    with scaler.scale_loss(loss_of(1, parameter), optimizer, 1) as scaled:
        scaled.backward()
    assert torch.equal(parameter.grad, expected(parameter, [0, 1]))


def test_a_block_without_a_backward_changes_nothing():
    (parameter,), (optimizer,), scaler = made()
    parameter.grad = torch.ones(3)
    with scaler.scale_loss(loss_of(0, parameter), optimizer):
        pass
    assert parameter.grad.tolist() == [1, 1, 1] and not scaler.found_inf()


def test_only_the_loss_that_overflowed_backs_off():
    (parameter,), (optimizer,), scaler = made()
    for i, factor in enumerate((1.0, float("inf"), 1.0)):
        with scaler.scale_loss(loss_of(i, parameter) * factor, optimizer, i) as scaled:
            scaled.backward()
    assert [scaler.found_inf(i) for i in range(3)] == [False, True, False]
    scaler.step(optimizer)
    scaler.update()
    assert [scaler.get_scale(i) for i in range(3)] == [4.0, 8.0, 64.0] and scaler.step_was_skipped


def test_a_disabled_scaler_yields_the_loss():
    (parameter,), (optimizer,), _ = made()
    loss = loss_of(0, parameter)
    with LossScaler("cpu", enabled=False).scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("bucket_view", [True, False])
@pytest.mark.parametrize("one_bucket_each", [True, False])
def test_ddp_reduces_into_the_memory_of_the_gradients_that_were_put_aside(one_rank, bucket_view, one_bucket_each):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    parameters = [*model.parameters()]
    replica = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=bucket_view, bucket_cap_mb=1e-6 if one_bucket_each else 25
    )
    optimizer, scaler = torch.optim.SGD(parameters, lr=0.1), LossScaler("cpu", 4.0, num_losses=2)
    x = torch.randn(4, 3)
    for _ in range(3):
        optimizer.zero_grad()
        wanted = []
        for i in range(3):
            gradients = torch.autograd.grad(model(x).pow(i + 1).sum(), parameters)
            wanted = [a + b for a, b in zip(wanted, gradients, strict=True)] if i else gradients
        for i in range(3):
            with scaler.scale_loss(replica(x).pow(i + 1).sum(), optimizer, i % 2) as scaled:
                scaled.backward()
        assert all(torch.allclose(p.grad, w) for p, w in zip(parameters, wanted, strict=True))
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    with scaler.scale_loss(replica(x).sum(), optimizer) as scaled:
        scaled.backward()
    before = [p.grad.clone() for p in parameters]
    with pytest.raises(ZeroDivisionError), scaler.scale_loss(replica(x).pow(2).sum(), optimizer) as scaled:
        scaled.backward()
        raise ZeroDivisionError
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=True))
