"""Compiled loops: as near to FP64 as torch's fused kernels, shadows written, errors before."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.kernels.cpu import cpp
from fxprec.optim import SGD, Adam, AdamW, kernel_updates
from fxprec.optim.parts import StepInputs
from fxprec.optim.shadow_copies import ShadowCopies
from fxprec.testing import count_casts

BOTH = ((130, 7), (33,))
#: (class, torch's, options, dtype of the gradients).
CASES = {
    "adamw": (AdamW, torch.optim.AdamW, {"weight_decay": 0.1}, torch.bfloat16),
    "adam": (Adam, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}, torch.float32),
    "sgd": (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, torch.float32),
    "sgd-dampened": (SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}, torch.float32),
    "sgd-plain": (SGD, torch.optim.SGD, {}, torch.bfloat16),
}
needs_low_gradients = pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="wants Tensor.grad_dtype")


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in BOTH]


def give(params: list[nn.Parameter], step: int, dtype: torch.dtype, low: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for param in params:
        gradient = torch.randn(param.shape, generator=generator).to(torch.bfloat16).to(dtype)
        if low is torch.bfloat16:
            param.grad_dtype = low
        param.grad = gradient.to(low or dtype)


def tensors(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = (state for param in params for state in optimizer.state[param].values())
    return [*params, *(state for state in states if isinstance(state, Tensor))]


def kept(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("name", CASES)
def test_within_twice_torchs_error_of_float64(name: str):
    ours, theirs, options, low = CASES[name]
    if low is torch.bfloat16 and not hasattr(Tensor, "grad_dtype"):
        low = torch.float32
    a, b, exact = parameters(), parameters(), parameters(torch.float64)
    mine, fused, reference = (
        ours(a, lr=0.1, compiled=True, **options),
        theirs(b, lr=0.1, fused=True, **options),
        theirs(exact, lr=0.1, **options),
    )
    assert mine.implementations() == {"compiled, one pass": 2}
    for step in range(5):
        give(a, step, torch.float32, low)
        give(b, step, torch.float32)
        give(exact, step, torch.float64)
        for optimizer in (mine, fused, reference):
            optimizer.step()

    def errors(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[float]:
        pairs = zip(tensors(params, optimizer), tensors(exact, reference), strict=True)
        return [float((x.detach().double() - y.detach()).square().mean()) ** 0.5 for x, y in pairs]

    for ours_, torchs, size in zip(errors(a, mine), errors(b, fused), tensors(exact, reference), strict=True):
        assert ours_ <= 2 * torchs + 1e-8 * float(size.detach().abs().max())


def test_a_parameter_in_any_order_of_memory_and_a_gradient_in_another():
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    for strided in (False, True):
        weights = []
        for compiled in (False, True):
            generator = torch.Generator().manual_seed(0)
            param = nn.Parameter(torch.randn(6, 5, 4, 3, generator=generator).to(memory_format=torch.channels_last))
            optimizer = SGD([param], lr=0.1, compiled=compiled, **options)
            for _ in range(2):
                gradient = torch.randn(param.shape, generator=generator)
                param.grad = gradient if strided else gradient.contiguous(memory_format=torch.channels_last)
                optimizer.step()
            weights.append(param.detach())
        torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-6)


@needs_low_gradients
def test_a_converted_model_trains_on_and_casts_no_weight():
    losses: dict[bool, list[float]] = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model, scaler = fxprec.convert(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
        optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1, low_gradients=True, compiled=compiled)
        x = torch.randn(4, 16)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.setdefault(compiled, []).append(loss.item())
        if compiled:
            assert optimizer.implementations() == {"compiled, one pass": 4}
        versions = [param._version for param in model.parameters()]
        optimizer.step()
        assert versions == [param._version for param in model.parameters()]  # the shadow stores count on that
        with count_casts() as casts:
            model(x)
        assert casts.weights == casts.refreshes == 0
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    assert losses[True][2] < losses[True][0]


def test_a_divisor_is_divided_by_and_a_skipped_step_changes_nothing():
    a, b = parameters(), parameters()
    mine = Adam(a, lr=0.1, compiled=True, **CASES["adam"][2])
    plain = torch.optim.Adam(b, lr=0.1, fused=True, **CASES["adam"][2])
    mine_scaler, torchs = fxprec.LossScaler("cpu", 64.0), torch.amp.GradScaler("cpu", 64.0)
    for step, bad in ((0, False), (1, True), (2, False)):
        for params, optimizer, scaler in ((a, mine, mine_scaler), (b, plain, torchs)):
            scaler.scale(torch.zeros((), requires_grad=True))
            give(params, step, torch.float32)
            for param in params:
                assert param.grad is not None
                param.grad.mul_(float("inf") if bad else scaler.get_scale())
            before = kept(tensors(params, optimizer))
            scaler.step(optimizer)
            scaler.update()
            assert bad == all(map(torch.equal, before, tensors(params, optimizer))) or not before
    for x, y in zip(tensors(a, mine), tensors(b, plain), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_flag_that_was_not_read_before_is_read(name: str):
    """That of a step whose other parameters are on an accelerator: the optimizer does not wait for it."""
    ours, _, options, _ = CASES[name]
    params = parameters()[:1]
    optimizer = ours(params, lr=0.1, compiled=True, **options)
    give(params, 0, torch.float32)
    optimizer.step()
    before = kept(tensors(params, optimizer))
    for flag in (1.0, 0.0):
        with ShadowCopies(params) as copies:
            inputs = StepInputs(None, torch.tensor(flag), copies)
            optimizer._update(optimizer.param_groups[0], [*params], [params[0].grad], inputs)
        assert flag == all(map(torch.equal, before, tensors(params, optimizer)))


def test_checkpoints_copies_and_pickles_go_on():
    a, b = parameters(), parameters()
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    mine, plain = SGD(a, compiled=True, **options), torch.optim.SGD(b, fused=True, **options)
    give(a, 0, torch.float32)
    mine.step()
    plain.load_state_dict(mine.state_dict())
    again = SGD(b, compiled=True, **options)
    again.load_state_dict(plain.state_dict())
    for copied in (again, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert copied.compiled and "compiled, one pass" in copied.implementations()
        params = copied.param_groups[0]["params"]
        give(params, 1, torch.float32)
        before = kept(params)
        copied.step()
        assert not any(map(torch.equal, before, params))


def test_groups_of_their_own_rates_and_parameters_of_their_own_steps():
    a, b = parameters(), parameters()
    pairs = [(a, AdamW, {"compiled": True}), (b, torch.optim.AdamW, {"fused": True})]
    made = []
    for params, cls, options in pairs:
        groups = [{"params": params[:1], "lr": torch.tensor(0.1)}, {"params": params[1:], "betas": (0.5, 0.9)}]
        made.append(cls(groups, weight_decay=0.1, **options))
    late = [nn.Parameter(torch.ones(11, 13)) for _ in pairs]
    for step in range(4):
        for params, optimizer, param in zip((a, b), made, late, strict=True):
            give(params, step, torch.float32)
            if step == 2:  # the first of this one is the third of the others
                optimizer.param_groups[0]["params"].append(param)
            if step >= 2:
                param.grad = torch.full_like(param, float(step))
            optimizer.param_groups[0]["lr"].mul_(0.9)
            optimizer.step()
    for x, y in zip(tensors([*a, late[0]], made[0]), tensors([*b, late[1]], made[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=1e-6)


def test_a_loop_that_does_not_compile_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(cpp, "compiled", fails)
    monkeypatch.setattr(kernel_updates, "compiled", kernel_updates.compiled.__wrapped__)
    params = parameters()
    optimizer = AdamW(params, compiled=True)
    give(params, 0, torch.float32)
    before = kept(params)
    with pytest.raises(
        RuntimeError, match=r"the update of .* could not be compiled; leave it out.*: OSError: disk full"
    ):
        optimizer.step()
    assert all(map(torch.equal, before, params))
    assert all(state["step"].item() == 0 for state in optimizer.state.values())


def test_a_state_elsewhere_is_refused_and_not_gone_to_by_its_address():
    params = parameters()[:1]
    optimizer = SGD(params, lr=0.1, momentum=0.9, compiled=True)
    optimizer.state[params[0]]["momentum_buffer"] = torch.zeros(130, 7, device="meta")
    give(params, 0, torch.float32)
    with pytest.raises(RuntimeError, match=r"shape \(130, 7\) on cpu, momentum_buffer on meta: move"):
        optimizer.step()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (torch.zeros(130, 7, dtype=torch.float64), "momentum_buffer in torch.float64: move"),
        (torch.zeros(130, 7, dtype=torch.bfloat16), "momentum_buffer in torch.bfloat16: move"),
        (torch.zeros(3), "momentum_buffer of 3 elements: move"),
    ],
)
def test_a_state_in_another_form_is_refused_and_nothing_is_written(state: Tensor, said: str):
    params = parameters()[:1]
    optimizer = SGD(params, lr=0.1, momentum=0.9, compiled=True)
    optimizer.state[params[0]]["momentum_buffer"] = state
    give(params, 0, torch.float32)
    before = kept([*params, state])
    with pytest.raises(RuntimeError, match=said):
        optimizer.step()
    assert all(map(torch.equal, before, [*params, state]))


def test_what_it_does_not_go_with():
    params = parameters()
    with pytest.raises(ValueError, match="compiled=True has no loop for a state_dtype"):
        AdamW(params, compiled=True, state_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="compiled in a parameter group"):
        AdamW([{"params": params, "compiled": True}])
