"""Low parameters that are rounded stochastically when an optimizer stores them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxprec
import kernel_tools
from fxprec import optim
from fxprec.kernels.launch.rounding import stochastic_round

LOW = [torch.bfloat16, torch.float16]
MAKE: dict[str, Any] = {
    "sgd": lambda p, **k: optim.SGD(p, **{"lr": 1e-3, **k}),
    "momentum": lambda p, **k: optim.SGD(p, **{"lr": 1e-3, "momentum": 0.5, **k}),
    "adam": lambda p, **k: optim.Adam(p, **{"lr": 1e-5, **k}),
    "adamw": lambda p, **k: optim.AdamW(p, **{"lr": 1e-5, "weight_decay": 0.0, **k}),
}


def stepped(
    make: str, dtype: torch.dtype, count: int, *, size: int = 4096, gradient: float = 1.0, **options: Any
) -> Tensor:
    """Parameters of 1 after so many steps with one gradient."""
    parameter = nn.Parameter(torch.ones(size, dtype=dtype))
    optimizer = MAKE[make]([parameter], **options)
    for _ in range(count):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    return parameter.detach().double()


def exact(make: str, count: int, **options: Any) -> float:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
    plain = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    defaults: dict[str, Any] = {"sgd": {"lr": 1e-3}, "momentum": {"lr": 1e-3, "momentum": 0.5}}
    rest = {"lr": 1e-5} | ({"weight_decay": 0.0} if make == "adamw" else {})
    optimizer = plain[make]([parameter], **{**defaults.get(make, rest), **options})
    for _ in range(count):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return parameter.item()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("make", MAKE)
def test_updates_below_half_an_ulp_add_up(make: str, dtype: torch.dtype, compiled: bool):
    """Rounded to nearest all of them are lost."""
    if compiled and (why := __import__("fxprec.kernels.cpu.cpp", fromlist=["cpp"]).why_no_compiler()):
        pytest.skip(why)
    lr = 1e-5 if dtype is torch.float16 or make.startswith("adam") else 1e-4
    steps = 40
    if make.startswith("adam"):  # whose moments would stall as well
        options = {"lr": lr, "compiled": compiled}
    else:
        options = {"lr": lr, "compiled": compiled}
    nearest = stepped(make, dtype, steps, **options)
    assert (nearest == 1).all()
    found = stepped(make, dtype, steps, stochastic_rounding=True, seed=7, **options)
    truth = exact(make, steps, lr=lr)
    error = found.std() / len(found) ** 0.5
    assert error > 0 and abs(found.mean() - truth) <= 3 * error


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("value", [1.001, -1.001, 3e-5, -7e-6, 1e-7, 0.3333, 1234.567, 65503.0])
def test_rounding_is_unbiased(dtype: torch.dtype, value: float):
    x = torch.full((1 << 18,), value)
    found = stochastic_round(x, 3, 5, dtype)
    assert found.dtype == dtype and len(found.unique()) <= 2
    error = found.double().std() / len(x) ** 0.5
    assert abs(found.double().mean() - x[0].double()) <= 3 * error + 2.0**-16 * found.double().unique().diff().sum()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_what_the_dtype_holds_stays(dtype: torch.dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    found = stochastic_round(every.float(), 1, 2, dtype)
    assert torch.equal(found.isnan(), every.isnan())
    assert torch.equal(found[~every.isnan()], every[~every.isnan()])


def test_finite_values_stay_finite():
    largest = torch.full((1000,), 65519.0)
    assert (stochastic_round(largest, 1, 2, torch.float16) == 65504).all()
    assert stochastic_round(torch.tensor([1e30, -1e30]), 1, 2, torch.float16).isinf().all()


@pytest.mark.parametrize("make", MAKE)
def test_the_seed_decides(make: str):
    runs = [stepped(make, torch.bfloat16, 3, stochastic_rounding=True, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    torch.manual_seed(5)
    drawn = stepped(make, torch.bfloat16, 3, stochastic_rounding=True)
    torch.manual_seed(5)
    assert torch.equal(drawn, stepped(make, torch.bfloat16, 3, stochastic_rounding=True))


def test_parameters_and_steps_have_bits_of_their_own():
    parameters = [nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = optim.SGD(parameters, lr=1e-3, stochastic_rounding=True, seed=1)
    before = [p.detach().clone() for p in parameters]
    moved = []
    for _ in range(2):
        for p in parameters:
            p.data.fill_(1.0)
            p.grad = torch.ones_like(p)
        optimizer.step()
        moved.append([p.detach() != old for p, old in zip(parameters, before, strict=True)])
    assert not torch.equal(moved[0][0], moved[0][1]) and not torch.equal(moved[0][0], moved[1][0])


@pytest.mark.parametrize("make", MAKE)
def test_resuming_goes_on_with_the_same_bits(make: str):
    def run(optimizer: Any, parameter: nn.Parameter, steps: int) -> None:
        for _ in range(steps):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    straight = nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
    first = MAKE[make]([straight], stochastic_rounding=True, seed=4)
    run(first, straight, 2)
    saved, value = copy.deepcopy(first.state_dict()), straight.detach().clone()
    pickled, pickled_value = pickle.loads(pickle.dumps((first, straight)))
    run(first, straight, 3)
    resumed = nn.Parameter(value)
    second = MAKE[make]([resumed], stochastic_rounding=True)
    second.load_state_dict(saved)
    run(second, resumed, 3)
    run(pickled, pickled_value, 3)
    assert torch.equal(resumed, straight) and torch.equal(pickled_value, straight)


@pytest.mark.parametrize("make", ["adam", "adamw", "momentum"])
def test_a_state_of_an_optimizer_that_rounds_to_nearest_loads(make: str):
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    plain = MAKE[make]([parameter])
    parameter.grad = torch.ones_like(parameter)
    plain.step()
    rounding = MAKE[make]([parameter], stochastic_rounding=True)
    rounding.load_state_dict(plain.state_dict())
    rounding.step()
    plain.load_state_dict(rounding.state_dict())
    plain.step()


@pytest.mark.parametrize("make", MAKE)
def test_a_skipped_step_moves_nothing(make: str):
    parameter = nn.Parameter(torch.randn(64).bfloat16())
    optimizer = MAKE[make]([parameter], stochastic_rounding=True)
    scaler = fxprec.LossScaler("cpu", init_scale=2.0)
    scaler.scale((parameter * float("inf")).sum()).backward()
    before, random = parameter.detach().clone(), torch.get_rng_state()
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    scaler.step(optimizer)
    scaler.update()
    after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert scaler.step_was_skipped and torch.equal(parameter, before) and groups == after
    assert torch.equal(torch.get_rng_state(), random)


def test_a_model_at_o3_with_all_options():
    torch.manual_seed(0)
    model, scaler = fxprec.convert(
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)), level="O3", dtype=torch.bfloat16
    )
    optimizer = optim.AdamW(
        model.parameters(), stochastic_rounding=True, state_dtype=torch.bfloat16, max_norm=1.0, amsgrad=True
    )
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 8)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not any(map(torch.equal, model.parameters(), before))
    assert all(p.dtype is torch.bfloat16 and p.isfinite().all() for p in model.parameters())


def test_of_mixed_parameters_fp32_ones_are_updated_as_ever():
    low, wide, other = (nn.Parameter(torch.ones(512, dtype=d)) for d in (torch.bfloat16, torch.float32, torch.float32))
    optimizer = optim.AdamW([low, wide], lr=1e-5, stochastic_rounding=True)
    plain = optim.AdamW([other], lr=1e-5)
    for p in (low, wide, other):
        p.grad = torch.ones_like(p)
    optimizer.step()
    plain.step()
    assert torch.equal(wide, other) and len(low.unique()) == 2


@pytest.mark.parametrize("make", MAKE)
def test_fp32_parameters_are_refused(make: str):
    with pytest.raises(ValueError, match=r"all of these are torch\.float32: convert the model at level O3 before"):
        MAKE[make]([nn.Parameter(torch.ones(2))], stochastic_rounding=True)


def test_a_seed_for_no_rounding_is_refused():
    for make in (optim.SGD, optim.Adam):
        with pytest.raises(ValueError, match="seed is that of the rounding of"):
            make([nn.Parameter(torch.ones(2).bfloat16())], seed=1)
        with pytest.raises(ValueError, match="seed must be in 0 to"):
            make([nn.Parameter(torch.ones(2).bfloat16())], seed=-1, stochastic_rounding=True)
        with pytest.raises(ValueError, match="in a parameter group"):
            make([{"params": [nn.Parameter(torch.ones(2))], "stochastic_rounding": True}])


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 3, sparse=True).bfloat16()
    optimizer = optim.SGD(table.parameters(), lr=0.1, stochastic_rounding=True)
    table(torch.tensor([1])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(table.weight, before)


def test_strided_parameters_of_other_layouts():
    parameter = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16).t())
    optimizer = optim.SGD([parameter], lr=1e-3, stochastic_rounding=True, seed=1)
    parameter.grad = torch.ones(64, 64, dtype=torch.bfloat16)
    optimizer.step()
    assert parameter.stride() == (1, 64) and len(parameter.unique()) == 2


# -- in Triton's interpreter, where our kernels would serve ------------------------------------------------------------


def test_where_our_kernels_would_serve() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
@pytest.mark.parametrize("make", MAKE)
def test_torchs_kernels_update_low_parameters_and_say_so(make: str, device: str) -> None:
    low = nn.Parameter(torch.ones(512, dtype=torch.bfloat16, device=device))
    wide = nn.Parameter(torch.ones(512, device=device))
    optimizer = MAKE[make]([low, wide], stochastic_rounding=True)
    for p in (low, wide):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert len(low.unique()) == 2 and len(wide.unique()) == 1
    assert optimizer.implementations() == {
        "torch (parameters are rounded stochastically)": 1,
        "Triton, one pass": 1,
    }
