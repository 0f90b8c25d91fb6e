"""The optimizers on the Triton kernels: beside torch's fused ones, with scaler, clipping, shadows and low gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxprec
import kernel_tools
from fxprec import optim
from fxprec.model.conversion import conversion_of

fused_multiply_add = kernel_tools.fused_multiply_add

on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)

FAMILY = {
    "AdamW": (optim.AdamW, torch.optim.AdamW, {}),
    "Adam": (optim.Adam, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "SGD": (optim.SGD, torch.optim.SGD, {"weight_decay": 0.01}),
    "nesterov": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}
SHAPES = ((3, 5), (7,), (), (33, 300), (0,))


def parameters(device):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]


def give(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + seed)
    for param, shape in zip(params, SHAPES, strict=True):
        param.grad = torch.randn(shape, generator=generator).to(param.device) * scale


def net(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)


def batch(device, seed=0):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(device)


def launched(optimizer):
    return bool(optimizer._plans._plans)


@pytest.mark.slow
def test_in_the_interpreter():
    kernel_tools.run_in_the_interpreter(__file__)


@on_devices
@pytest.mark.parametrize("max_norm", [None, 2.0])
@pytest.mark.parametrize("name", FAMILY)
def test_scaled_and_clipped_steps_are_torchs(name, max_norm, device, fused_multiply_add):
    ours, theirs, options = FAMILY[name]
    a, b = parameters(device), parameters(device)
    one, other = ours(a, lr=0.1, max_norm=max_norm, **options), theirs(b, lr=0.1, fused=True, **options)
    mine, torchs = fxprec.LossScaler(device, 1024.0), torch.amp.GradScaler(device, 1024.0)
    for step in range(5):
        for params, optimizer, scaler in ((a, one, mine), (b, other, torchs)):
            scaler.scale(torch.zeros((), device=device, requires_grad=True))
            give(params, step, scaler.get_scale())
            if step in (1, 2):  # not at first: torch's fused SGD then keeps uninitialized buffers
                params[3].grad[32, 299] = float("inf") if step == 1 else float("nan")
            if scaler is torchs:
                scaler.unscale_(optimizer)
                if max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(params, max_norm)
            scaler.step(optimizer)
            scaler.update()
        assert mine.get_scale() == torchs.get_scale()
        assert mine.step_was_skipped is (step in (1, 2))
    assert launched(one) and mine.skipped_steps == 2
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    states, expected = one.state_dict()["state"], other.state_dict()["state"]
    assert states.keys() == expected.keys()
    for key, state in states.items():
        for part, value in state.items():
            torch.testing.assert_close(value.cpu(), expected[key][part].cpu(), rtol=1e-6, atol=1e-6)


@on_devices
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("fuse", "count"), [(False, 4), (True, 3)])  # a fused region reads the bias before it in FP32
def test_the_kernel_writes_the_shadows_and_reads_low_gradients(fuse, count, low, device, fused_multiply_add):
    dtype = torch.bfloat16
    model, reference = (fxprec.convert(net(device), dtype=dtype, fuse=fuse)[0] for _ in range(2))
    if low and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("wants Tensor.grad_dtype")
    ours = optim.AdamW(model.parameters(), lr=0.01, low_gradients=low)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01, fused=True)
    rounding = 2**-7 if kernel_tools.INTERPRETING else 0
    for step in range(3):
        for net_, optimizer in ((model, ours), (reference, theirs)):
            optimizer.zero_grad()
            net_(batch(device, step)).square().mean().backward()
            optimizer.step()
        store = conversion_of(model).store
        shadows = [store.shadow_of(p) for p in model.parameters()]
        assert sum(shadow is not None for shadow in shadows) == count
        for parameter, shadow in zip(model.parameters(), shadows, strict=True):
            if shadow is not None:  # the interpreter cuts bfloat16 off in place of rounding: a unit in its last place
                torch.testing.assert_close(shadow, parameter.detach().to(dtype), rtol=rounding, atol=0)
    assert store.refreshes == 0 and launched(ours)
    if low:
        assert model[0].weight.grad.dtype is dtype
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-2 if low else 1e-3)


@on_devices
def test_a_step_between_forward_and_backward_is_reported(device):
    model, _ = fxprec.convert(net(device), dtype=torch.bfloat16)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(batch(device)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_devices
def test_moments_in_bfloat16_and_a_resume(device, fused_multiply_add):
    a, b = parameters(device), parameters(device)
    one = optim.AdamW(a, lr=0.1, state_dtype=torch.bfloat16)
    for step in range(2):
        give(a, step)
        one.step()
    other = optim.AdamW(b, lr=0.1, state_dtype=torch.bfloat16)
    for p, q in zip(a, b, strict=True):
        q.data.copy_(p.data)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for params, optimizer in ((a, one), (b, other)):
        give(params, 2)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert one.state[a[3]]["exp_avg"].dtype is torch.bfloat16
    assert torch.equal(one.state[a[3]]["exp_avg_sq"], other.state[b[3]]["exp_avg_sq"])


@on_devices
def test_groups_learning_rates_and_late_parameters(device, fused_multiply_add):
    a, b = parameters(device), parameters(device)
    groups = [[{"params": p[:2]}, {"params": p[2:], "lr": 0.5, "betas": (0.5, 0.9)}] for p in (a, b)]
    one, other = optim.AdamW(groups[0], lr=0.1), torch.optim.AdamW(groups[1], lr=0.1, fused=True)
    for step in range(4):
        for params, optimizer in ((a, one), (b, other)):
            give(params, step)
            if step < 2:
                params[1].grad = params[3].grad = None
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1 / (step + 1), device=device)
            optimizer.step()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not kernel_tools.CUDA, reason="no CUDA device")
@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD])
def test_no_step_but_the_first_waits_for_the_device(make):
    model, scaler = fxprec.convert(net("cuda"))
    optimizer = make(model.parameters(), lr=0.01, max_norm=1.0)
    inputs = batch("cuda")

    def step():
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.skipped_steps >= 0


@on_devices
def test_what_the_kernels_do_not_take_goes_to_torchs(device):
    dense, gaps, wide = torch.ones(4, 6), torch.ones(4, 6)[:, ::2], torch.ones(4, dtype=torch.float64)
    params = [nn.Parameter(tensor.to(device) if tensor is dense else tensor) for tensor in (dense, gaps, wide)]
    if device == "cuda":
        params = [nn.Parameter(tensor.detach().to(device)) for tensor in params]
        params[1] = nn.Parameter(torch.ones(4, 6, device=device)[:, ::2])
    one = optim.AdamW(params, lr=0.1, max_norm=1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    one.step()
    assert one.implementations() == {
        "Triton, one pass": 1,
        "torch (not dense in memory)": 1,
        "torch (torch.float64 with a gradient of torch.float64)": 1,
    }
    for param in params:
        assert (param < 0.95).all()
    kernels = [plan for (kind, *_), plan in one._plans._plans.items() if kind == "adam"]
    assert len(kernels) == 1 and len(kernels[0].params) == 1


@on_devices
@pytest.mark.parametrize("name", FAMILY)
def test_float16_parameters(name, device):
    """At O3. Their moments are float16 as torch's, which our kernels leave to torch's."""
    ours, theirs, options = FAMILY[name]
    a, b = [nn.Parameter(p.detach().half()) for p in parameters(device)], parameters(device)
    one, other = ours(a, lr=0.1, max_norm=1e6, **options), theirs(b, lr=0.1, fused=True, **options)
    for step in range(2):
        for params, optimizer in ((a, one), (b, other)):
            generator = torch.Generator().manual_seed(1000 + step)
            for param, shape in zip(params, SHAPES, strict=True):
                param.grad = torch.randn(shape, generator=generator).half().to(param)
            optimizer.step()
    reason = "Triton, one pass" if name == "SGD" else "torch (state in torch.float16)"
    assert one.implementations() == {reason: len(a)}
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p.float(), q, rtol=5e-3, atol=5e-3)
