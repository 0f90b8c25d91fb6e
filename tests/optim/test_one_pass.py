"""What every optimizer of fxprec.optim does in its step, beside torch's unscale_, clip_grad_norm_ and fused update."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import fxprec
from fxprec import optim

FAMILY = {
    "AdamW": (optim.AdamW, torch.optim.AdamW, {}),
    "capturable": (optim.AdamW, torch.optim.AdamW, {"capturable": True, "betas": (0.8, 0.99), "eps": 1e-6}),
    "Adam": (optim.Adam, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "SGD": (optim.SGD, torch.optim.SGD, {}),
    "momentum": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
}
SHAPES = ((3, 5), (7,), (), (1, 33, 2), (0,))


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(seed, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


def give(params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def states_equal(ours, theirs):
    if ours.keys() != theirs.keys():
        return False
    pairs = [(ours[i], theirs[i]) for i in ours]
    return all(a.keys() == b.keys() and equal(a.values(), b.values()) for a, b in pairs)


@pytest.fixture(params=FAMILY)
def pair(request):
    """(our parameters, torch's, our optimizer, torch's fused one)."""
    ours, theirs, options = FAMILY[request.param]
    a, b = parameters(), parameters()
    return a, b, ours(a, lr=0.1, **options), theirs(b, lr=0.1, fused=True, **options)


def test_bit_for_bit_what_torchs_fused_optimizer_computes(pair):
    a, b, ours, theirs = pair
    for step in range(4):
        give(a, gradients(step))
        give(b, gradients(step))
        ours.step()
        theirs.step()
        assert equal(a, b)
    assert states_equal(ours.state_dict()["state"], theirs.state_dict()["state"])


def test_groups_and_state_load_both_ways_and_go_on_bit_for_bit(pair):
    a, b, ours, theirs = pair
    for step in range(2):
        give(a, gradients(step))
        give(b, gradients(step))
        ours.step()
        theirs.step()
    mine, torchs = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == torchs["param_groups"]
    ours.load_state_dict(copy.deepcopy(torchs))
    theirs.load_state_dict(copy.deepcopy(mine))
    again = pickle.loads(pickle.dumps(ours))
    c = [p for group in again.param_groups for p in group["params"]]
    for params, optimizer in ((a, ours), (b, theirs), (c, again)):
        give(params, gradients(2))
        optimizer.step()
    assert equal(a, b)
    assert equal(a, c)


def test_a_state_of_torchs_default_implementation_loads(pair):
    a, _, ours, theirs = pair
    plain = [p.detach().clone().requires_grad_() for p in a]
    kept = {k: v for k, v in theirs.defaults.items() if k not in ("fused", "foreach", "differentiable")}
    kept.pop("decoupled_weight_decay", None)
    kept.pop("capturable", None)  # which torch's default implementation takes on CUDA only
    default = type(theirs)(plain, **kept)
    give(plain, gradients(0))
    default.step()
    ours.load_state_dict(copy.deepcopy(default.state_dict()))
    for owner, other in zip(a, plain, strict=True):
        owner.data.copy_(other.data)
    give(a, gradients(1))
    give(plain, gradients(1))
    ours.step()
    default.step()
    for ours_, theirs_ in zip(a, plain, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-6, atol=1e-7)


def test_scaled_steps_are_torchs(pair):
    a, b, ours, theirs = pair
    mine, torchs = fxprec.LossScaler("cpu", 1024.0), torch.amp.GradScaler("cpu", 1024.0)
    for step in range(4):
        for params, optimizer, scaler in ((a, ours, mine), (b, theirs, torchs)):
            scaler.scale(torch.zeros((), requires_grad=True))
            give(params, gradients(step, scaler.get_scale()))
            if step == 1:
                params[1].grad[2] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert equal(a, b)
        assert mine.get_scale() == torchs.get_scale()
    assert states_equal(ours.state_dict()["state"], theirs.state_dict()["state"])


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_skipped_step_changes_nothing_at_all(pair, bad, max_norm):
    a, _, ours, _ = pair
    ours.max_norm = max_norm
    scaler = fxprec.LossScaler("cpu", 2.0)
    for warm in (False, True):  # the very first step too, which must not make a state
        if warm:
            give(a, gradients(0))
            ours.step()
        before, state = [p.detach().clone() for p in a], copy.deepcopy(ours.state_dict())
        random = torch.get_rng_state()
        scaler.scale(torch.zeros((), requires_grad=True))
        give(a, gradients(1))
        a[3].grad[0, 32, 1] = bad
        scaler.step(ours)
        assert scaler.step_was_skipped
        scaler.update()
        assert equal(a, before)
        assert states_equal(ours.state_dict()["state"], state["state"])
        assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("size", [0.01, 30.0])
def test_max_norm_clips_as_torch_does_after_unscaling(pair, scaled, size):
    a, b, ours, theirs = pair
    ours.max_norm = 1.5
    mine, torchs = (c("cpu", 4096.0, enabled=scaled) for c in (fxprec.LossScaler, torch.amp.GradScaler))
    exact = [p.detach().double() for p in a]
    for step in range(3):
        grads = gradients(step, size)
        for params, optimizer, scaler in ((a, ours, mine), (b, theirs, torchs)):
            scaler.scale(torch.zeros((), requires_grad=True))
            give(params, [grad * scaler.get_scale() for grad in grads])
            if scaler is torchs:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.5)
            scaler.step(optimizer)
            scaler.update()
    for mine_, theirs_, _ in zip(a, b, exact, strict=True):
        torch.testing.assert_close(mine_, theirs_, rtol=2e-6, atol=2e-6)
    assert not equal(a, [e.float() for e in exact])


def test_max_norm_is_within_twice_torchs_error_of_float64():
    a, b, exact = parameters(), parameters(), [p.detach().double().requires_grad_() for p in parameters()]
    ours = optim.AdamW(a, lr=0.1, max_norm=0.5)
    theirs, reference = torch.optim.AdamW(b, lr=0.1, fused=True), torch.optim.AdamW(exact, lr=0.1)
    for step in range(5):
        grads = gradients(step, 3.0)
        give(a, grads)
        give(b, grads)
        give(exact, [grad.double() for grad in grads])
        for params in (b, exact):
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        for optimizer in (ours, theirs, reference):
            optimizer.step()

    def error(params):
        return max(float((p.double() - e).abs().max()) for p, e in zip(params, exact, strict=True) if p.numel())

    assert 0 < error(a) <= 2 * error(b) + 1e-7


def test_unscaled_and_clipped_by_hand_works_too(pair):
    a, b, ours, theirs = pair
    mine, torchs = fxprec.LossScaler("cpu", 64.0), torch.amp.GradScaler("cpu", 64.0)
    for step in range(3):
        for params, optimizer, scaler in ((a, ours, mine), (b, theirs, torchs)):
            scaler.scale(torch.zeros((), requires_grad=True))
            give(params, gradients(step, 64.0))
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 0.5)
            scaler.step(optimizer)
            scaler.update()
    assert equal(a, b)


def test_the_scaler_of_torch_drives_them_too(pair):
    a, b, ours, theirs = pair
    for params, optimizer in ((a, ours), (b, theirs)):
        scaler = torch.amp.GradScaler("cpu", 16.0)
        for step in range(3):
            scaler.scale(torch.zeros((), requires_grad=True))
            give(params, gradients(step, 16.0))
            scaler.step(optimizer)
            scaler.update()
    assert equal(a, b)


def test_schedulers_and_tensor_learning_rates(pair):
    a, b, ours, theirs = pair
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=6) for o in (ours, theirs)]
    for step in range(4):
        for params, optimizer, scheduler in zip((a, b), (ours, theirs), schedulers, strict=True):
            give(params, gradients(step))
            optimizer.step()
            scheduler.step()
    assert equal(a, b)
    for params, optimizer in ((a, ours), (b, theirs)):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
        give(params, gradients(9))
        optimizer.step()
    assert equal(a, b)


def test_parameters_without_gradients_wait_for_theirs(pair):
    a, b, ours, theirs = pair
    for step in range(2):
        for params, optimizer in ((a[:2], ours), (b[:2], theirs)):
            give(params, gradients(step)[:2])
            optimizer.step()
    before = [p.detach().clone() for p in a[2:]]
    assert equal(a, b)
    for owner in a:
        owner.grad = None
    ours.step()
    assert equal(a[2:], before)
    give(a, gradients(5))
    ours.step()  # the rest begins now, beside those that have begun
    assert not equal(a[2:4], before[:2])


def test_a_closure_without_a_scaler_is_torchs(pair):
    a, _, ours, _ = pair

    def closure():
        loss = sum((p**2).sum() for p in a)
        loss.backward()
        return loss

    assert ours.step(closure).requires_grad
    assert ours.param_groups[0]["params"][0].grad is not None


def test_gradients_of_several_dtypes_beside_each_other():
    low, wide = nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([low, wide], lr=0.5, max_norm=10.0)
    low.grad, wide.grad = torch.ones(4, dtype=torch.bfloat16), torch.ones(4)
    optimizer.step()
    assert optimizer.state[low]["exp_avg"].dtype is torch.bfloat16
    assert (wide < 0.6).all()
    torch.testing.assert_close(low.float(), wide, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": False}, {"differentiable": True}])
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.SGD])
def test_other_implementations_are_refused_by_name(cls, options):
    with pytest.raises(ValueError, match=f"torch.optim.{cls.__name__}"):
        cls(parameters(), lr=0.1, **options)


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), "1"])
def test_a_norm_is_above_zero(max_norm):
    with pytest.raises(ValueError, match="greater than 0"):
        optim.SGD(parameters(), lr=0.1, max_norm=max_norm)


@pytest.mark.parametrize(
    ("cls", "options"),
    [(optim.AdamW, {"lr": -1.0}), (optim.Adam, {"betas": (1.0, 0.9)}), (optim.SGD, {"momentum": -1})],
)
def test_hyper_parameters_are_checked_as_torch_checks_them(cls, options):
    with pytest.raises(ValueError, match="Invalid"):
        cls(parameters(), **{"lr": 0.1, **options})


def test_they_are_torchs_optimizers():
    assert isinstance(optim.AdamW(parameters()), torch.optim.AdamW)
    assert isinstance(optim.Adam(parameters()), torch.optim.Adam)
    assert isinstance(optim.SGD(parameters()), torch.optim.SGD)


def test_sparse_gradients_as_torchs_sgd_takes_them():
    tables = [nn.Parameter(torch.ones(6, 2)) for _ in range(2)]
    ours, theirs = optim.SGD([tables[0]], lr=0.5, momentum=0.9), torch.optim.SGD([tables[1]], lr=0.5, momentum=0.9)
    scaler = fxprec.LossScaler("cpu", 8.0)
    for step in range(3):
        index = torch.tensor([[1, 1, step]])
        for table, scale in zip(tables, (8.0, 1.0), strict=True):
            table.grad = torch.sparse_coo_tensor(index, torch.full((3, 2), scale), (6, 2))
        scaler.scale(torch.zeros((), requires_grad=True))
        scaler.step(ours)
        scaler.update()
        theirs.step()
    assert torch.equal(*tables)
    with pytest.raises(RuntimeError, match="sparse"):
        adam = optim.Adam([tables[0]])
        adam.step()


def test_first_steps_do_not_make_state_under_accelerates_patch():
    a = parameters()
    ours, ran = optim.AdamW(a), []
    original = ours.step
    ours.step = lambda *args: (ran.append(1), original(*args))[1]
    scaler = fxprec.LossScaler("cpu", 2.0)
    for bad in (float("nan"), 0.0):
        scaler.scale(torch.zeros((), requires_grad=True))
        give(a, gradients(0, 2.0))
        a[0].grad[0, 0] += bad
        scaler.step(ours, None)
        scaler.update()
    assert ran == [1]
    reference = parameters()
    theirs = torch.optim.AdamW(reference, fused=True)
    give(reference, gradients(0))
    theirs.step()
    assert equal(a, reference)


@pytest.mark.parametrize("name", FAMILY)
def test_strides_do_not_matter(name):
    """Torch's fused kernels go by memory order alone: here against its implementation for one tensor."""
    ours, theirs, options = FAMILY[name]

    def made():
        return [
            nn.Parameter(torch.arange(12.0).view(3, 4).t()),
            nn.Parameter(torch.arange(24.0).view(4, 6)[:, ::2]),
            nn.Parameter(torch.arange(48.0).view(2, 3, 2, 4).contiguous(memory_format=torch.channels_last)),
        ]

    a, b = made(), made()
    beside = a[1].detach().as_strided((4, 3), (6, 2), 1).clone()  # between the elements of the slice
    plain = {name: value for name, value in options.items() if name != "capturable"}
    one, other = ours(a, lr=0.1, **options), theirs(b, lr=0.1, foreach=False, **plain)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        one.step()
        other.step()
        if step == 1:  # a checkpoint from before the model was channels_last
            saved = copy.deepcopy(one.state_dict())
            for state in saved["state"].values():
                state.update({k: v.contiguous() for k, v in state.items() if v is not None})
            one.load_state_dict(saved)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    assert torch.equal(a[1].detach().as_strided((4, 3), (6, 2), 1), beside)


def test_it_says_which_kernels_run_and_why():
    optimizer = optim.SGD([*parameters(), nn.Parameter(torch.ones(2, dtype=torch.float64))], lr=0.1)
    assert optimizer.implementations() == {"torch (on cpu)": 6}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FAMILY)
def test_parameters_of_other_dtypes_move_as_in_fp32(name, dtype):
    """Every element: torch's fused SGD on CPUs leaves whole vectors of low ones where they are."""
    ours, theirs, options = FAMILY[name]
    a, b = [nn.Parameter(p.detach().to(dtype)) for p in parameters()], parameters()
    for low, wide in zip(a, b, strict=True):
        wide.data.copy_(low.data)
    one, other = ours(a, lr=0.1, **options), theirs(b, lr=0.1, fused=True, **options)
    for step in range(3):
        for low, wide, grad in zip(a, b, gradients(step), strict=True):
            low.grad = grad.to(dtype)
            wide.grad = low.grad.float()
        one.step()
        other.step()
    for low, wide in zip(a, b, strict=True):
        assert low.dtype is dtype
        tolerance = 4 * torch.finfo(dtype).eps + 1e-6
        torch.testing.assert_close(low.float(), wide, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.SGD])
def test_complex_parameters_are_refused_before_anything_changes(cls):
    strange = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=rf"real parameters.*\(2,\).*complex64.*torch\.optim\.{cls.__name__}"):
        cls([*parameters(), strange], lr=0.1)
    optimizer = cls(parameters(), lr=0.1)
    with pytest.raises(TypeError, match="real parameters"):
        optimizer.add_param_group({"params": [strange]})
    assert len(optimizer.param_groups) == 1
    cls([*parameters(), strange.requires_grad_(False)], lr=0.1)  # never gets a gradient


def test_a_sparse_gradient_in_a_later_group_is_refused_before_anything_changes():
    dense, table = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(6, 2))
    optimizer = optim.AdamW([{"params": [dense]}, {"params": [table]}], lr=0.1)
    dense.grad, table.grad = torch.ones(3), torch.ones(6, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3)) and not optimizer.state


@pytest.mark.parametrize("name", ["max_norm", "low_gradients"])
def test_what_holds_for_all_groups_is_refused_in_one(name):
    with pytest.raises(ValueError, match=f"{name} in a parameter group"):
        optim.SGD([{"params": parameters(), name: 1.0}], lr=0.1)
    optimizer = optim.SGD(parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"{name} in a parameter group"):
        optimizer.add_param_group({"params": parameters(), name: 1.0})
    assert len(optimizer.param_groups) == 1


def test_signatures_begin_as_torchs_do():
    for ours, theirs, _ in FAMILY.values():
        own = inspect.signature(ours).parameters
        assert set(inspect.signature(theirs).parameters) <= set(own)
        assert "max_norm" in own
