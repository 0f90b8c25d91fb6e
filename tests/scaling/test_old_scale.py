"""Gradients of an old scale: the loops that are fine raise nothing, the ones that are not do, and no graph is kept."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from fxprec.scaling.loss_scaler import LossScaler
from fxprec.scaling.unscale import SpoiledGradients, holds_any

SUM = r"the gradient of param_groups\[0\]\['params'\]\[0\] of shape \(3,\) is a sum over two scales"


def made(count=2, **options):
    """Parameters, an optimizer each, and a scaler whose scale changes at every update."""
    parameters = [nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(count)]
    optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in parameters]
    return parameters, optimizers, LossScaler("cpu", 4.0, growth_interval=1, **options)


def reads(monkeypatch):
    """How often gradients were looked at."""
    looks = []
    monkeypatch.setattr(torch, "equal", lambda a, b, equal=torch.equal: (looks.append(1), equal(a, b))[1])
    return looks


ZERO = pytest.mark.parametrize("zero", [True, False])  # set_to_none


@ZERO
@pytest.mark.parametrize("updates", ["each", "once"])
@pytest.mark.parametrize("frozen", [True, False])
def test_gan_loops_are_fine(zero, updates, frozen, monkeypatch):
    (generator, judge), (makes, judges), scaler = made()
    looks = reads(monkeypatch)
    for _ in range(5):
        judges.zero_grad(set_to_none=zero)
        scaler.scale((judge * generator.detach()).sum()).backward()
        scaler.step(judges)
        if updates == "each":
            scaler.update()
        makes.zero_grad(set_to_none=zero)
        judge.requires_grad_(not frozen)
        scaler.scale((judge * generator).sum()).backward()
        judge.requires_grad_(True)
        scaler.step(makes)
        scaler.update()
    assert scaler.get_scale() == 4.0 * 2 ** (10 if updates == "each" else 5)
    assert not looks


@ZERO
@pytest.mark.parametrize("period", [2, 3])
def test_an_optimizer_that_rests_for_some_iterations_is_fine(zero, period):
    """Its gradients, unscaled, lie there while the scale changes, until its own zero_grad."""
    (a, b, c), optimizers, scaler = made(3)
    for i in range(7):
        for parameter, optimizer in zip((a, b, c), optimizers, strict=True):
            if optimizer is optimizers[0] or i % period == 0:
                optimizer.zero_grad(set_to_none=zero)
                scaler.scale((parameter * parameter).sum()).backward()
                scaler.step(optimizer)
        scaler.update()


@ZERO
def test_optimizers_that_take_turns_with_an_update_each_are_fine(zero):
    parameters, optimizers, scaler = made(3)
    for _ in range(4):
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=zero)
            scaler.scale((parameter * parameter).sum()).backward()
            scaler.step(optimizer)
            scaler.update()


@ZERO
def test_gradients_that_are_thrown_away_are_fine(zero):
    """The second optimizer's gradients are scaled and left behind by each update, then set to zero."""
    (a, b), (first, second), scaler = made()
    for i in range(6):
        first.zero_grad()
        scaler.scale((a * b).sum()).backward()
        scaler.step(first)
        if i % 2:
            scaler.step(second)
        scaler.update()
        second.zero_grad(set_to_none=zero)


@ZERO
def test_gradients_that_are_thrown_away_after_others_were_added_are_fine(zero):
    (a, b), (first, second), scaler = made()
    for i in range(6):
        first.zero_grad()
        scaler.scale((a * b).sum()).backward()  # adds to b's of the scale before
        scaler.step(first)
        scaler.update()
        if i % 3 == 2:
            second.zero_grad(set_to_none=zero)
            first.zero_grad()
            scaler.scale((a * b).sum()).backward()
            scaler.step(first)
            scaler.step(second)
            scaler.update()
            second.zero_grad(set_to_none=zero)


@ZERO
def test_plain_loops_look_at_nothing(zero, monkeypatch):
    looks = reads(monkeypatch)
    (a, b), (first, second), scaler = made()
    for _ in range(5):
        first.zero_grad(set_to_none=zero)
        second.zero_grad(set_to_none=zero)
        scaler.scale((a * b).sum()).backward()
        scaler.scale((a + b).sum()).backward()  # accumulation
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert not looks


def test_masters_that_are_filled_by_hand_are_fine():
    """Gradients that no backward adds to: copied into the same tensors in each iteration."""
    parameters, optimizers, scaler = made()
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    optimizers = [torch.optim.SGD([master], lr=0.01) for master in masters]
    for master in masters:
        master.grad = torch.zeros(3)
    for _ in range(4):
        for parameter, master, optimizer in zip(parameters, masters, optimizers, strict=True):
            parameter.grad = None
            scaler.scale((parameter * parameter).sum()).backward()
            master.grad.copy_(parameter.grad)
            scaler.step(optimizer)
            scaler.update()


def test_a_gradient_penalty_adds_to_nothing():
    (a, b), (first, second), scaler = made()
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        (gradient,) = torch.autograd.grad(scaler.scale((a * a * b).sum()), a, create_graph=True)
        scaler.scale((gradient / scaler.get_scale()).pow(2).sum()).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()


@pytest.mark.parametrize("window", [2, 3, 4])
@pytest.mark.parametrize("first_window", [True, False])
def test_an_optimizer_that_accumulates_across_updates_is_refused(window, first_window):
    """Also in its first window, before the scaler knows it."""
    (a, b), (first, second), scaler = made()

    def iteration():
        first.zero_grad()
        scaler.scale((a * a).sum() + (b * b).sum()).backward()
        scaler.step(first)

    if not first_window:
        iteration()
        scaler.step(second)
        scaler.update()
        second.zero_grad()
    for i in range(window):
        if i:
            scaler.update()
        iteration()
    gradient = b.grad.clone()
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(RuntimeError, match=SUM):
            call(second)
    assert torch.equal(b.grad, gradient)
    second.zero_grad(set_to_none=False)  # as the message says
    scaler.step(second)
    assert scaler._records.spoiled._mixed == {}


def test_the_same_with_a_scale_that_did_not_change_is_fine():
    (a, b), (first, second), scaler = made()
    scaler.set_growth_interval(1000)
    for i in range(8):
        first.zero_grad()
        scaler.scale((a * a).sum() + (b * b).sum()).backward()
        scaler.step(first)
        if i % 4 == 3:
            scaler.step(second)
            assert torch.allclose(b.grad, 8 * b.detach(), rtol=0.2)  # four times 2 * b, of a b that just moved
        scaler.update()
        if i % 4 == 3:
            second.zero_grad()


def test_gradients_that_nothing_was_added_to_are_refused_too():
    """The second optimizer's are of the old scale alone; the new one would be taken out of them."""
    (a, b), (first, second), scaler = made()
    for optimizer in (first, second):
        optimizer.zero_grad()
    scaler.scale((a * b).sum()).backward()
    scaler.step(first)
    scaler.update()
    first.zero_grad()
    scaler.scale((a * a).sum()).backward()
    scaler.step(first)
    scaler._known[id(second)] = second
    scaler.update()
    first.zero_grad()
    scaler.scale((a * a).sum()).backward()
    with pytest.raises(RuntimeError, match=SUM):
        scaler.step(second)


@pytest.mark.parametrize("container", [list, tuple, iter])
def test_losses_in_containers_are_watched_too(container):
    (a, b), (first, _), scaler = made()
    scaler.scale((a * b).sum()).backward()
    scaler.update(1.0)
    for loss in scaler.scale(container([(a * b).sum(), (a + b).sum()])):
        loss.backward()
    with pytest.raises(RuntimeError, match=SUM):
        scaler.step(first)


def test_sparse_gradients_of_an_old_scale():
    table = nn.Embedding(3, 2, sparse=True)
    optimizer, scaler = torch.optim.SGD([("table", table.weight)], lr=0.1), LossScaler("cpu", 4.0)
    scaler.scale(table(torch.tensor([0, 0, 1])).sum()).backward()
    scaler.update(8.0)
    scaler.scale(table(torch.tensor([1])).sum()).backward()
    with pytest.raises(RuntimeError, match="the gradient of table is a sum over two scales"):
        scaler.step(optimizer)


@pytest.mark.parametrize("backward", [True, False])
def test_no_graph_and_no_loss_is_kept_alive(backward):
    (a, b), (first, _), scaler = made()
    for _ in range(3):
        first.zero_grad()
        scaler.scale((a * b).sum()).backward()
        scaler.step(first)
        scaler.update()
    assert scaler._records.spoiled._left or scaler._records.spoiled._search is False
    gc.collect()
    gc.disable()
    try:
        kept = torch.ones(3)
        seen = weakref.ref(kept)
        scaler.scale((a * b).sum()).backward()
        scaler.scale((a * b).sum()).backward()
        scaler.step(first)
        scaler.update()  # b is known to nobody; a hook is on the next loss
        scaler._known[id(first)] = first
        scaler._records.spoiled._search = True

        class Holds(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, value):
                ctx.save_for_backward(value)
                return x.sum()

            @staticmethod
            def backward(ctx, gradient):
                return gradient * ctx.saved_tensors[0], None

        scaled = scaler.scale(Holds.apply(a, kept))
        assert scaled._backward_hooks  # it is watched
        if backward:
            scaled.backward()
        del kept, scaled
        assert seen() is None  # freed at once, without the garbage collector
    finally:
        gc.enable()


def test_a_dead_optimizer_is_forgotten():
    (a, b), (first, second), scaler = made()
    for optimizer in (first, second):
        optimizer.zero_grad()
        scaler.scale((a * b).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    first.zero_grad()
    gone = weakref.ref(second)
    del second, optimizer
    gc.collect()
    assert gone() is None
    scaler.scale((a * b).sum()).backward()
    scaler.step(first)
    scaler.update()
    assert len(scaler._known) == 1


def test_a_copy_leaves_it_behind():
    (a, b), (first, second), scaler = made()
    for optimizer in (first, second, first):
        optimizer.zero_grad()
        scaler.scale((a * b).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler._records.spoiled._left
    again = copy.deepcopy(scaler)
    assert not again._records.spoiled._left and again.get_scale() == scaler.get_scale()


def test_holds_any():
    assert holds_any(torch.tensor([0.0, float("nan")])) and holds_any(torch.tensor([0.0, -1e-40]))
    assert not holds_any(torch.zeros(3)) and not holds_any(torch.zeros(0))
    sparse = torch.sparse_coo_tensor([[0, 0]], [0.0, 2.0], (3,))
    assert holds_any(sparse) and not holds_any(sparse * 0) and holds_any(torch.eye(2).to_sparse_csr())


def test_nothing_is_watched_while_a_cuda_graph_is_captured(monkeypatch):
    (a, b), _, scaler = made()
    scaler.scale((a * b).sum()).backward()
    scaler.update(1.0)
    assert scaler.scale((a * b).sum())._backward_hooks
    monkeypatch.setattr("fxprec.scaling.unscale.capturing", lambda device: True)
    assert not scaler.scale((a * b).sum())._backward_hooks


def test_nothing_is_watched_before_the_first_update():
    old = SpoiledGradients()
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    old.watch(loss, torch.ones(()))
    assert not loss._backward_hooks
