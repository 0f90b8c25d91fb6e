"""Gradients in the low dtype: who has them, what they cost, where they are refused."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fxprec
from fxprec import optim
from fxprec.shadows.low_gradients import cast_with_low_gradient
from fxprec.testing import count_casts

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="wants Tensor.grad_dtype")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def batch(seed=0):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))


def dtypes(model):
    return [None if p.grad is None else p.grad.dtype for p in model.parameters()]


LOW, WIDE = torch.bfloat16, torch.float32


def test_weights_that_a_graph_lowers_get_low_gradients_without_a_cast():
    counts = {}
    for low in (False, True):
        model, _ = fxprec.convert(net())
        optim.AdamW(model.parameters(), low_gradients=low)
        model(batch()).sum().backward()
        model.zero_grad()
        with count_casts() as casts:
            model(batch()).sum().backward()
        counts[low] = casts.weight_gradients
        lowered = LOW if low else WIDE
        assert dtypes(model) == [lowered, lowered, WIDE, WIDE, lowered, lowered]
    assert counts == {False: 4, True: 0}  # two weights, two biases


def test_they_are_the_wide_gradients_rounded():
    low, wide = fxprec.convert(net())[0], fxprec.convert(net())[0]
    optim.AdamW(low.parameters(), low_gradients=True)
    for model in (low, wide):
        model(batch()).square().sum().backward()
    for ours, theirs in zip(low.parameters(), wide.parameters(), strict=True):
        assert torch.equal(ours.grad.to(LOW), theirs.grad.to(LOW))


class Regularized(nn.Module):
    """One weight, read as it is and in the low dtype."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.linear(x).float().square().sum() * self.scale + self.linear.weight.float().square().sum()


def test_a_weight_keeps_its_one_accumulator_hooks_and_place_among_inputs():
    low, wide = fxprec.convert(Regularized())[0], fxprec.convert(Regularized())[0]
    optim.AdamW(low.parameters(), low_gradients=True)
    calls = []
    low.linear.weight.register_post_accumulate_grad_hook(lambda weight: calls.append(weight.grad.dtype))
    for step in (1, 2):
        gradients = [torch.autograd.grad(model(batch()), [*model.parameters()]) for model in (low, wide)]
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item())
        low.zero_grad()
        low(batch()).backward(inputs=[*low.parameters()])
        assert dtypes(low) == [WIDE, LOW, LOW]
        assert calls == [LOW] * step


def test_the_edge_hands_on_gradients_of_any_shape():
    for weight in (nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(2, 3, 4, 5))):
        shadow = cast_with_low_gradient(weight, LOW)
        (shadow * 3).sum().backward()
        assert shadow.shape == weight.shape and weight.dtype is WIDE
        assert weight.grad.dtype is LOW and (weight.grad == 3).all()


def test_an_optimizer_made_after_the_first_forward_changes_the_next_one():
    model, _ = fxprec.convert(net())
    model(batch()).sum().backward()
    model.zero_grad()
    optimizer = optim.AdamW([model[0].weight], low_gradients=True)
    optimizer.add_param_group({"params": [model[3].weight]})
    model(batch()).sum().backward()
    assert dtypes(model) == [LOW, WIDE, WIDE, WIDE, LOW, WIDE]


def test_training_with_them_follows_training_with_wide_ones():
    losses = []
    for low in (False, True):
        model, scaler = fxprec.convert(net())
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, low_gradients=low, max_norm=1.0)
        run = []
        for step in range(10):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            run.append(loss.item())
        losses.append(run)
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0][-1] < 0.8 * losses[0][0]


def test_float16_ones_need_no_unscale_in_place():
    model, _ = fxprec.convert(net(), dtype=torch.float16, scaler=1024.0)
    scaler = fxprec.LossScaler("cpu", 1024.0)
    optimizer = optim.SGD(model.parameters(), lr=0.1, low_gradients=True)
    before = [p.detach().clone() for p in model.parameters()]
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(batch()).square().mean() * (1e9 if bad else 1)).backward()
        assert model[0].weight.grad.dtype is torch.float16
        scaler.step(optimizer)
        assert scaler.step_was_skipped is bad
        scaler.update()
        moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert not any(moved) if bad else all(moved)


def test_unscaling_float16_ones_by_hand_says_who_does_it():
    model, scaler = fxprec.convert(net(), dtype=torch.float16, scaler=fxprec.LossScaler("cpu", 1024.0))
    optimizer = optim.SGD(model.parameters(), lr=0.1, low_gradients=True)
    scaler.scale(model(batch()).square().mean()).backward()
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients.*0\.weight.*max_norm"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)  # nothing has changed
    assert not scaler.step_was_skipped


def test_double_backward_goes_through():
    low, wide = fxprec.convert(net())[0], fxprec.convert(net())[0]
    optim.AdamW(low.parameters(), low_gradients=True)
    for model in (low, wide):
        x = batch().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().mean().backward()
    for ours, theirs in zip(low.parameters(), wide.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=2e-2, atol=1e-2 * theirs.grad.abs().max())


def test_accumulation_makes_them_wide_with_a_warning_unless_asked():
    model, _ = fxprec.convert(net())
    optim.AdamW(model.parameters(), low_gradients=True)
    model(batch()).sum().backward()
    kept = model[0].weight.grad.float()
    with pytest.warns(UserWarning, match="FP32 from now on"), fxprec.accumulate(model):
        assert torch.equal(model[0].weight.grad, kept)  # and not lost
        model(batch(1)).sum().backward()
    assert dtypes(model) == [WIDE] * 6
    asked, _ = fxprec.convert(net())
    optim.AdamW(asked.parameters(), low_gradients="accumulate")
    with fxprec.accumulate(asked):
        asked(batch()).sum().backward()
    assert dtypes(asked) == [LOW, LOW, WIDE, WIDE, LOW, LOW]


def test_a_copy_has_wide_gradients():
    model, _ = fxprec.convert(net())
    optim.AdamW(model.parameters(), low_gradients=True)
    model(batch()).sum().backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    other(batch()).sum().backward()
    assert dtypes(other) == [WIDE] * 6


@pytest.mark.parametrize("argument", ["yes", 1.5, 2])
def test_other_arguments_are_refused(argument):
    with pytest.raises(ValueError, match="low_gradients must be"):
        optim.SGD(net().parameters(), lr=0.1, low_gradients=argument)


def test_gradients_that_are_there_already_are_rounded():
    model, _ = fxprec.convert(net())
    model(batch()).sum().backward()
    before = model[0].weight.grad.clone()
    optim.AdamW(model.parameters(), low_gradients=True)
    model(batch())
    assert dtypes(model) == [LOW, LOW, WIDE, WIDE, LOW, LOW]
    assert torch.equal(model[0].weight.grad, before.to(LOW))


def test_revert_gives_wide_gradients_back_and_convert_low_ones():
    model, _ = fxprec.convert(net())
    optimizer = optim.AdamW(model.parameters(), low_gradients=True)
    model(batch()).sum().backward()
    kept = model[0].weight.grad.float()
    fxprec.revert(model)
    assert torch.equal(model[0].weight.grad, kept)
    model.zero_grad()
    model(batch()).sum().backward()
    assert dtypes(model) == [WIDE] * 6
    fxprec.convert(model, dtype=torch.float16, scaler=False)
    model(batch()).sum().backward()
    optimizer.step()
    assert dtypes(model) == [torch.float16, torch.float16, WIDE, WIDE, torch.float16, torch.float16]


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_that_cannot_read_them_turns_them_off_with_a_warning(fused):
    model, other = fxprec.convert(net())[0], fxprec.convert(net())[0]
    optim.AdamW(model.parameters(), low_gradients="accumulate")
    steps = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused) for m in (model, other)]
    for m in (model, other):
        m(batch()).sum().backward()
    for parameter, wide in zip(model.parameters(), other.parameters(), strict=True):
        wide.grad = parameter.grad.float()
    with pytest.warns(UserWarning, match="AdamW steps on 4 parameters.*FP32 from now on"):
        steps[0].step()
    steps[1].step()
    for m in (model, other):
        m.zero_grad()
        m(batch()).sum().backward()
    assert dtypes(model) == [WIDE] * 6
    for parameter, wide in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, wide) and torch.equal(parameter.grad, wide.grad)


def test_the_last_optimizer_decides():
    model, _ = fxprec.convert(net())
    for low, expected in ((True, LOW), (False, WIDE), ("accumulate", LOW)):
        optim.SGD(model.parameters(), lr=0.1, low_gradients=low)
        model(batch()).sum().backward()
        assert model[0].weight.grad.dtype is expected


def test_a_pickled_model_has_wide_gradients_and_with_its_optimizer_low_ones():
    model, _ = fxprec.convert(net())
    optimizer = optim.AdamW(model.parameters(), low_gradients=True)
    model(batch()).sum().backward()
    optimizer.step()
    alone = pickle.loads(pickle.dumps(model))
    both = pickle.loads(pickle.dumps((model, optimizer)))[0], copy.deepcopy((model, optimizer))[0]
    for other, expected in ((alone, WIDE), (both[0], LOW), (both[1], LOW)):
        other.zero_grad()
        other(batch()).sum().backward()
        assert other[0].weight.grad.dtype is expected


def test_a_model_in_float64_has_float64_gradients():
    model, _ = fxprec.convert(net())
    optim.AdamW(model.parameters(), low_gradients=True)
    model(batch()).sum().backward()
    model.zero_grad()
    model.double()
    model(batch().double()).sum().backward()
    assert dtypes(model) == [torch.float64] * 6
