"""What torch documents of its GradScaler (docstrings, amp.html, notes/amp_examples), of both scalers side by side."""

import copy
import pickle
import threading
from collections import namedtuple

import pytest
import torch
from torch import nn

from fxprec.scaling.loss_scaler import LossScaler

BOTH = pytest.mark.parametrize("cls", [torch.amp.GradScaler, LossScaler])


def model_and_optimizer(optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, optimizer(model.parameters(), **{"lr": 0.1, **options})


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator) * 10**i) for i in range(count)
    ]


def same(a, b):
    """Equal bit for bit: parameters, or tensors in nested states."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def side_by_side(loop, *arguments, **options):
    """Run a training loop with each scaler; both must leave the same weights, optimizer states and scaler states."""
    ends = []
    for cls in (torch.amp.GradScaler, LossScaler):
        scaler = cls("cpu", init_scale=2.0**8, growth_interval=2, **options)
        result = loop(scaler, *arguments)
        state = scaler.state_dict()
        state.pop("fxprec", None)
        ends.append([[owner.state_dict() for owner in result], state])
    assert same(*ends)


OPTIMIZERS = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    (torch.optim.Adagrad, {"fused": True}),
]


@pytest.mark.parametrize("cls, options", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_typical_training_and_clipping(cls, options, clip):
    def loop(scaler):
        model, optimizer = model_and_optimizer(cls, **options)
        for i, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            if i == 3:  # not at first: torch's fused optimizers make state in a first step that they skip
                model[0].weight.grad[0, 0] = float("inf")
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        return model, optimizer

    side_by_side(loop)


def test_accumulation_unscales_once_after_all_micro_batches():
    def loop(scaler):
        model, optimizer = model_and_optimizer(momentum=0.9)
        for i, (x, y) in enumerate(batches()):
            scaler.scale(nn.functional.mse_loss(model(x), y) / 2).backward()
            if i % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return model, optimizer

    side_by_side(loop)


def test_gradient_penalty_by_double_backward():
    def loop(scaler):
        model, optimizer = model_and_optimizer()
        for x, y in batches(3):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            scaled = torch.autograd.grad(scaler.scale(loss), [*model.parameters()], create_graph=True)
            gradients = [gradient * (1.0 / scaler.get_scale()) for gradient in scaled]
            penalty = sum(gradient.pow(2).sum() for gradient in gradients).sqrt()
            scaler.scale(loss + penalty).backward()
            scaler.step(optimizer)
            scaler.update()
        return model, optimizer

    side_by_side(loop)


@pytest.mark.parametrize("poisoned", [None, 0, 1, "both"])
def test_several_models_losses_and_optimizers(poisoned):
    def loop(scaler):
        models, optimizers = zip(*(model_and_optimizer(lr=rate) for rate in (0.1, 0.2)), strict=True)
        for i, (x, y) in enumerate(batches(4)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            outputs = [model(x) for model in models]
            losses = [(2 * outputs[0] + 3 * outputs[1] - y).pow(2).mean(), (3 * outputs[0] - 5 * outputs[1]).sum()]
            scaler.scale(losses[0]).backward(retain_graph=True)
            scaler.scale(losses[1]).backward()
            for j in (0, 1):
                if i == 1 and poisoned in (j, "both"):
                    models[j][2].bias.grad[0] = float("nan")
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return *models, *optimizers

    side_by_side(loop)


def test_several_scalers_one_a_loss_do_not_mix():
    def loop(scaler):
        other = copy.deepcopy(scaler)
        models, optimizers = zip(*(model_and_optimizer() for _ in range(2)), strict=True)
        for i, (x, y) in enumerate(batches(4)):
            for scale, model, optimizer in zip((scaler, other), models, optimizers, strict=True):
                optimizer.zero_grad()
                scale.scale(nn.functional.mse_loss(model(x), y)).backward()
                if scale is other and i == 2:
                    model[0].bias.grad.fill_(float("inf"))
                scale.step(optimizer)
                scale.update()
        assert other.get_scale() < scaler.get_scale()
        return *models, *optimizers

    side_by_side(loop)


def test_data_parallel_threads_run_the_forward():
    def loop(scaler):
        models = [model_and_optimizer()[0] for _ in range(2)]  # replicas; sums over them would depend on the threads
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
        for x, y in batches(3):
            optimizer.zero_grad()
            halves = [None, None]

            def forward(i, x=x, halves=halves):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    halves[i] = models[i](x[i::2]).float()

            threads = [threading.Thread(target=forward, args=(i,)) for i in (0, 1)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            loss = sum(nn.functional.mse_loss(half, y[i::2]) for i, half in enumerate(halves))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return *models, optimizer

    side_by_side(loop)


def test_threads_may_scale_the_first_losses_at_once():
    for _ in range(20):
        scaler = LossScaler("cpu", 4.0, num_losses=3)
        start, results = threading.Barrier(4), []

        def scale(start=start, scaler=scaler, results=results):
            start.wait()
            results.append(scaler._scaled(2, torch.ones(())).item())

        threads = [threading.Thread(target=scale) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert results == [4.0] * 4


@pytest.mark.parametrize("zero", [True, False])
def test_two_optimizers_of_one_parameter_may_take_turns(zero):
    """Each with gradients of its own: a shared encoder with two heads."""

    def loop(scaler):
        model, first = model_and_optimizer(fused=True)
        second = torch.optim.SGD(model[0].parameters(), lr=0.2)
        for x, _ in batches(3):
            for optimizer in (first, second):
                model.zero_grad(set_to_none=zero)
                scaler.scale(model(x).pow(2).sum()).backward()
                scaler.step(optimizer)
            scaler.update()
        return model, first, second

    side_by_side(loop)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients(optimizer):
    def loop(scaler):
        table = nn.Embedding(6, 2, sparse=True, _weight=torch.arange(12.0).view(6, 2))
        update = optimizer(table.parameters(), lr=0.5)
        for i in range(4):
            update.zero_grad()
            loss = table(torch.tensor([1, 1, 3, i])).pow(2).sum()
            scaler.scale(loss).backward()
            if i == 2:
                table.weight.grad._values()[1] = float("nan")
            scaler.step(update)
            scaler.update()
        return table, update

    side_by_side(loop)


def test_custom_autograd_functions_see_scaled_gradients():
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            seen.append(gradient.max().item())
            return gradient * 2

    def loop(scaler):
        model, optimizer = model_and_optimizer()
        for x, _ in batches(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = Double.apply(model(x)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return model, optimizer

    side_by_side(loop)
    assert seen == [256.0, 256.0] * 2


@BOTH
def test_scale_returns_the_container_it_was_given(cls):
    scaler = cls("cpu", init_scale=4.0)
    loss = torch.ones((), requires_grad=True)
    assert scaler.scale(loss).item() == 4
    listed, paired = scaler.scale([loss, loss * 2]), scaler.scale((loss, [loss * 3, (loss,)]))
    assert isinstance(listed, list) and [x.item() for x in listed] == [4, 8]
    assert isinstance(paired, tuple) and isinstance(paired[1], list) and isinstance(paired[1][1], tuple)
    assert paired[1][0].item() == 12
    generated = scaler.scale(loss * i for i in range(3))
    assert not isinstance(generated, (list, tuple)) and [x.item() for x in generated] == [0, 4, 8]
    assert scaler.scale([]) == []
    sum(listed).backward()
    assert loss.grad.item() == 12
    assert scaler.scale(loss.double()).dtype is torch.float64


def test_namedtuples_come_back_as_they_were_and_low_precision_in_float32():
    Outputs = namedtuple("Outputs", "loss aux")
    scaler = LossScaler("cpu")
    result = scaler.scale(Outputs(torch.ones((), dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)))
    assert isinstance(result, Outputs) and result.loss.item() == 65536
    assert result.loss.dtype is result.aux.dtype is torch.float32


@BOTH
def test_a_step_returns_what_the_optimizer_returns_and_none_when_skipped(cls):
    parameter = nn.Parameter(torch.ones(2))

    class Returns(torch.optim.SGD):
        def step(self, *args, **kwargs):
            return args, kwargs

    optimizer, scaler = Returns([parameter], lr=1.0), cls("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    assert scaler.step(optimizer, None, 5, extra=6) == ((None, 5), {"extra": 6})
    scaler.update()
    scaler.scale(parameter.sum() * float("inf")).backward()
    assert scaler.step(optimizer, extra=6) is None


@BOTH
def test_disabled_is_the_plain_loop_with_the_same_calls(cls):
    model, optimizer = model_and_optimizer()
    scaler = cls("cpu", enabled=False)
    loss = model(torch.ones(1, 3)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    expected = [p.detach() - 0.1 * p.grad for p in model.parameters()]
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)  # no stages
    scaler.step(optimizer)
    scaler.update()
    scaler.update(3.0)
    assert same([p.detach() for p in model.parameters()], expected)
    assert not scaler.is_enabled() and scaler.get_scale() == 1.0
    assert scaler.state_dict() == {} and scaler.load_state_dict({}) is None
    assert scaler.step(optimizer, lambda: 7) == 7  # a closure is the optimizer's
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


def test_what_only_ours_has_can_be_asked_of_a_disabled_scaler_too():
    model, optimizer = model_and_optimizer()
    scaler = LossScaler("cpu", enabled=False)
    with scaler.scale_loss(model(torch.ones(1, 3)).sum(), optimizer, loss_id=3) as loss:
        loss.backward()
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert norm > 1 and nn.utils.get_total_norm([p.grad for p in model.parameters()]) < 1.001
    assert (scaler.step_was_skipped, scaler.skipped_steps, scaler.overflow_parameters()) == (False, 0, [])
    assert scaler.found_inf() is False
    assert scaler.get_growth_factor() == 2.0 and scaler.get_backoff_factor() == 0.5


@BOTH
def test_accessors(cls):
    scaler = cls("cpu", 8.0, 4.0, 0.25, 7)
    assert scaler.get_scale() == 8.0 and scaler.is_enabled()
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 7)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.75)
    scaler.set_growth_interval(9)
    assert scaler.state_dict() | {"fxprec": None} == {
        "scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.75,
        "growth_interval": 9,
        "_growth_tracker": 0,
        "fxprec": None,
    }


@BOTH
@pytest.mark.parametrize("new", [16.0, "tensor"])
def test_update_sets_the_scale_in_place(cls, new):
    new = torch.tensor(16.0) if new == "tensor" else new
    model, optimizer = model_and_optimizer()
    scaler = cls("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    tensor = scaler._scale
    scaler.step(optimizer)
    scaler.update(new)
    if isinstance(new, torch.Tensor):
        new.fill_(3.0)  # the tensor itself is not kept
    assert scaler.get_scale() == 16.0 and scaler._scale is tensor


@BOTH
def test_errors_of_stages(cls):
    model, optimizer = model_and_optimizer()
    scaler = cls("cpu", init_scale=4.0)
    for call in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update):
        with pytest.raises(
            AssertionError, match=r"Attempted \w+ but _scale is None.  This may indicate your script did"
        ):
            call()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(
        RuntimeError, match=r"^unscale_\(\) has already been called on this optimizer since the last upd"
    ):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"^unscale_\(\) is being called after step\(\)\."):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"^step\(\) has already been called since the last update\(\)\."):
        scaler.step(optimizer)
    scaler.update()
    for parameter in model.parameters():
        parameter.grad = None
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported if GradScaler is enabled"):
        scaler.step(optimizer, closure=lambda: None)
    with pytest.raises(
        RuntimeError, match="The source state dict is empty, possibly because it was saved from a disabl"
    ):
        scaler.load_state_dict({})


@BOTH
def test_grad_scale_and_found_inf_reach_an_optimizer_that_scales(cls):
    class Custom(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            self.seen.append((self.grad_scale and self.grad_scale.item(), self.found_inf.item()))

    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = Custom([parameter], lr=1.0), cls("cpu", init_scale=4.0)
    optimizer.seen = []
    for factor, unscale, given in (
        (1.0, False, None),
        (float("inf"), False, None),
        (1.0, True, None),
        (1.0, False, 3.0),
    ):
        parameter.grad = None
        scaler.scale(parameter.sum() * factor).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if given is not None:
            optimizer.grad_scale = torch.tensor(given)
        scaler.step(optimizer)
        scaler.update()
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    # The product with a grad_scale of the user's; none after unscale_.
    assert optimizer.seen == [(4.0, 0.0), (4.0, 1.0), (None, 0.0), (6.0, 0.0)]


@BOTH
@pytest.mark.parametrize("where", ["class", "instance"])
def test_the_deprecated_contract_hands_the_scaler_to_step(cls, where):
    class Custom(torch.optim.SGD):
        def step(self, closure=None, *, grad_scaler=None):
            found = grad_scaler._check_inf_per_device(self)
            if not sum(flag.item() for flag in found.values()):
                self.param_groups[0]["params"][0].grad /= grad_scaler._get_scale_async()
                super().step()

    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = Custom([parameter], lr=1.0), cls("cpu", init_scale=4.0)
    (Custom if where == "class" else optimizer)._step_supports_amp_scaling = True
    for factor in (1.0, float("inf")):
        parameter.grad = None
        scaler.scale(parameter.sum() * factor).backward()
        with pytest.warns(FutureWarning, match="going to stop passing itself as a keyword"):
            scaler.step(optimizer)
        scaler.update()
    assert parameter.tolist() == [0, 0] and scaler.get_scale() == 2.0
    if cls is LossScaler:
        assert scaler.step_was_skipped and scaler.skipped_steps == 1


@BOTH
def test_pickles_between_iterations_only(cls):
    model, optimizer = model_and_optimizer()
    scaler = cls("cpu", init_scale=4.0, growth_interval=2)

    def iteration(scaler):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)

    iteration(scaler)
    with pytest.raises(
        AssertionError, match="may only be pickled at the beginning of an iteration, or at the end after"
    ):
        pickle.dumps(scaler)
    scaler.update()
    copies = [pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler), copy.copy(scaler)]
    for again in copies:
        assert type(again) is cls and again.state_dict() == scaler.state_dict()
        iteration(again)
        again.update()
        assert again.get_scale() == 8.0
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("source, target", [(torch.amp.GradScaler, LossScaler), (LossScaler, torch.amp.GradScaler)])
def test_a_file_of_one_scaler_loads_into_the_other(source, target, tmp_path):
    def iteration(scaler, model, optimizer):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    first = source("cpu", 4.0, 3.0, 0.25, 2)
    iteration(first, *model_and_optimizer())
    torch.save(first.state_dict(), tmp_path / "scaler.pt")
    for used in (False, True):
        second = target("cpu")
        if used:
            iteration(second, *model_and_optimizer())
        tensor = second._scale
        second.load_state_dict(torch.load(tmp_path / "scaler.pt", weights_only=True))
        assert second._scale is tensor  # in place
        keys = second.state_dict().keys() & first.state_dict().keys()
        assert len(keys) == (6 if target is source else 5)
        assert {key: second.state_dict()[key] for key in keys} == {key: first.state_dict()[key] for key in keys}
        iteration(second, *model_and_optimizer())
        assert second.get_scale() == 12.0  # the second good step


@BOTH
def test_dynamic_grows_after_the_interval_and_backs_off_after_an_overflow(cls):
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.0), cls("cpu", init_scale=4.0, growth_interval=2)
    scales = []
    for factor in (1.0, 1.0, 1.0, float("inf"), 1.0, float("nan"), 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4, 8, 8, 4, 4, 2, 2, 4]


def test_a_scale_that_torch_would_let_grow_to_inf_stays_finite():
    parameter = nn.Parameter(torch.full((2,), 1e-30))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.0), LossScaler("cpu", 2.0**126, growth_interval=1)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * 1e-20).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**127


def test_static_neither_grows_nor_backs_off_but_skips():
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.25), LossScaler("cpu", 8.0, growth_interval=1, dynamic=False)
    fresh = LossScaler("cpu")
    fresh.load_state_dict(scaler.state_dict())
    for each in (scaler, fresh, copy.deepcopy(scaler)):
        before = parameter.item()
        for factor in (1.0, float("inf")):
            optimizer.zero_grad()
            each.scale(parameter.sum() * factor).backward()
            each.step(optimizer)
            each.update()
        assert parameter.item() == before - 0.25 and each.get_scale() == 8 and each.step_was_skipped


def test_clip_grad_norm_unscales_first_and_only_once():
    model, optimizer = model_and_optimizer()
    scaler = LossScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    plain = torch.autograd.grad(model(torch.ones(1, 3)).sum(), [*model.parameters()])
    norm = nn.utils.get_total_norm(plain)
    assert torch.equal(scaler.clip_grad_norm_(optimizer, 0.5), norm)
    assert torch.allclose(nn.utils.get_total_norm([p.grad for p in model.parameters()]), torch.tensor(0.5))
    assert torch.allclose(scaler.clip_grad_norm_(optimizer, 0.5, norm_type=2.0, foreach=False), torch.tensor(0.5))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 3)).sum() * float("inf")).backward()
    assert not scaler.clip_grad_norm_(optimizer, 0.5).isfinite()
    scaler.step(optimizer)
    assert scaler.step_was_skipped


def test_recheck_finds_what_the_user_made_of_unscaled_gradients():
    for recheck, skipped in ((False, False), (True, True)):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler = LossScaler("cpu", 4.0, recheck=recheck)
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        parameter.grad[0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped is skipped and scaler.get_scale() == (2.0 if skipped else 4.0)
        assert bool(parameter.isnan().any()) is not skipped


def test_recheck_blames_the_losses_that_were_unscaled_and_no_other():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.5), LossScaler("cpu", 4.0, num_losses=3, recheck=True)
    with scaler.scale_loss(parameter.sum(), optimizer, loss_id=1) as loss:
        loss.backward()
    parameter.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert [scaler.get_scale(i) for i in range(3)] == [4.0, 2.0, 4.0]
    assert [loss["growth_tracker"] for loss in scaler.state_dict()["fxprec"]["losses"]] == [0, 0, 0]


def test_two_scalers_given_scale_bit_for_bit_whatever_the_scale():
    """1 / 3 and 1 / 1000 are not exact: the reciprocal is taken in double precision, as torch's is."""
    for scale in (3.0, 1000.0, 2.0**16 + 1):
        gradients = []
        for cls in (torch.amp.GradScaler, LossScaler):
            parameter = nn.Parameter(torch.linspace(-1, 1, 50))
            scaler = cls("cpu", scale)
            scaler.scale(parameter.exp().sum()).backward()
            scaler.unscale_(torch.optim.SGD([parameter], lr=1.0))
            gradients.append(parameter.grad)
        assert torch.equal(*gradients)


def test_the_default_device_is_one_that_exists_and_an_unknown_one_is_refused():
    assert LossScaler().is_enabled()
    assert LossScaler(torch.device("cpu"))._device == "cpu"
    with pytest.raises(RuntimeError, match="gpu"):
        LossScaler("gpu")


def test_scale_runs_in_a_compiled_function():
    scaler, parameter = LossScaler("cpu", 4.0), nn.Parameter(torch.ones(2))
    scaler.scale(parameter.sum())

    @torch.compile(backend="eager", fullgraph=True)
    def loss_of(x):
        return scaler.scale((x * x).sum())

    loss_of(parameter).backward()
    assert parameter.grad.tolist() == [8.0, 8.0]


def test_a_captured_cuda_graph_scales_unseen(monkeypatch):
    """torch's documented loop: ``scale`` and ``backward`` in a graph, ``step`` and ``update`` after each replay."""
    scaler, parameter = LossScaler("cpu", 4.0), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    with monkeypatch.context() as capture:
        capture.setattr("fxprec.scaling.loss_scaler.capturing", lambda device: True)
        scaler.scale(parameter.sum())
    for _ in range(2):
        parameter.grad = torch.full((2,), 4.0)  # the replay
        scaler.step(optimizer)
        scaler.update()
    assert parameter.tolist() == [0.0, 0.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_steps_after_replays_of_a_cuda_graph():
    model, data = nn.Linear(4, 4, device="cuda"), torch.ones(2, 4, device="cuda")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), LossScaler("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(data).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.scale(model(data).sum()).backward()
    bias = model.bias.detach().clone()
    for i in range(3):
        graph.replay()
        scaler.step(optimizer)
        scaler.update()
        assert torch.allclose(model.bias, bias - 0.2 * (i + 1))
