"""Inf and nan at any gradient, iteration, loss and optimizer: the right steps are skipped, and nothing else changes."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxprec.scaling.loss_scaler import LossScaler

INF, NAN = float("inf"), float("nan")
LOSSES, ITERATIONS = 3, 4
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


class Poison(torch.autograd.Function):
    """The identity; its backward adds ``value`` to the first element."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] += ctx.value
        return gradient, None


class Training:
    """Two optimizers of two parameters each; loss 0 reaches the first, loss 1 the second, loss 2 both."""

    REACHES = ((0,), (1,), (0, 1))

    def __init__(self):
        self.parameters = [[nn.Parameter(torch.linspace(0.5 + i, 1.5 + j, 3)) for j in range(2)] for i in range(2)]
        makers = (OPTIMIZERS["sgd"], OPTIMIZERS["adamw"])
        self.optimizers = [make(owned) for make, owned in zip(makers, self.parameters, strict=True)]

    def loss(self, loss_id, iteration, poisoned):
        """``poisoned``: (loss, optimizer, parameter) -> value, in this iteration."""
        total = torch.zeros(())
        for i in self.REACHES[loss_id]:
            for j, parameter in enumerate(self.parameters[i]):
                value = poisoned.get((loss_id, i, j), 0.0)
                total = total + (Poison.apply(parameter, value) * (1 + loss_id + iteration)).pow(2).mean()
        return total

    def values(self):
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        return [p.detach().clone() for owned in self.parameters for p in owned], states


def reference(plan):
    """Plain training in FP32 that leaves the skipped steps out."""
    training = Training()
    for iteration, poisoned in enumerate(plan):
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        sums = {}
        for loss_id in range(LOSSES):
            owned = [p for i in Training.REACHES[loss_id] for p in training.parameters[i]]
            for p, gradient in zip(
                owned, torch.autograd.grad(training.loss(loss_id, iteration, {}), owned), strict=True
            ):
                sums[p] = sums[p] + gradient if p in sums else gradient
        for i, optimizer in enumerate(training.optimizers):
            if not any(owner == i for _, owner, _ in poisoned):
                for p in training.parameters[i]:
                    p.grad = sums[p]
                optimizer.step()
    return training.values()


def scales_of_three_torch_scalers(plan, interval):
    """Each of torch's own scalers sees one loss."""
    scalers = [torch.amp.GradScaler("cpu", 2.0 ** (8 + i), growth_interval=interval) for i in range(LOSSES)]
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for poisoned in plan:
        for loss_id, scaler in enumerate(scalers):
            optimizer.zero_grad()
            scaler.scale(parameter.sum()).backward()
            if any(loss == loss_id for loss, _, _ in poisoned):
                parameter.grad.fill_(INF)
            scaler.step(optimizer)
            scaler.update()
    return [scaler.get_scale() for scaler in scalers], [scaler._get_growth_tracker() for scaler in scalers]


def check(plan, interval=3):
    training = Training()
    scaler = LossScaler("cpu", 2.0**8, growth_interval=interval, num_losses=LOSSES)
    state = scaler.state_dict()
    for i, loss in enumerate(state["fxprec"]["losses"]):
        loss["scale"] = 2.0 ** (8 + i)
    scaler.load_state_dict(state)
    skips = 0
    for iteration, poisoned in enumerate(plan):
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        for loss_id in range(LOSSES):
            owners = [training.optimizers[i] for i in Training.REACHES[loss_id]]
            with scaler.scale_loss(training.loss(loss_id, iteration, poisoned), owners, loss_id) as loss:
                loss.backward()
        bad = {owner for _, owner, _ in poisoned}
        for i, optimizer in enumerate(training.optimizers):
            scaler.step(optimizer)
            skips += i in bad
        assert scaler.skipped_steps == skips and scaler.step_was_skipped == bool(bad)
        if bad:
            expected = {(i, j) for _, i, j in poisoned}
            shapes = [f"param_groups[0]['params'][{j}] of shape (3,)" for _, j in sorted(expected, reverse=True)]
            assert scaler.overflow_parameters() == shapes
        scaler.update()
    losses = scaler.state_dict()["fxprec"]["losses"]
    assert ([x["scale"] for x in losses], [x["growth_tracker"] for x in losses]) == scales_of_three_torch_scalers(
        plan, interval
    )
    ours, expected = training.values(), reference(plan)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], expected[0], strict=True))
    for mine, theirs in zip(ours[1], expected[1], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k][name], theirs[k][name]) for k in mine for name in mine[k])


PLACES = [(loss, i, j) for loss in range(LOSSES) for i in Training.REACHES[loss] for j in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_one_bad_gradient_anywhere(value):
    for place, iteration in itertools.product(PLACES, range(ITERATIONS)):
        check([{place: value} if i == iteration else {} for i in range(ITERATIONS)])


def test_no_bad_gradient():
    check([{}] * 7)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    plan=st.lists(
        st.dictionaries(st.sampled_from(PLACES), st.sampled_from([INF, -INF, NAN]), max_size=3), min_size=1, max_size=6
    ),
    interval=st.integers(1, 4),
)
def test_any_plan_of_bad_gradients(plan, interval):
    check(plan, interval)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [False, True])
def test_one_loss_two_optimizers_as_torchs_scaler(name, clip):
    """With ``scale`` instead of ``scale_loss``: an overflow in one optimizer does not stop the other."""
    for place, value in itertools.product(itertools.product((0, 1), (0, 1)), (INF, NAN)):
        ends = []
        for cls in (torch.amp.GradScaler, LossScaler):
            parameters = [[nn.Parameter(torch.linspace(0.5 + i, 1.5 + j, 3)) for j in range(2)] for i in range(2)]
            optimizers = [OPTIMIZERS[name](owned) for owned in parameters]
            scaler = cls("cpu", 2.0**8, growth_interval=2)
            for iteration in range(4):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = sum((p * (1 + iteration)).pow(2).sum() for owned in parameters for p in owned)
                scaler.scale(loss).backward()
                if iteration == 1:
                    parameters[place[0]][place[1]].grad[1] = value
                for optimizer, owned in zip(optimizers, parameters, strict=True):
                    if clip:
                        scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(owned, 1.0)
                    scaler.step(optimizer)
                scaler.update()
            ends.append([scaler.get_scale(), *(p.tolist() for owned in parameters for p in owned)])
        assert ends[0] == ends[1]
