"""``FP16_Optimizer``: a half model trains on FP32 masters, scales, skips, clips, and takes closures."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxprec.fp16_utils
from fxprec.amp import FP16_Optimizer
from fxprec.errors import LossScaleFloorError

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")


class Half(nn.Module):
    """A low linear and, on request, an FP32 one behind it."""

    def __init__(self, dtype=BF16, mixed=False):
        super().__init__()
        self.low = nn.Linear(4, 3).to(dtype)
        self.full = nn.Linear(3, 2) if mixed else nn.Identity()

    def forward(self, x):
        out = self.low(x.to(self.low.weight.dtype))
        return self.full(out.float() if isinstance(self.full, nn.Linear) else out)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def wrapped(model, optimizer=None, **options):
    return FP16_Optimizer(optimizer or sgd(model), **{"verbose": False, **options})


def loss_of(model, seed=0):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    return model(x).float().square().mean()


def masters(optimizer):
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def same(a, b):
    return all(map(torch.equal, a, b))


def by_hand(model, steps, make=sgd):
    """The reference: masters, gradients in FP32, rounded after each step."""
    parameters = [*model.parameters()]
    full = [nn.Parameter(p.detach().float()) for p in parameters]
    holder = nn.ParameterList(full)
    optimizer = make(holder)
    for seed in range(steps):
        model.zero_grad()
        loss_of(model, seed).backward()
        for parameter, master in zip(parameters, full, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, full, strict=True):
                parameter.copy_(master)
    return full


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("options", [{}, {"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
def test_it_trains_on_fp32_masters_bit_for_bit(options, dtype, mixed):
    model = Half(dtype, mixed)
    if dtype is F16:
        options = {**options, "dynamic_loss_args": {"init_scale": 256.0}}  # no gradient is subnormal, none overflows
    reference = copy.deepcopy(model)
    optimizer = wrapped(model, **options)
    for seed in range(3):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, seed))
        optimizer.step()
    expected = by_hand(reference, 3)
    if dtype is BF16:  # a scale by a power of two changes no digit of bfloat16
        assert same(masters(optimizer), expected) and same(model.parameters(), reference.parameters())
    for mine, theirs in zip(masters(optimizer), expected, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=2e-3, atol=2e-4)
    for low, group in zip(optimizer.fp16_groups, optimizer.fp32_from_fp16_groups, strict=True):
        assert all(p.dtype is dtype and torch.equal(p, m.to(dtype)) for p, m in zip(low, group, strict=True))


def test_masters_gather_updates_that_low_parameters_cannot_hold():
    model = Half()
    with torch.no_grad():
        model.low.weight.fill_(1.0)
    optimizer = wrapped(model, sgd(model, lr=2.0**-12, momentum=0.0))
    for _ in range(8):
        optimizer.zero_grad()
        optimizer.backward(-model.low.weight.float().sum())
        optimizer.step()
    assert optimizer.fp32_from_fp16_groups[0][0].unique().tolist() == [1 + 2.0**-9]
    for _ in range(32):
        optimizer.zero_grad()
        optimizer.backward(-model.low.weight.float().sum())
        optimizer.step()
    assert model.low.weight.unique().tolist() == [1 + 2.0**-7]  # bfloat16 alone would still be 1


@pytest.mark.parametrize("naive", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_several_losses_accumulate(mixed, naive):
    """With ``update_master_grads`` after each of them, or once: the scale stays until the step."""
    model = Half(mixed=mixed)
    reference = copy.deepcopy(model)
    optimizer = wrapped(model, dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 1})
    for seed in range(3):
        optimizer.backward(loss_of(model, seed), update_master_grads=naive)
        loss_of(reference, seed).backward()
    if not naive:
        optimizer.update_master_grads()
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    assert same(gradients, [p.grad.float() for p in reference.parameters()])
    (shown,) = optimizer.inspect_master_grad_data()
    assert same(shown, gradients)
    assert optimizer.loss_scale == 2.0**16
    optimizer.step()
    assert optimizer.loss_scale == 2.0**17


def test_a_loss_without_some_parameters_leaves_their_gradients():
    model = Half(mixed=True)
    optimizer = wrapped(model, static_loss_scale=4.0)
    optimizer.backward(model(torch.ones(1, 4)).sum())
    kept = model.full.bias.grad.tolist()
    optimizer.backward(model.low(torch.ones(1, 4).bfloat16()).float().sum())
    assert model.full.bias.grad.tolist() == kept == [1.0, 1.0]


def test_one_graph_may_be_used_by_several_losses():
    model = Half()
    optimizer = wrapped(model)
    out = model(torch.ones(1, 4)).float()
    optimizer.backward(out.sum(), update_master_grads=False, retain_graph=True)
    optimizer.backward(out.sum() * 2, update_master_grads=False)
    optimizer.update_master_grads()
    assert optimizer.inspect_master_grad_data()[0][1].tolist() == [3.0] * 3


def test_a_step_with_scaled_gradients_is_refused():
    model = Half()
    optimizer = wrapped(model)
    optimizer.backward(loss_of(model), update_master_grads=False)
    with pytest.raises(RuntimeError, match=r"call update_master_grads\(\) before step"):
        optimizer.step()
    optimizer.update_master_grads()
    optimizer.step()


@pytest.mark.parametrize("where", ["low", "full"])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_an_overflow_skips_the_step_and_halves_the_scale(bad, where, capsys):
    model = Half(mixed=True)
    optimizer = wrapped(model, dynamic_loss_scale=True)
    before = masters(optimizer), [p.detach().clone() for p in model.parameters()]
    optimizer.backward(loss_of(model), update_master_grads=False)
    getattr(model, where).bias.grad[-1] = bad
    optimizer.update_master_grads()
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert "Returning None" in capsys.readouterr().out
    optimizer.verbose = True
    assert optimizer.step() is None
    assert capsys.readouterr().out == "Gradient overflow.  Skipping step, reducing loss scale to 32768.0\n"
    assert same(masters(optimizer), before[0]) and same(model.parameters(), before[1]) and not optimizer.state
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    assert not optimizer.overflow
    optimizer.step()
    assert not same(masters(optimizer), before[0])


def test_float16_finds_its_scale_by_itself():
    model = Half(F16)
    optimizer = wrapped(model, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**24})
    before, steps = masters(optimizer), 0
    while same(masters(optimizer), before) and steps < 30:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        optimizer.step()
        steps += 1
    assert 1 < steps < 30 and optimizer.loss_scale == 2.0 ** (25 - steps)


def test_a_static_scale_never_skips():
    model = Half()
    optimizer = wrapped(model, static_loss_scale=8.0)
    optimizer.backward(loss_of(model) * INF)
    assert not optimizer.overflow
    optimizer.step()
    assert not all(master.isfinite().all() for master in masters(optimizer))


def test_clipping_takes_the_norm_of_unscaled_masters():
    model = Half()
    reference = copy.deepcopy(model)
    loss_of(reference).backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.float().flatten() for p in reference.parameters()]))
    optimizer = wrapped(model, static_loss_scale=128.0)
    optimizer.backward(loss_of(model))
    assert optimizer.clip_master_grads(1e-3).item() == pytest.approx(expected.item())
    assert optimizer.clip_master_grads(1.0, norm_type=2).item() == pytest.approx(1e-3, rel=1e-3)
    assert optimizer.clip_master_grads(1.0, norm_type=INF).item() <= 1e-3


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_reaches_masters_and_model(to_none):
    model = Half(mixed=True)
    optimizer = wrapped(model)
    optimizer.backward(loss_of(model))
    optimizer.zero_grad(set_grads_to_None=to_none)
    gradients = [p.grad for p in (*model.parameters(), *optimizer.param_groups[0]["params"])]
    assert all(g is None if to_none else not g.any() for g in gradients)


def test_model_zero_grad_is_enough():
    model = Half(mixed=True)
    reference = copy.deepcopy(model)
    optimizer = wrapped(model, static_loss_scale=4.0)
    for seed in range(2):
        model.zero_grad()
        optimizer.backward(loss_of(model, seed))
    loss_of(reference, 1).backward()
    assert same(optimizer.inspect_master_grad_data()[0], [p.grad.float() for p in reference.parameters()])


def test_closures_see_parameters_that_follow_the_masters():
    """LBFGS evaluates several times a step: equal to LBFGS on masters, done by hand."""
    model = Half()
    reference = copy.deepcopy(model)
    options = {"lr": 0.5, "max_iter": 4}
    optimizer = wrapped(model, torch.optim.LBFGS(model.parameters(), **options), static_loss_scale=16.0)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss)
        calls.append(loss.item())
        return loss

    first = optimizer.step(closure)

    full = [nn.Parameter(p.detach().float()) for p in reference.parameters()]

    def closure_by_hand():
        with torch.no_grad():
            for parameter, master in zip(reference.parameters(), full, strict=True):
                parameter.copy_(master)
        reference.zero_grad()
        loss = loss_of(reference)
        loss.backward()
        for parameter, master in zip(reference.parameters(), full, strict=True):
            master.grad = parameter.grad.float()
        return loss

    torch.optim.LBFGS(full, **options).step(closure_by_hand)
    assert same(masters(optimizer), full) and first.item() == calls[0]
    assert len(set(calls)) == len(calls) > 2 and calls[-1] < calls[0]
    assert torch.equal(model.low.weight, full[0].bfloat16())


def test_a_closure_that_overflows_runs_again_at_a_lower_scale(capsys):
    model = Half()
    optimizer = wrapped(model, dynamic_loss_scale=True, verbose=True)
    capsys.readouterr()
    scales = []

    def closure():
        optimizer.zero_grad()
        scales.append(optimizer.loss_scale)
        loss = loss_of(model) * (INF if len(scales) < 3 else 1)
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure).isfinite()
    assert scales == [2.0**16, 2.0**15, 2.0**14]
    assert capsys.readouterr().out.count("OVERFLOW within closure!") == 2


def test_a_closure_that_always_overflows_ends():
    model = Half()
    optimizer = wrapped(model, dynamic_loss_scale=True, dynamic_loss_args={"min_loss_scale": 2.0**14})

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model) * INF
        optimizer.backward(loss)
        return loss

    before = masters(optimizer)
    with pytest.raises(LossScaleFloorError, match="smallest loss scale, 16384"):
        optimizer.step(closure)
    assert same(masters(optimizer), before)


def test_lr_schedulers_take_the_wrapped_optimizer():
    model = Half()
    optimizer = wrapped(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)
    optimizer.backward(loss_of(model))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    "options, error",
    [
        ({"static_loss_scale": 0.0}, ValueError),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 0}}, ValueError),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"window": 5}}, TypeError),
    ],
)
def test_bad_arguments_leave_the_optimizer_alone(options, error):
    model = Half()
    optimizer = sgd(model)
    with pytest.raises(error):
        wrapped(model, optimizer, **options)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"wraps a torch\.optim\.Optimizer, not list"):
        FP16_Optimizer([1])


def test_it_says_what_it_takes_over(capsys):
    wrapped(Half(mixed=True), verbose=True)
    assert "param group 0 has 2 low parameters, which get FP32 masters, and 2 FP32 ones" in capsys.readouterr().out
    assert fxprec.fp16_utils.FP16_Optimizer is FP16_Optimizer
