"""Steps that the optimizer skips on the device: what decides, no host sync, and nothing that a skip changes."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

import fxprec.scaling.scale as floor
from fxprec.host_reads import OnHost
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.scaling.skips import can_skip_on_device

FUSED = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
]
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # before, torch's fused Adagrad itself read the device
    FUSED.append((torch.optim.Adagrad, {}))
SCALERS = [
    {},
    {"hysteresis": 2, "min_scale": 1.0, "max_scale": 2.0**20},
    {"hysteresis": 2, "consecutive_hysteresis": True, "on_floor": None},
    {"dynamic": False},
    {"recheck": True},
]


def fused(cls, parameters, **options):
    return cls(parameters, lr=0.1, fused=True, **options)


def iteration(scaler, optimizer, parameters, unscale=False):
    scaler.scale(sum((p * p).sum() for p in parameters)).backward()
    if unscale:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.fixture
def no_reads(monkeypatch):
    """As on CUDA: the floor is looked at when a copy is there, which here never comes."""
    never = SimpleNamespace(of=lambda values: OnHost(values, lambda: False, lambda: None))
    monkeypatch.setattr(floor, "OnHost", never)


@pytest.mark.parametrize("cls, options", FUSED)
@pytest.mark.parametrize("arguments", SCALERS)
@pytest.mark.parametrize("unscale", [False, True])
def test_nothing_is_read_from_the_device(no_reads, cls, options, arguments, unscale):
    """With fake tensors a read (``item``, ``bool``, ``tolist``) raises."""
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = fused(cls, parameters, **options)
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        optimizer.step()  # the first step makes state
        optimizer.zero_grad()
        scaler = LossScaler("cpu", **arguments)
        for _ in range(3):
            iteration(scaler, optimizer, parameters, unscale)
        with pytest.raises(DataDependentOutputException):
            scaler.get_scale()
        with pytest.raises(DataDependentOutputException):
            bool(scaler.step_was_skipped)


def test_losses_of_their_own_and_two_optimizers_are_not_read_either(no_reads):
    with FakeTensorMode():
        owned = [[nn.Parameter(torch.ones(3))] for _ in range(2)]
        optimizers = [torch.optim.SGD(parameters, lr=0.1, fused=True) for parameters in owned]
        scaler = LossScaler("cpu", num_losses=2)
        for _ in range(3):
            for loss_id, parameters in enumerate(owned):
                loss = (parameters[0] * parameters[0]).sum()
                with scaler.scale_loss(loss, optimizers[loss_id], loss_id) as scaled:
                    scaled.backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_gan_loop_reads_nothing(no_reads, updates, zero):
    """The generator's loss leaves scaled gradients in the discriminator; ``zero_grad`` comes before they matter."""
    with FakeTensorMode():
        makes, judges = (nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizers = [torch.optim.SGD([p], lr=0.1, fused=True) for p in (makes, judges)]
        scaler = LossScaler("cpu")
        for iteration in range(4):
            for i, optimizer in enumerate(optimizers):
                for parameter in (makes, judges)[i : i + 1]:
                    if zero or parameter.grad is None:
                        parameter.grad = None
                    else:
                        parameter.grad.zero_()  # torch._foreach_zero_ on fake tensors leaves their versions alone
                scaler.scale((makes * judges).sum()).backward()
                scaler.step(optimizer)
                # After the very first update, gradients of optimizers that it does not know yet are looked at.
                if i or (updates == 2 and iteration):
                    scaler.update()


@pytest.mark.parametrize("cls, options", FUSED[:1] + FUSED[2:3])
def test_the_first_step_and_the_test_itself_do_read(no_reads, cls, options):
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.ones(3))]
        with pytest.raises(DataDependentOutputException):
            iteration(LossScaler("cpu"), fused(cls, parameters, **options), parameters)
        with pytest.raises(DataDependentOutputException):
            iteration(LossScaler("cpu"), torch.optim.SGD(parameters, lr=0.1), parameters)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("cls, options", FUSED)
def test_no_sync_on_cuda_from_the_second_step_on(cls, options):
    parameters = [nn.Parameter(torch.ones(3, device="cuda")) for _ in range(2)]
    optimizer, scaler = fused(cls, parameters, **options), LossScaler("cuda")
    iteration(scaler, optimizer, parameters)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            iteration(scaler, optimizer, parameters)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.get_scale() == 2.0**16 and not scaler.step_was_skipped


def snapshot(parameters, optimizer):
    return copy.deepcopy(([p.detach() for p in parameters], optimizer.state_dict(), torch.get_rng_state()))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Noisy(torch.optim.SGD):
    """Draws random numbers in each step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter)
        return super().step(closure)


@pytest.mark.parametrize(
    "make",
    [
        *(functools.partial(fused, cls, **options) for cls, options in FUSED),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.AdamW, lr=0.1, capturable=False, foreach=True),
        functools.partial(torch.optim.RMSprop, lr=0.1, momentum=0.5),
        functools.partial(Noisy, lr=0.1),
    ],
)
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_skip_changes_nothing(make, bad, value, unscale):
    """Neither parameters, state and step counts, nor random state, in the first step as in later ones."""
    parameters = [nn.Parameter(torch.linspace(0, 1, 3)), nn.Parameter(torch.ones(2))]
    optimizer, scaler = make(parameters), LossScaler("cpu")
    for i in range(4):
        scaler.scale(sum((p * p).sum() for p in parameters)).backward()
        if i == bad:
            parameters[1].grad[1] = value
        if unscale:
            scaler.unscale_(optimizer)
        before = snapshot(parameters, optimizer)
        scaler.step(optimizer)
        assert same(snapshot(parameters, optimizer), before) is (i == bad)
        assert scaler.step_was_skipped is (i == bad)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["frozen first", "new group", "loaded", "emptied"])
def test_state_that_appears_later_is_not_made_by_a_skip(how):
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([first] if how == "new group" else [first, second], fused=True)
    scaler = LossScaler("cpu")
    for i in range(3):
        if i == 2 and how == "new group":
            optimizer.add_param_group({"params": [second]})
        if i == 2 and how == "emptied":
            optimizer.state[second].clear()
        if i == 2 and how == "loaded":
            fresh = torch.optim.AdamW([first, second], fused=True)
            optimizer.load_state_dict(fresh.state_dict())
        late = how in ("frozen first", "new group") and i < 2
        scaler.scale(first.sum() + (0 if late else second.sum())).backward()
        if i == 2:
            first.grad[0] = float("inf")
        before = snapshot([first, second], optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.step_was_skipped and same(snapshot([first, second], optimizer), before)


def test_who_may_skip_on_the_device():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    plain, adam = torch.optim.SGD([parameter], lr=0.1), torch.optim.AdamW([parameter], fused=True)
    assert not can_skip_on_device(plain)
    assert not can_skip_on_device(adam)  # no state yet
    assert can_skip_on_device(torch.optim.SGD([parameter], lr=0.1, fused=True))  # needs none
    adam.step()
    assert can_skip_on_device(adam)
    torch.optim.lr_scheduler.StepLR(adam, 1)
    assert "step" in adam.__dict__ and can_skip_on_device(adam)
    scheduled = adam.step

    @functools.wraps(scheduled)
    def watched(*arguments):
        return scheduled(*arguments)

    adam.step = watched
    assert watched._wrapped_by_lr_sched and not can_skip_on_device(adam)  # the mark came with functools.wraps
    other = torch.optim.SGD([parameter], lr=0.1, fused=True)
    other.step = (lambda self, *arguments: None).__get__(other)
    torch.optim.lr_scheduler.StepLR(other, 1)
    assert not can_skip_on_device(other)  # the scheduler wrapped a wrapper
