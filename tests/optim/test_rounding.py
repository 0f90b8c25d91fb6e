"""Adam with moments in bfloat16, rounded stochastically."""

import copy

import pytest
import torch
from torch import nn

import fxprec
from fxprec import optim


def problem(**options):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 33))
    return weight, optim.AdamW([weight], lr=1e-2, **options)


def step(weight, optimizer, seed, scale=1.0):
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * 0.1 * scale
    optimizer.step()


def test_moments_are_bfloat16_and_on_average_the_exact_ones():
    weight, optimizer = problem(state_dtype=torch.bfloat16, seed=1)
    exact_weight, exact = problem()
    for seed in range(200):
        step(weight, optimizer, seed)
        step(exact_weight, exact, seed)
    for name in ("exp_avg", "exp_avg_sq"):
        ours, theirs = optimizer.state[weight][name], exact.state[exact_weight][name]
        assert ours.dtype is torch.bfloat16
        nearest = theirs.to(torch.bfloat16).float() - theirs
        bias = (ours.float() - theirs).mean() / theirs.abs().mean()
        assert abs(bias) < 4e-3, (name, bias)
        assert (ours.float() - theirs).abs().mean() < 40 * nearest.abs().mean()
    drift = (weight - exact_weight).abs().mean()
    assert 0 < drift < 0.02 * (exact_weight - problem()[0]).abs().mean()


def test_small_changes_are_not_lost():
    weight, optimizer = problem(state_dtype=torch.bfloat16, seed=0, betas=(0.9, 0.9999))
    weight.grad = torch.ones_like(weight)
    for _ in range(400):
        optimizer.step()
    expected = 1 - 0.9999**400  # rounded to nearest it would stop at about half of it
    assert optimizer.state[weight]["exp_avg_sq"].float().mean().item() == pytest.approx(expected, rel=0.02)


def test_the_seed_and_the_step_decide_so_a_resumed_run_is_bit_for_bit_the_same():
    weight, optimizer = problem(state_dtype=torch.bfloat16)
    for seed in range(3):
        step(weight, optimizer, seed)
    saved, kept = copy.deepcopy(optimizer.state_dict()), weight.detach().clone()
    torch.randn(7)  # other uses of the generator do not matter
    for seed in range(3, 6):
        step(weight, optimizer, seed)
    other, resumed = problem(state_dtype=torch.bfloat16)
    other.data.copy_(kept)
    resumed.load_state_dict(saved)
    for seed in range(3, 6):
        step(other, resumed, seed)
    assert torch.equal(weight, other)
    for name, value in optimizer.state[weight].items():
        assert torch.equal(value, resumed.state[other][name])


def test_tensors_and_moments_have_random_bits_of_their_own():
    weights = [nn.Parameter(torch.ones(512)) for _ in range(2)]
    optimizer = optim.Adam([{"params": [weights[0]]}, {"params": [weights[1]]}], state_dtype=torch.bfloat16, seed=3)
    for weight in weights:
        weight.grad = torch.full((512,), 1 / 3)
    optimizer.step()
    first, second = (optimizer.state[weight]["exp_avg"] for weight in weights)
    assert not torch.equal(first, second)
    assert first.unique().numel() == 2


def test_a_skipped_step_leaves_them_and_the_random_state():
    weight, optimizer = problem(state_dtype=torch.bfloat16)
    step(weight, optimizer, 0)
    before, random = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    scaler = fxprec.LossScaler("cpu", 2.0)
    scaler.scale(weight.sum()).backward()
    weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    after = optimizer.state_dict()
    assert all(torch.equal(value, after["state"][0][name]) for name, value in before["state"][0].items())
    assert before["param_groups"] == after["param_groups"]
    assert torch.equal(random, torch.get_rng_state())


def test_states_travel_to_and_from_torchs_adamw():
    weight, optimizer = problem(state_dtype=torch.bfloat16)
    step(weight, optimizer, 0)
    plain = torch.optim.AdamW([weight], lr=1e-2, fused=True)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert plain.state[weight]["exp_avg"].dtype is torch.float32
    assert torch.equal(plain.state[weight]["exp_avg"].bfloat16(), optimizer.state[weight]["exp_avg"])
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert optimizer.state[weight]["exp_avg"].dtype is torch.bfloat16
    assert optimizer.state[weight]["step"].dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state_dtype": torch.float16}, "state_dtype must be"),
        ({"state_dtype": torch.bfloat16, "seed": -1}, "seed must be"),
        ({"seed": 3}, "state_dtype"),
    ],
)
def test_other_dtypes_and_seeds_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        problem(**options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_small_updates_survive_for_parameters_of_any_dtype(dtype):
    one = nn.Parameter(torch.ones(2000, dtype=dtype))
    optimizer = optim.AdamW([one], lr=1e-2, state_dtype=torch.bfloat16, seed=0)
    exact = 0.0
    for step in range(200):
        one.grad = torch.full_like(one, 0.5 if step < 3 else 0.03125)
        exact = 0.999 * exact + 0.001 * float(one.grad[0]) ** 2
        optimizer.step()
    assert optimizer.state[one]["exp_avg_sq"].dtype is torch.bfloat16
    assert optimizer.state[one]["exp_avg_sq"].float().mean().item() == pytest.approx(exact, rel=2e-2)
    assert one.dtype is dtype and (one < 0.99).all()
