"""``scale_loss`` as apex's: which steps are skipped, how scales move, what is in the gradients, what is saved."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec import amp
from fxprec.amp._amp_state import AmpState, state

INF = float("inf")


@pytest.fixture(autouse=True)
def _fresh_state():
    before = dict(vars(state))
    vars(state).update(vars(AmpState()))
    yield
    vars(state).update(before)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


def started(models=None, optimizers=None, **options):
    """A model and its optimizer, initialized and silent."""
    models = Net() if models is None else models
    optimizers = torch.optim.SGD(models.parameters(), lr=0.1, momentum=0.9) if optimizers is None else optimizers
    return amp.initialize(models, optimizers, **{"verbosity": 0, **options})


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(5, 4, generator=generator)).square().mean()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(map(torch.equal, a, b))


def backward(model, optimizer, overflow=False, seed=0, **options):
    with amp.scale_loss(loss_of(model, seed), optimizer, **options) as scaled:
        scaled.backward()
        if overflow:
            next(model.parameters()).grad.view(-1)[1] = INF


def test_before_initialize_it_is_refused():
    with pytest.raises(RuntimeError, match="amp has not been initialized"), amp.scale_loss(torch.ones(()), []):
        pass
    with pytest.raises(RuntimeError, match="amp has not been initialized"):
        amp.state_dict()
    with pytest.raises(RuntimeError, match="amp has not been initialized"):
        amp.load_state_dict({})


def test_a_disabled_amp_hands_the_loss_through():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = optimizer.step
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert optimizer.step == step and type(model) is Net
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_training_equals_training_without_a_scale_bit_for_bit(opt_level):
    model = Net()
    reference, _ = fxprec.convert(copy.deepcopy(model), level=opt_level)
    model, optimizer = started(model, opt_level=opt_level)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        optimizer.zero_grad()
        backward(model, optimizer, seed=seed)
        optimizer.step()
        plain.zero_grad()
        loss_of(reference, seed).backward()
        plain.step()
    assert same(values(model), values(reference))


def test_the_loss_is_scaled_in_fp32():
    _, optimizer = started(cast_model_type=torch.float16, loss_scale=2.0**16)
    with amp.scale_loss(torch.tensor(3.0, dtype=torch.float16), optimizer) as scaled:
        assert scaled.dtype is torch.float32 and scaled.item() == 3 * 65536


def test_an_overflow_skips_one_step_and_says_so(capsys):
    model, optimizer = started(verbosity=1)
    capsys.readouterr()
    before = values(model)
    backward(model, optimizer, overflow=True)
    assert optimizer.step() is None
    assert same(values(model), before) and not optimizer.state
    said = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    assert capsys.readouterr().out == said
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert not same(values(model), before)
    assert capsys.readouterr().out == ""
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 1}}


def test_verbosity_0_skips_silently(capsys):
    model, optimizer = started()
    backward(model, optimizer, overflow=True)
    optimizer.step()
    assert capsys.readouterr().out == ""


def test_a_static_scale_never_skips():
    model, optimizer = started(loss_scale="128.0")
    backward(model, optimizer, overflow=True)
    optimizer.step()
    assert any(parameter.isinf().any() for parameter in values(model))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


def test_a_static_scale_of_1_is_no_scale():
    model, optimizer = started(opt_level="O0")
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert torch.equal(scaled, loss)
        scaled.backward()
    with amp.scale_loss(loss.bfloat16(), optimizer) as scaled:
        assert scaled.dtype is torch.float32
    kept = next(model.parameters()).grad
    with amp.scale_loss(loss_of(model), optimizer):
        assert next(model.parameters()).grad is kept


def test_float16_overflows_by_itself_until_the_scale_fits():
    model, optimizer = started(cast_model_type=torch.float16, opt_level="O2", max_loss_scale=2.0**30)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**24, "unskipped": 5}})
    before, skipped = values(model), 0
    while same(values(model), before):
        optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step()
        skipped += 1
        assert skipped < 30
    assert skipped > 1
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0 ** (25 - skipped), "unskipped": 1}
    assert all(parameter.isfinite().all() for parameter in values(model))


def owned_by(optimizers, numbers):
    return [p for i in numbers for group in optimizers[i].param_groups for p in group["params"]]


def reference_run(model, optimizers, losses, owners, injected, iterations):
    """apex's bookkeeping in plain Python, on unscaled gradients: (scales, skipped steps)."""
    scales, skipped = [2.0**16] * len(losses), []
    for iteration in range(iterations):
        for optimizer in optimizers:
            optimizer.zero_grad()
        skip = set()
        for number, loss in enumerate(losses):
            kept = [p.grad for p in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = None
            loss(model, iteration).backward(inputs=owned_by(optimizers, owners[number]))
            if (iteration, number) == injected[:2]:
                skip |= set(owners[number])
                scales[number] /= 2
            for parameter, old in zip(model.parameters(), kept, strict=True):
                if old is not None:
                    parameter.grad = old if parameter.grad is None else old + parameter.grad
        for number, optimizer in enumerate(optimizers):
            if number in skip:
                skipped.append((iteration, number))
            else:
                optimizer.step()
    return scales, skipped


def three_losses():
    return [
        lambda model, seed: loss_of(model, 3 * seed),
        lambda model, seed: model(torch.full((2, 4), 0.1 * (seed + 1))).abs().sum(),
        lambda model, seed: loss_of(model, 3 * seed + 2) * 5,
    ]


def two_optimizers(model):
    return [
        torch.optim.SGD(model.up.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(model.down.parameters(), lr=0.01),
    ]


@pytest.mark.parametrize(
    "iteration, at, bad",
    [(*at, bad) for at in itertools.product((0, 2), ((0, 0), (0, 1), (1, 0), (2, 1))) for bad in (INF, float("nan"))],
)
def test_an_injected_overflow_skips_the_right_steps_only(iteration, at, bad):
    """Loss 0 belongs to both optimizers, loss 1 to the first, loss 2 to the second."""
    owners = [(0, 1), (0,), (1,)]
    number, where = at
    original = Net()
    reference, _ = fxprec.convert(copy.deepcopy(original))
    plain = two_optimizers(reference)
    expected = reference_run(reference, plain, three_losses(), owners, (iteration, number), 4)

    model, optimizers = amp.initialize(original, two_optimizers(original), num_losses=3, verbosity=0)
    victim = (original.up, original.down)[where].bias
    skipped = []
    for now in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for n, loss in enumerate(three_losses()):
            with amp.scale_loss(loss(model, now), [optimizers[i] for i in owners[n]], loss_id=n) as scaled:
                scaled.backward(inputs=owned_by(optimizers, owners[n]))
                if (now, n) == (iteration, number):
                    victim.grad[-1] = bad
        for i, optimizer in enumerate(optimizers):
            before = values(model)
            optimizer.step()
            if same(values(model), before):
                skipped.append((now, i))
    assert same(values(model), values(reference))
    assert skipped == expected[1] == [(iteration, i) for i in owners[number]]
    assert [amp.state_dict()[f"loss_scaler{n}"]["loss_scale"] for n in range(3)] == expected[0]


def test_several_losses_accumulate_and_masters_equal_a_reference_bit_for_bit():
    original = Net()
    reference, _ = fxprec.convert(copy.deepcopy(original))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference_run(reference, [plain], three_losses(), [(0,)] * 3, (1, 2), 3)
    model, optimizer = amp.initialize(original, torch.optim.SGD(original.parameters(), lr=0.1), num_losses=3)
    for now in range(3):
        optimizer.zero_grad()
        for n, loss in enumerate(three_losses()):
            with amp.scale_loss(loss(model, now), optimizer, loss_id=n) as scaled:
                scaled.backward()
                if (now, n) == (1, 2):
                    model.down.weight.grad[0, 0] = INF
        optimizer.step()
    assert same(values(model), values(reference))


def test_the_losses_of_one_scale_are_added_too():
    model, optimizer = started()
    reference, _ = fxprec.convert(copy.deepcopy(fxprec.revert(copy.deepcopy(model))))
    for seed in range(3):
        backward(model, optimizer, seed=seed)
        loss_of(reference, seed).backward()
    for parameter, plain in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, plain.grad)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 3


def test_delayed_unscaling_accumulates_scaled_gradients():
    model, optimizer = started()
    reference, _ = fxprec.convert(copy.deepcopy(fxprec.revert(copy.deepcopy(model))))
    for seed in range(3):
        backward(model, optimizer, seed=seed, delay_unscale=seed < 2)
        loss_of(reference, seed).backward()
        if seed < 2:
            assert amp.state_dict()["loss_scaler0"]["unskipped"] == 0
    for parameter, plain in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, plain.grad)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


def test_an_overflow_in_a_delayed_part_skips_the_step_in_the_end():
    model, optimizer = started()
    before = values(model)
    backward(model, optimizer, overflow=True, delay_unscale=True)
    backward(model, optimizer)
    optimizer.step()
    assert same(values(model), before)


def test_a_delayed_overflow_check_is_made_by_the_next_scale_loss():
    model, optimizer = started()
    backward(model, optimizer, overflow=True, delay_overflow_check=True)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}
    before = values(model)
    backward(model, optimizer)
    optimizer.step()
    assert same(values(model), before)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32768.0


def test_scaled_gradients_are_neither_stepped_with_nor_mixed():
    model, optimizer = started(num_losses=2)
    backward(model, optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match=r"SGD\.step: the gradients of loss 0 are still scaled"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="gradients of loss 0 are there, still scaled"):
        backward(model, optimizer, loss_id=1)
    optimizer.zero_grad()  # given up: the next iteration starts anew
    backward(model, optimizer)
    optimizer.step()


def test_an_exception_in_the_block_leaves_the_gradients_of_before():
    model, optimizer = started()
    backward(model, optimizer)
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(KeyError), amp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        scaled.backward()
        raise KeyError
    assert same([p.grad for p in model.parameters()], before)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


def test_a_discriminator_and_a_generator_as_in_the_apex_example():
    """The generator's loss leaves gradients in the discriminator; its own optimizer zeroes them."""
    nets = [nn.Linear(4, 4), nn.Linear(4, 1)]
    plain = [fxprec.convert(copy.deepcopy(net))[0] for net in nets]
    nets, optimizers = amp.initialize(nets, [torch.optim.Adam(n.parameters()) for n in nets], num_losses=3, verbosity=0)
    references = [torch.optim.Adam(net.parameters()) for net in plain]
    noise = torch.randn(6, 4)

    def iterate(generator, discriminator, optimizer_g, optimizer_d, run):
        optimizer_d.zero_grad()
        run(discriminator(noise).square().mean(), optimizer_d, 0)
        fake = generator(noise)
        run(discriminator(fake.detach()).abs().mean(), optimizer_d, 1)
        optimizer_d.step()
        optimizer_g.zero_grad()
        run(discriminator(fake).sum(), optimizer_g, 2)
        optimizer_g.step()

    def scaled_backward(loss, optimizer, loss_id):
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            scaled.backward()

    for _ in range(3):
        iterate(*nets, *optimizers, scaled_backward)
        iterate(*plain, *references, lambda loss, *_: loss.backward())
    for net, reference in zip(nets, plain, strict=True):
        assert same(values(net), values(reference))


@pytest.mark.parametrize("before", [True, False])
def test_lr_schedulers_made_before_or_after_see_every_step(before):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if before else None
    model, optimizer = started(model, optimizer)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for overflow in (True, False):
            before_step = values(model)
            optimizer.zero_grad()
            backward(model, optimizer, overflow=overflow)
            optimizer.step()
            scheduler.step()
            assert same(values(model), before_step) == overflow
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_parameters_added_later_are_scaled_and_unscaled_too():
    model = Net()
    model, optimizer = started(model, torch.optim.SGD(model.up.parameters(), lr=0.1))
    optimizer.add_param_group({"params": model.down.parameters(), "lr": 0.2})
    reference, _ = fxprec.convert(copy.deepcopy(fxprec.revert(copy.deepcopy(model))))
    loss_of(reference).backward()
    backward(model, optimizer)
    assert torch.equal(model.down.weight.grad, reference.down.weight.grad)
    assert {id(p) for p in amp.master_params(optimizer)} == {id(p) for p in model.parameters()}


def test_masters_can_be_clipped():
    model, optimizer = started()
    backward(model, optimizer)
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
    assert norm > 1e-3
    after = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert after.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("options", [{"opt_level": "O2"}, {"opt_level": "O1"}, {"opt_level": "O2", "loss_scale": 1.0}])
def test_closures_are_refused(options):
    model, optimizer = started(**options)
    with pytest.raises(RuntimeError, match="does not support closure use"):
        optimizer.step(lambda: loss_of(model))
    optimizer.step(None)
    optimizer.step(closure=None)


def test_closures_work_where_no_step_is_ever_skipped():
    model, optimizer = started(opt_level="O0")
    before = values(model)

    def closure():
        optimizer.zero_grad()
        backward(model, optimizer)
        return loss_of(model)

    assert optimizer.step(closure).item() > loss_of(model).item()
    assert not same(values(model), before)


@pytest.mark.parametrize("loss_id", [2, -1])
def test_an_unknown_loss_is_an_index_error(loss_id):
    model, optimizer = started(num_losses=2)
    with pytest.raises(IndexError, match=f"loss_id={loss_id}: amp.initialize was called with num_losses=2"):
        backward(model, optimizer, loss_id=loss_id)


def test_a_step_within_the_block_would_take_scaled_gradients_and_is_refused():
    model, optimizer = started()
    before = values(model)
    with (
        pytest.raises(RuntimeError, match=r"SGD\.step within amp\.scale_loss.*Step after the block"),
        amp.scale_loss(loss_of(model), optimizer) as scaled,
    ):
        scaled.backward()
        optimizer.step()
    assert same(values(model), before)
    backward(model, optimizer)
    optimizer.step()
    assert not same(values(model), before)


def test_an_optimizer_from_elsewhere_is_refused():
    model, _ = started()
    with pytest.raises(RuntimeError, match=r"this Adam did not go through amp\.initialize"):
        backward(model, torch.optim.Adam(model.parameters()))


def test_the_state_has_the_keys_of_apex_and_goes_into_a_destination():
    model, optimizer = started(num_losses=2)
    backward(model, optimizer, loss_id=1, overflow=True)
    destination = {"epoch": 3}
    assert amp.state_dict(destination) is destination
    assert destination == {
        "epoch": 3,
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 32768.0, "unskipped": 0},
    }


def test_training_resumes_bit_for_bit_across_a_growth_of_the_scale():
    model, optimizer = started()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 1997}})
    backward(model, optimizer)
    optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    scales = []

    def go_on(model, optimizer):
        for seed in range(4):
            optimizer.zero_grad()
            backward(model, optimizer, seed=seed, overflow=seed == 2)
            optimizer.step()
            scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
        return values(model), amp.state_dict()

    expected = go_on(model, optimizer)
    again, optimizer = started(Net())
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    resumed = go_on(again, optimizer)
    assert same(resumed[0], expected[0]) and resumed[1] == expected[1]
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0] * 2


@pytest.mark.parametrize(
    "bad, error, words",
    [
        ({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}, "scale": 1}, RuntimeError, 'Unexpected key.*"scale"'),
        ({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}, "loss_scaler1": {}}, RuntimeError, "loss_scaler1"),
        ({"loss_scaler0": {"loss_scale": float("nan"), "unskipped": 1}}, ValueError, "finite"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(bad, error, words):
    started(num_losses=2)
    before = amp.state_dict()
    with pytest.raises(error, match=words):
        amp.load_state_dict(bad)
    assert amp.state_dict() == before


def test_another_number_of_losses_loads_as_far_as_it_goes_and_says_so(capsys):
    started(num_losses=2)
    entry = {"loss_scale": 8.0, "unskipped": 1}
    amp.load_state_dict({"loss_scaler1": entry})
    assert "Warning: state_dict contains 1 entries, while 2 loss_scalers are used" in capsys.readouterr().out
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, "loss_scaler1": entry}
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(3)})
    assert "Skipping loss_scaler[2], since num_losses was set to 2" in capsys.readouterr().out
    assert [entry["unskipped"] for entry in amp.state_dict().values()] == [0, 1]


def test_scripts_that_look_at_the_scalers_find_them():
    started(num_losses=2)
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [65536.0, 65536.0]
    assert amp._amp_state.opt_properties.loss_scale == "dynamic"
