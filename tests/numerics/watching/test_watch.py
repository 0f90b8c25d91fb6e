"""The watch: sound training is the same bit for bit, a faulty step changes nothing and is explained."""

from __future__ import annotations

import copy
import gc
import importlib
import itertools
import pickle
import random
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
from faults import FAULTS, NARROW, PLACES, Net, batch, blamed, made
from fxprec.host_reads import OnHost
from fxprec.model.conversion import conversion_of
from fxprec.numerics import Trip, Watcher, locate, watch
from fxprec.torch_internals import backward_hooks_of, step_hooks, tree_leaves

F16, BF16 = torch.float16, torch.bfloat16
#: Not the function.
module = importlib.import_module("fxprec.numerics.watching.watch")

pytestmark = pytest.mark.filterwarnings("ignore::fxprec.SlowDtypeWarning")

#: Name -> an optimizer of parameters.
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1),
    "ours": lambda p: fxprec.optim.AdamW(p, lr=0.01),
    "ours, clipping": lambda p: fxprec.optim.AdamW(p, lr=0.01, max_norm=0.5),
    "our SGD": lambda p: fxprec.optim.SGD(p, lr=0.01, momentum=0.9),
}  # fmt: skip


class Small(nn.Module):
    """Dropout and batch norm; a row of which the first number is 7 is divided by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.norm(self.first(x)).tanh())
        return self.last(h / (x[:, :1] - 7).abs())


def small(dtype: torch.dtype = BF16, **settings: Any) -> tuple[nn.Module, fxprec.LossScaler]:
    torch.manual_seed(0)
    model, scaler = fxprec.convert(Small(), dtype=dtype, **settings)
    return model, scaler


def bad(seed: int = 1) -> tuple[Tensor, Tensor]:
    x, y = batch(seed)
    x[1, 0] = 7
    return x, y


def step(
    model: nn.Module,
    optimizer: Optimizer,
    *parts: tuple[Tensor, Tensor],
    scaler: fxprec.LossScaler | None = None,
    loss: Callable[..., Tensor] = F.cross_entropy,
) -> None:
    """One step of a usual loop, of as many micro-batches."""
    optimizer.zero_grad()
    for x, y in parts:
        value = loss(model(x), y)
        (value if scaler is None else scaler.scale(value)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def state(model: nn.Module, *others: Any) -> list[Any]:
    """All that training changes."""
    tensors = [each.detach().clone() for each in (*model.parameters(), *model.buffers())]
    return [tensors, *(copy.deepcopy(each.state_dict()) for each in others)]


def same(a: Any, b: Any) -> bool:
    try:
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    except AssertionError:
        return False
    return True


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxprec.NonFiniteWarning)
        yield


# -- sound steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_sound_training_is_the_same(optimizer: str, dtype: torch.dtype) -> None:
    def train(watched: bool) -> list[Any]:
        model, scaler = small(dtype)
        opt = OPTIMIZERS[optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        with watch(model, opt, scaler) if watched else nullcontext() as watcher:
            for number in range(4):
                step(model, opt, batch(number), batch(number + 10), scaler=scaler)
                scheduler.step()
        if isinstance(watcher, Watcher):
            assert watcher.trips == [] and watcher.steps == 4
        return [*state(model, opt, scaler), torch.get_rng_state(), scheduler.state_dict()]

    assert same(train(False), train(True))


class Reads(TorchDispatchMode):
    """Counts the ops that read more than a few numbers: those of one element a tensor are flags."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        name = func.name().partition(".")[0].removeprefix("aten::")
        if any(tensor.numel() > 8 for tensor in read) and name not in ("view", "detach", "slice", "t"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_what_it_costs() -> None:
    """One reduction for an output, and one read of the gradients: none where a scaler reads them."""

    def counted(watched: bool, dtype: torch.dtype) -> Counter[str]:
        model, scaler = fxprec.convert(Net(torch.relu, "plain"), dtype=dtype)
        opt = OPTIMIZERS["AdamW, fused"](model.parameters())
        with watch(model, opt, scaler) if watched else nullcontext():
            for number in range(2):
                step(model, opt, batch(number), scaler=scaler)
            with Reads() as mode:
                step(model, opt, batch(3), scaler=scaler)
        return mode.counts

    assert counted(True, BF16) - counted(False, BF16) == {"amax": 1, "cat": 1, "sum": 1}  # small ones side by side
    assert counted(True, F16) - counted(False, F16) == {"amax": 1}


def test_evaluation_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = small()
    opt = OPTIMIZERS["AdamW"](model.parameters())
    with watch(model, opt) as watcher:
        with monkeypatch.context() as patched:
            patched.setattr(module, "KeptCall", None)  # nothing is kept
            with torch.no_grad():
                model(bad()[0])
            with torch.inference_mode():
                model(bad()[0])
        model(bad()[0])  # gradients are recorded, and nobody asks for them
        step(model, opt, batch())
    assert watcher.trips == [] and watcher.steps == 1


def test_calls_are_let_go() -> None:
    """Before the next call runs; at once where no gradient is asked for."""
    model, _ = small()
    opt = OPTIMIZERS["AdamW"](model.parameters())
    arrays = [numpy.ones((4, 6), dtype=numpy.float32) for _ in range(2)]
    kept = [*map(weakref.ref, arrays)]
    with watch(model, opt):
        x = torch.from_numpy(arrays.pop(0))
        step(model, opt, (x, batch()[1]))
        del x
        assert kept[0]() is not None
        output = model(torch.from_numpy(arrays.pop()))
        gc.collect()
        assert kept[0]() is None and kept[1]() is not None
        del output
        gc.collect()
        assert kept[1]() is None


# -- faults ------------------------------------------------------------------------------------------------------------


def _switched(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    fault = model.fault
    assert isinstance(fault, nn.Module)
    fault.function = function  # type: ignore[assignment]


#: Everything at "plain", the other places in turns, with each optimizer sometimes.
CASES: Final = [
    *((fault, "plain", name) for fault, name in zip(FAULTS, itertools.cycle(OPTIMIZERS))),
    *zip(FAULTS, itertools.cycle(PLACES[1:]), itertools.cycle([*OPTIMIZERS][::-1])),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "place", "optimizer"), CASES)
def test_a_fault_in_one_step(fault: str, place: str, optimizer: str) -> None:
    function, kind, backward, _ = FAULTS[fault]
    model = made(torch.relu, place, BF16)
    opt = OPTIMIZERS[optimizer](model.parameters())
    with watch(model, opt) as watcher:
        for number in range(4):
            before = state(model, opt)
            if number == 2:
                _switched(model, function)
                with pytest.warns(fxprec.NonFiniteWarning, match=r"step 2 was not finite, and was skipped: "):
                    step(model, opt, batch(number))
                _switched(model, torch.relu)
                assert same(state(model, opt), before)
                assert all(p.grad is not None for p in model.parameters())
            else:
                step(model, opt, batch(number))
                assert not same(state(model, opt), before)
    (trip,) = watcher.trips
    found = trip.finding
    assert found is not None and (trip.step, trip.call, trip.calls, trip.rank) == (2, 0, 1, None)
    assert (found.kind, found.phase) == (kind, "backward" if backward else "forward")
    if not fxprec.report(model).headline.net:  # before torch 2.13 dynamo leaves a stored Function.apply out
        assert (found.node, found.module) == (blamed(fault, place, "O1"), "fault")
    assert found.fails_in_fp32


@pytest.mark.parametrize("fault", NARROW)
@pytest.mark.parametrize("dynamic", [True, False])
def test_what_float16_cannot_hold(fault: str, dynamic: bool) -> None:
    """It is no question of the loss scale: the scaler backs off, and the finding says what it was."""
    model = made(torch.relu, "plain", F16)
    opt = OPTIMIZERS["AdamW"](model.parameters())
    scaler = fxprec.LossScaler("cpu", 256.0, dynamic=dynamic)
    with watch(model, opt, scaler) as watcher, quiet():
        for number in range(3):
            before = state(model, opt)
            _switched(model, NARROW[fault][0] if number == 1 else torch.relu)
            step(model, opt, batch(number), scaler=scaler)
            assert same(state(model, opt), before) == (number == 1)
    (found,) = watcher.findings
    assert (found.kind, found.phase, found.fails_in_fp32) == ("overflow", "forward", False)
    assert found.cure.startswith("fxprec.convert(model, dtype=torch.float16, policy=")


@pytest.mark.slow
def test_a_fault_in_the_first_step() -> None:
    """Whatever state an optimizer makes in its first step is that of the first one that runs."""
    for make in OPTIMIZERS.values():
        results = []
        for faulty in (True, False):
            model, _ = small()
            model.dropout.p = 0.0  # type: ignore[union-attr]
            opt = make(model.parameters())
            with watch(model, opt), quiet():
                if faulty:
                    step(model, opt, bad())
                    model.norm.reset_running_stats()  # type: ignore[operator, union-attr]
                step(model, opt, batch(2))
            results.append(state(model, opt))
        assert same(*results)


def test_the_micro_batch_is_named() -> None:
    model, _ = small()
    opt = OPTIMIZERS["AdamW"](model.parameters())
    with watch(model, opt) as watcher, fxprec.accumulate(model), quiet():
        before = state(model, opt)[0][: len([*model.parameters()])]
        step(model, opt, batch(1), batch(2), bad(3), batch(4))
        assert same(state(model, opt)[0][: len(before)], before)
    (trip,) = watcher.trips
    assert (trip.step, trip.call, trip.calls) == (0, 2, 4) and trip.finding is not None
    assert str(trip).startswith("step 0, call 2 of 4 was not finite, and was skipped: forward: truediv (")
    assert trip.finding.example.endswith("inf") and trip.finding.kind == "invalid"


def test_a_backward_fault_of_one_micro_batch() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * 0 + x[:, :3]).sqrt()

    model, _ = fxprec.convert(Root())
    opt = OPTIMIZERS["SGD"](model.parameters())
    x, y = torch.ones(4, 6), torch.zeros(4, 3)
    with watch(model, opt) as watcher, quiet():
        step(model, opt, (x, y), (x * 0, y), loss=F.mse_loss)
    (trip,) = watcher.trips
    found = trip.finding
    assert (
        found is not None and trip.call == 1 and (found.phase, found.kind, found.op) == ("backward", "invalid", "sqrt")
    )


@pytest.mark.slow
def test_random_numbers_and_buffers_are_those_of_the_step() -> None:
    """The fault is there for some dropout masks and some values of a buffer only; the replay has the very same."""

    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("count", torch.zeros(()))
            self.count: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            kept = F.dropout(torch.ones(64), 0.5)
            return self.layer(x) / ((kept.sum() - 64).abs() + (self.count - 3).abs() * 1e3)

    trips = 0
    for seed in range(40):
        torch.manual_seed(seed)
        model, _ = fxprec.convert(Rare())
        opt = OPTIMIZERS["SGD"](model.parameters())
        with watch(model, opt) as watcher, quiet():
            for number in range(5):
                step(model, opt, batch(number))
        assert all(trip.step == 2 and trip.finding is not None and trip.finding.op == "div" for trip in watcher.trips)
        trips += len(watcher.trips)
        if trips == 2:
            break
    assert trips == 2


@pytest.mark.slow
def test_random_numbers_of_python() -> None:
    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) / (0.0 if random.random() < 0.45 else 1.0)

    random.seed(0)
    model, _ = fxprec.convert(Rare())
    opt = OPTIMIZERS["SGD"](model.parameters())
    with watch(model, opt) as watcher, quiet():
        for number in range(8):
            step(model, opt, batch(number))
    assert [trip.step for trip in watcher.trips] == [2, 3, 5, 7] and len(watcher.findings) == 4


def test_buffers_are_mended() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(x))

    model, _ = fxprec.convert(Normed())
    opt = OPTIMIZERS["SGD"](model.parameters())
    x, y = batch()
    with watch(model, opt) as watcher, quiet():
        step(model, opt, (x, y))
        buffers = copy.deepcopy(dict(model.named_buffers()))
        step(model, opt, (torch.full_like(x, torch.nan), y))
        for name in ("norm.running_mean", "norm.running_var"):
            assert same(dict(model.named_buffers())[name], buffers[name])
        step(model, opt, (x, y))
    (trip,) = watcher.trips
    assert trip.remarks == ("buffers have their values of before the step again: norm.running_mean, norm.running_var",)
    assert trip.finding is not None and (trip.finding.kind, trip.finding.node) == ("came in", "inputs[0]")


def test_a_loss_that_is_not_finite() -> None:
    model, _ = small()
    opt = OPTIMIZERS["AdamW"](model.parameters())
    before = state(model, opt)[0][:6]
    with watch(model, opt) as watcher, quiet():
        step(model, opt, batch(), loss=lambda out, y: (out * 0).sqrt().sum())
    (found,) = watcher.findings
    assert (found.phase, found.kind, found.node) == ("loss", "came in", "the gradient of outputs[0]")
    assert found.reached.startswith("the gradient of ") and "locate(model, (*inputs, target), loss)" in found.cure
    assert same(state(model, opt)[0][:6], before)
    assert locate(model, batch(), lambda out, y: (out * 0).sqrt().sum()) is not None


def test_masks_are_no_faults() -> None:
    class Masked(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.layer, self.value = nn.Linear(6, 3), value

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).masked_fill(torch.tensor([True, False, False]), self.value)

    x, y = batch()[0], torch.tensor([1, 2, 1, 2])
    for value, loss in ((-torch.inf, F.cross_entropy), (torch.inf, lambda out, y: F.cross_entropy(-out, y))):
        model, _ = fxprec.convert(Masked(value))
        opt = OPTIMIZERS["SGD"](model.parameters())
        with watch(model, opt) as watcher, quiet():
            step(model, opt, (x, y), loss=loss)
            before = state(model)
            step(model, opt, (x, y), loss=loss)
        assert not same(state(model), before)  # +inf is looked into once
        assert [trip.why for trip in watcher.trips] == [
            "an output holds inf that is meant to be there: outputs are not looked at any more"
        ] * (value > 0)


def test_every_step_is_faulty() -> None:
    """Three are run again, the others counted."""
    model, _ = small()
    opt = OPTIMIZERS["AdamW"](model.parameters())
    with watch(model, opt) as watcher, quiet():
        for _ in range(5):
            step(model, opt, bad())
        step(model, opt, batch())
        step(model, opt, bad())
    assert [trip.step for trip in watcher.trips] == [0, 1, 2, 3, 4, 6]
    assert [trip.finding is None for trip in watcher.trips] == [False, False, False, True, True, False]
    assert watcher.trips[3].why == "as were the 3 before it; not run again" and len(watcher.findings) == 4


def test_arguments_that_were_written_to_since(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = small()
    opt = OPTIMIZERS["AdamW, fused"](model.parameters())
    x, y = bad()
    slow = Slow(monkeypatch)
    with watch(model, opt) as watcher, quiet():
        step(model, opt, batch())
        slow.down = True
        step(model, opt, (x, y))
        x.copy_(batch()[0])
        step(model, opt, batch())
        slow.down = False
    (trip,) = watcher.trips
    assert trip.finding is None and trip.why == "run again, it is finite; inputs[0] was written to since"


# -- what an output can be, and how the model is called ----------------------------------------------------------------


def test_outputs_of_all_kinds_and_other_methods() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def encode(self, x: Tensor, by: Tensor) -> dict[str, Any]:
            return {"hidden": [self.a(x) / by], "empty": self.a(x[:0]), "number": 3, "unused": self.a(x).sum() / 0}

        def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(h), h.argmax(-1)

    model, _ = fxprec.convert(Two(), methods=("encode",))
    opt = OPTIMIZERS["AdamW"](model.parameters())

    def train(by: Tensor) -> None:
        opt.zero_grad()
        hidden = model.encode(batch()[0], by=by)["hidden"][0]
        F.cross_entropy(model(hidden)[0], batch()[1]).backward()
        opt.step()

    with watch(model, opt) as watcher, quiet():
        before = state(model)
        train(torch.ones(()))
        assert watcher.trips == [] and not same(state(model), before)
        before = state(model, opt)
        train(torch.zeros(()))
        assert same(state(model, opt), before)
    (trip,) = watcher.trips
    assert trip.finding is not None and (trip.finding.op, trip.finding.kind, trip.calls) == ("div", "invalid", 2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["log of negatives", "sqrt's gradient at 0"])
def test_behind_a_graph_break(fault: str) -> None:
    function, kind, backward, _ = FAULTS[fault]
    model = made(torch.relu, "broken", BF16)
    opt = OPTIMIZERS["AdamW, fused"](model.parameters())
    with watch(model, opt) as watcher, quiet():
        step(model, opt, batch())
        before = state(model, opt)
        _switched(model, function)
        step(model, opt, batch())
        assert same(state(model, opt), before)
    (found,) = watcher.findings
    assert (found.kind, found.phase, found.module) == (kind, "backward" if backward else "forward", "fault")


def test_two_models_with_an_optimizer_each() -> None:
    one, two = small()[0], small()[0]
    opts = [OPTIMIZERS["AdamW"](model.parameters()) for model in (one, two)]
    with watch(one, opts[0]) as first, watch(two, opts[1]) as second, quiet():
        before = state(one, opts[0]), state(two, opts[1])
        step(one, opts[0], bad())
        step(two, opts[1], batch())
        assert same(before[0][0][:6], state(one)[0][:6]) and not same(before[1], state(two, opts[1]))
    assert [trip.step for trip in first.trips] == [0] and second.trips == []


def test_two_models_with_one_optimizer() -> None:
    one, two = small()[0], small()[0]
    opt = OPTIMIZERS["AdamW"]([*one.parameters(), *two.parameters()])
    with watch(one, opt) as first, watch(two, opt) as second, quiet():
        before = state(one, opt)[1:], [p.detach().clone() for p in (*one.parameters(), *two.parameters())]
        opt.zero_grad()
        loss = F.cross_entropy(one(bad()[0]), batch()[1]) + F.cross_entropy(two(batch()[0]), batch()[1])
        loss.backward()
        opt.step()
        assert same(before, (state(one, opt)[1:], [p.detach() for p in (*one.parameters(), *two.parameters())]))
    assert len(first.findings) == 1 and not second.findings


def test_two_optimizers_of_one_model() -> None:
    model, _ = small()
    first, *rest = model.parameters()
    opts = [OPTIMIZERS["AdamW"]([first]), OPTIMIZERS["SGD"](rest)]
    other = OPTIMIZERS["SGD"]([nn.Parameter(torch.ones(1))])
    with watch(model) as watcher, quiet():
        for number, data in enumerate((batch(), bad(), batch())):
            before = [p.detach().clone() for p in model.parameters()]
            for opt in opts:
                opt.zero_grad()
            F.cross_entropy(model(data[0]), data[1]).backward()
            for opt in (*opts, other):
                opt.step()
            changed = [not same(old, p.detach()) for old, p in zip(before, model.parameters(), strict=True)]
            assert changed == [number != 1] * len(changed)
    assert [trip.step for trip in watcher.trips] == [1] and watcher.steps == 3


def test_closures_and_schedulers() -> None:
    def train(watched: bool) -> list[Any]:
        model, _ = small()
        opt = OPTIMIZERS["AdamW"](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        with watch(model, opt) if watched else nullcontext() as watcher, quiet(), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("ignore", fxprec.NonFiniteWarning)
            for number in range(4):
                x, y = bad() if watched and number == 1 else batch(number)
                if not watched and number == 1:
                    scheduler.step()
                    continue

                def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                    opt.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    return loss

                model.dropout.p = 0.0  # type: ignore[union-attr]
                loss = opt.step(closure) if number % 2 else opt.step(closure=closure)  # type: ignore[call-overload]
                assert isinstance(loss, Tensor) and bool(loss.isfinite()) == (not watched or number != 1)
                scheduler.step()
        if isinstance(watcher, Watcher):
            assert [trip.step for trip in watcher.trips] == [1]
        return [[p.detach() for p in model.parameters()], opt.state_dict(), scheduler.get_last_lr()]

    assert same(train(False), train(True))


def test_steps_within_a_backward() -> None:
    model, _ = small()
    opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    steps: list[Tensor] = []

    def hook(parameter: Tensor) -> None:
        steps.append(parameter)
        opts[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    with watch(model) as watcher, quiet():
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        before = [p.detach().clone() for p in model.parameters()]
        F.cross_entropy(model(bad()[0]), batch()[1]).backward()
        assert same(before, [p.detach() for p in model.parameters()])
    assert len(watcher.findings) == 1 and len(steps) == 12  # and none by the replay
    with quiet():
        assert locate(model, bad(), F.cross_entropy) is not None
    assert len(steps) == 12 and same(before, [p.detach() for p in model.parameters()])


def test_without_an_optimizer() -> None:
    model, _ = small()
    with watch(model) as watcher, quiet():
        F.cross_entropy(model(bad()[0]), batch()[1]).backward()
        (trip,) = watcher.check()
        assert trip.finding is not None and not trip.skipped and "skipped" not in str(trip)
        assert watcher.check() == (trip,)


# -- scalers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW, fused", "ours"])
def test_the_search_for_a_scale_is_no_fault(optimizer: str) -> None:
    model, _ = small(F16)
    opt = OPTIMIZERS[optimizer](model.parameters())
    scaler = fxprec.LossScaler("cpu", 2.0**30)
    with watch(model, opt, scaler) as watcher:
        for number in range(16):
            step(model, opt, batch(number), scaler=scaler)
    assert watcher.trips == [] and 5 < scaler.skipped_steps < 16


def test_a_fault_amid_the_search() -> None:
    model = made(torch.relu, "plain", F16)
    opt = OPTIMIZERS["AdamW"](model.parameters())
    scaler = fxprec.LossScaler("cpu", 2.0**30)
    with watch(model, opt, scaler) as watcher, quiet():
        for number in range(4):
            _switched(model, FAULTS["sqrt's gradient at 0"][0] if number == 2 else torch.relu)
            step(model, opt, batch(number), scaler=scaler)
    (trip,) = watcher.trips
    assert trip.step == 2 and trip.finding is not None and trip.finding.phase == "backward"
    assert (trip.finding.kind, trip.finding.scale) == ("invalid", 1.0)  # it is there without a scale


def test_a_static_scale_that_is_too_large() -> None:
    model, _ = small(F16)
    opt = OPTIMIZERS["AdamW"](model.parameters())
    scaler = fxprec.LossScaler("cpu", 2.0**30, dynamic=False)
    with watch(model, opt, scaler) as watcher, quiet():
        step(model, opt, batch(), scaler=scaler)
    (found,) = watcher.findings
    assert (found.kind, found.scale) == ("scale too large", 2.0**30) and "new_scale=" in found.cure


@pytest.mark.parametrize("on_finding", ["warn", "raise"])
def test_the_floor_tells_the_finding(on_finding: Any) -> None:
    model = made(FAULTS["sqrt's gradient at 0"][0], "plain", F16)
    opt = OPTIMIZERS["AdamW"](model.parameters())
    scaler = fxprec.LossScaler("cpu", 32.0, min_scale=2.0)
    with watch(model, opt, scaler, on_finding=on_finding) as watcher, quiet():
        with pytest.raises(fxprec.LossScaleFloorError) as error:
            for number in range(9):
                try:
                    step(model, opt, batch(number), scaler=scaler)
                except fxprec.NonFiniteError:
                    assert on_finding == "raise" and number < 3
    assert number == 3 and watcher.steps == 4 and len(watcher.findings) == 4
    assert "sqrt in " in str(error.value) and "step 3 was not finite" in str(error.value)
    step(model, opt, batch(), scaler=fxprec.LossScaler("cpu", enabled=False))


def test_outputs_alone_skip_a_scaled_step() -> None:
    """The loss hides what is not finite in an output: the scaler finds nothing."""
    model, _ = small(F16)
    opt = OPTIMIZERS["AdamW, fused"](model.parameters())
    scaler = fxprec.LossScaler("cpu", 256.0)
    loss = lambda out, y: torch.where(out.isfinite(), out, 0).sum()  # noqa: E731
    with watch(model, opt, scaler) as watcher, quiet():
        step(model, opt, batch(), scaler=scaler)
        before = state(model, opt)
        _poisoned = torch.full((4, 6), 1.0)
        model.last.bias.detach()[0] = torch.inf  # type: ignore[union-attr, operator]
        before = state(model, opt)
        step(model, opt, (_poisoned, batch()[1]), scaler=scaler, loss=loss)
        assert same(state(model, opt)[1], before[1])
    assert len(watcher.trips) == 1


def test_a_disabled_scaler_is_none() -> None:
    model, scaler = small()
    assert not scaler.is_enabled()
    opt = OPTIMIZERS["AdamW"](model.parameters())
    with watch(model, opt, scaler) as watcher, quiet():
        before = state(model, opt)[0][:6]
        step(model, opt, bad(), scaler=scaler)
        assert same(state(model, opt)[0][:6], before)
    assert len(watcher.findings) == 1


# -- whole steps, ranks, devices ---------------------------------------------------------------------------------------


def test_a_captured_step() -> None:
    """On a CPU it is a loop; graphs: test_captured_steps.py."""
    results = []
    for watched in (False, True):
        model, scaler = small()
        opt = OPTIMIZERS["ours"](model.parameters())
        with watch(model, opt, scaler) if watched else nullcontext() as watcher, quiet():
            run = fxprec.capture_step(model, F.cross_entropy, opt, scaler, batch())
            for number in range(3):
                run(*batch(number))
            if isinstance(watcher, Watcher):
                before = state(model, opt)
                assert not bool(run(*bad()).isfinite())
                assert same(state(model, opt)[0][:6], before[0][:6]) and same(state(model, opt)[1], before[1])
                (trip,) = watcher.trips
                assert trip.step == 3 and trip.finding is not None and trip.finding.op == "div"
            else:
                results.append(state(model, opt))
        if watched:
            assert same(before, results[0])


class Slow:
    """CPU tensors, as if they lay on a device: a number comes to the host only when somebody waits, or much later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.down, self.waits = False, 0
        monkeypatch.setattr(module, "reading_waits", lambda device: True)
        monkeypatch.setattr("fxprec.numerics.watching.verdicts.reading_waits", lambda device: True)
        monkeypatch.setattr("fxprec.numerics.watching.watch.OnHost", self)

    def of(self, values: Tensor) -> OnHost:
        return OnHost(values.clone(), lambda: not self.down, self._wait)

    def _wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("optimizer", ["AdamW, fused", "SGD, fused", "ours", "ours, clipping", "our SGD"])
@pytest.mark.parametrize("down", [False, True])
def test_a_device_skips_by_itself(monkeypatch: pytest.MonkeyPatch, optimizer: str, down: bool) -> None:
    """Read a step later; until then nothing moves."""
    slow = Slow(monkeypatch)
    model, _ = small()
    opt = OPTIMIZERS[optimizer](model.parameters())
    moved = []
    with watch(model, opt) as watcher, quiet():
        for number in range(7):
            before = [p.detach().clone() for p in model.parameters()], copy.deepcopy(opt.state_dict())
            slow.down = down
            step(model, opt, bad() if number in (0, 3) else batch(number))
            assert not hasattr(opt, "found_inf") and not hasattr(opt, "gradient_check")
            moved.append(not same(before[0], [p.detach() for p in model.parameters()]))
            assert moved[-1] or number == 0 or same(before[1], opt.state_dict())
        slow.down = False
    assert moved == ([False, not down, True, False, not down, True, True])
    assert [(trip.step, trip.finding is None) for trip in watcher.trips] == [(0, False), (3, False)]
    assert slow.waits == (6 if down else 0)


@pytest.mark.parametrize("optimizer", ["AdamW, fused", "ours, clipping"])
def test_two_models_with_one_optimizer_on_a_device(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    Slow(monkeypatch)
    one, two = small()[0], small()[0]
    opt = OPTIMIZERS[optimizer]([*one.parameters(), *two.parameters()])
    moved = []
    with watch(one, opt) as first, watch(two, opt) as second, quiet():
        for data in [*[(batch(), batch())] * 2, (bad(), batch()), (batch(), bad()), (batch(), batch())]:
            before = [p.detach().clone() for p in (*one.parameters(), *two.parameters())]
            opt.zero_grad()
            (F.cross_entropy(one(data[0][0]), data[0][1]) + F.cross_entropy(two(data[1][0]), data[1][1])).backward()
            opt.step()
            assert not hasattr(opt, "found_inf") and not hasattr(opt, "gradient_check")
            moved.append(not same(before, [p.detach() for p in (*one.parameters(), *two.parameters())]))
    assert moved == [True, True, False, False, True]
    assert [len(each.findings) for each in (first, second)] == [1, 1]


def test_two_optimizers_on_a_device_wait_for_no_step_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    model, _ = small()
    first, *rest = model.parameters()
    opts = [OPTIMIZERS["ours"]([first]), OPTIMIZERS["our SGD"](rest)]
    slow.down = True
    with watch(model) as watcher:
        for number in range(3):
            F.cross_entropy(model(batch(number)[0]), batch(number)[1]).backward()
            for opt in opts:
                opt.step()
            assert slow.waits == 2 * number
        slow.down = False
    assert watcher.trips == [] and watcher.steps == 3


def test_an_optimizer_that_cannot_skip_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    Slow(monkeypatch)
    model, scaler = small(F16)
    opt = OPTIMIZERS["AdamW"](model.parameters())
    with pytest.raises(ValueError, match=r"AdamW on CUDA cannot skip a step by itself.* fused=True.* wait=True"):
        watch(model, opt)
    with watch(model), pytest.raises(ValueError, match="cannot skip"):
        step(model, opt, batch())
    with watch(model, opt, scaler):  # which reads its flags anyway
        pass
    before = state(model, opt)[0][:6]
    with watch(model, opt, wait=True) as watcher, quiet():
        step(model, opt, bad())
    assert same(state(model, opt)[0][:6], before) and len(watcher.findings) == 1


def in_two_processes(tools: Any, rank: int, what: str) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    dtype = F16 if what == "scaler" else BF16
    model = made(torch.relu, "plain", dtype) if what == "backward" else fxprec.convert(Small(), dtype=dtype)[0]
    scaler = fxprec.LossScaler("cpu", 256.0, enabled=what == "scaler")
    parallel = DistributedDataParallel(model)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    root = lambda out, y: (out * 0).sqrt().sum() if rank == 0 else F.cross_entropy(out, y)  # noqa: E731
    hidden = lambda out, y: torch.where(out.isfinite(), out, 0).sum()  # noqa: E731
    moved = []
    with watch(model, opt, scaler) as watcher, fxprec.accumulate(model):
        for number in range(4):
            faulty = number == 2
            data = bad() if faulty and rank == 1 and what in FROM_INPUTS else batch(number + 10 * rank)
            before = [p.detach().clone() for p in model.parameters()]
            loss = {"hidden": hidden}.get(what, root if "loss" in what else F.cross_entropy)
            if what == "backward":
                _switched(model, FAULTS["sqrt's gradient at 0"][0] if faulty and rank == 1 else torch.relu)
            opt.zero_grad()
            if "accumulated" in what:
                with parallel.no_sync():
                    F.cross_entropy(parallel(data[0]), data[1]).backward()
            scaler.scale((loss if faulty else F.cross_entropy)(parallel(data[0]), data[1])).backward()
            scaler.step(opt)
            scaler.update()
            moved.append(not same(before, [p.detach() for p in model.parameters()]))
    told = [(trip.step, trip.rank, trip.finding and trip.finding.phase, trip.why) for trip in watcher.trips]
    return rank, moved, told, [p.detach() for p in model.parameters()]


FROM_INPUTS: Final = ("outputs", "hidden", "scaler", "accumulated inputs")


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="wants gloo")
@pytest.mark.parametrize("what", [*FROM_INPUTS, "loss", "accumulated loss", "backward"])
def test_ranks_skip_together(ask_two: Callable[..., list[Any]], what: str) -> None:
    answers = sorted(ask_two(in_two_processes, what), key=lambda answer: answer[0])
    (_, moved, told, parameters), (_, moved_1, told_1, parameters_1) = answers
    assert moved == moved_1 == [True, True, False, True] and same(parameters, parameters_1)
    if "loss" in what:
        assert told == [(2, 0, "loss", "")] and told_1 == [(2, 1, None, "it began on rank 0")]
    else:
        assert told_1 == [(2, 1, "backward" if what == "backward" else "forward", "")]
        # With a scaler this rank cannot tell it from a scale that was too large.
        assert told == ([] if what == "scaler" else [(2, 0, None, "it began on rank 1")])


def seen_at_different_times(tools: Any, rank: int) -> Any:
    """As on a device: what one rank has read by the next call, the other one has not."""
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    with pytest.MonkeyPatch.context() as patched:
        slow = Slow(patched)
        model, _ = small()
        opt = OPTIMIZERS["ours"](model.parameters())
        parallel = DistributedDataParallel(model)
        moved = []
        with watch(model, opt) as watcher:
            for number in range(6):
                slow.down = rank == 0
                before = [p.detach().clone() for p in model.parameters()]
                loss = lambda out, y: (out * 0).sqrt().sum()  # noqa: E731
                loss = loss if number in (2, 5) and rank == 1 else F.cross_entropy
                step(parallel, opt, batch(number + 10 * rank), loss=loss)
                moved.append(not same(before, [p.detach() for p in model.parameters()]))
    return rank, moved, [(trip.step, trip.why) for trip in watcher.trips], [p.detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="wants gloo")
def test_ranks_that_hear_of_it_at_different_times(ask_two: Callable[..., list[Any]]) -> None:
    (_, moved, told, one), (_, moved_1, told_1, other) = sorted(ask_two(seen_at_different_times), key=lambda a: a[0])
    assert moved == moved_1 == [True, True, False, False, True, False] and same(one, other)
    assert told_1 == [(2, ""), (5, "")]
    at_the_end = "run again, it is finite; it began on rank 1, or something in it changes from run to run"
    assert told == [(2, "it began on rank 1"), (5, at_the_end)]  # where nobody is asked any more


# -- arguments, and the end --------------------------------------------------------------------------------------------


def test_how_it_is_told() -> None:
    model, _ = small()
    opt = OPTIMIZERS["AdamW"](model.parameters())
    told: list[Trip] = []
    with watch(model, opt, on_finding=told.append) as watcher:
        step(model, opt, bad())
    assert told == watcher.trips and len(told) == 1
    before = state(model, opt)[0][:6]
    with pytest.raises(fxprec.NonFiniteError, match="step 0 was not finite, and was skipped: forward: truediv"):
        with watch(model, opt, on_finding="raise"):
            step(model, opt, bad())
    assert same(state(model, opt)[0][:6], before) and all(p.grad is not None for p in model.parameters())
    assert issubclass(fxprec.NonFiniteError, FloatingPointError)
    with pytest.warns(fxprec.NonFiniteWarning) as record, watch(model, opt):
        step(model, opt, bad())
    assert record[0].filename == __file__ and "\n  cure: " in str(record[0].message)


def test_leaving_undoes_everything() -> None:
    model, _ = small(F16)
    opt = OPTIMIZERS["AdamW, fused"](model.parameters())
    scaler = fxprec.LossScaler("cpu", 256.0)
    step(model, opt, batch(), scaler=scaler)
    attributes = {*vars(opt)}, {*vars(scaler)}, {*vars(model)}
    optimizers = importlib.import_module("torch.optim.optimizer")
    hooks = dict(optimizers._global_optimizer_pre_hooks)  # low gradients keep one for the process
    for optimizer, fails in ((opt, False), (None, False), (opt, True), (None, True)):
        with pytest.raises(KeyError) if fails else nullcontext():
            with watch(model, optimizer, scaler), quiet():
                step(model, opt, batch(), scaler=scaler)
                copy.deepcopy(scaler), copy.deepcopy(model), pickle.dumps(opt)  # take nothing of the watch along
                output = model(batch()[0])
                assert len(backward_hooks_of(output)) == 1
                F.cross_entropy(output, batch()[1]).backward()
                if fails:
                    raise KeyError("of the loop")
        assert conversion_of(model).watcher is None and scaler._observers == []
        assert [*map(len, step_hooks(opt))] == [0, 0] and len(backward_hooks_of(output)) == 0
        assert optimizers._global_optimizer_pre_hooks == hooks
        assert ({*vars(opt)}, {*vars(scaler)}, {*vars(model)}) == attributes


def test_an_error_of_the_loop_comes_through() -> None:
    model, _ = small()
    opt = OPTIMIZERS["AdamW"](model.parameters())
    with pytest.raises(KeyError), pytest.warns(fxprec.NonFiniteWarning, match="step 0 was not finite: forward"):
        with watch(model, opt, on_finding="raise"):
            F.cross_entropy(model(bad()[0]), batch()[1]).backward()
            raise KeyError("of the loop")


def test_it_can_be_entered_again_but_not_twice() -> None:
    model, _ = small()
    opt = OPTIMIZERS["AdamW"](model.parameters())
    watcher = watch(model, opt)
    with watcher, pytest.raises(RuntimeError, match="Small is watched already"):
        with watch(model):
            pass
    with watcher, quiet():
        step(model, opt, bad())
    assert len(watcher.trips) == 1


def _scaled_without_telling(model: nn.Module) -> None:
    model, scaler = small(F16)
    scaler = fxprec.LossScaler("cpu", 2.0)
    opt = OPTIMIZERS["AdamW, fused"](model.parameters())
    step(model, opt, batch(), scaler=scaler)
    with watch(model, opt):
        step(model, opt, batch(), scaler=scaler)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: watch(nn.Linear(2, 2)), fxprec.ConversionError, "not converted"),
        (lambda m: watch(nn.DataParallel(m)), fxprec.ConversionError, r"wrapped\.module"),
        (lambda m: watch(fxprec.freeze(m)), fxprec.ConversionError, "frozen"),
        (lambda m: watch(m, m.parameters()), TypeError, "optimizer must be a torch.optim.Optimizer or None, not a gen"),
        (lambda m: watch(m, OPTIMIZERS["SGD"]([nn.Parameter(torch.ones(1))])), ValueError, "none of the parameters of"),
        (lambda m: watch(m, torch.optim.LBFGS(m.parameters())), ValueError, "LBFGS moves the parameters several times"),
        (lambda m: watch(m, None, torch.amp.GradScaler("cpu")), TypeError, r"scaler must be a fxprec\.LossScaler or N"),
        (lambda m: watch(m, on_finding="log"), TypeError, "on_finding is 'log'"),
        (_scaled_without_telling, RuntimeError, "a loss scaler steps this AdamW, and watch knows of none"),
    ],
)
def test_errors(call: Callable[[nn.Module], Any], error: type[Exception], text: str) -> None:
    model, _ = small()
    model(batch()[0])
    with pytest.raises(error, match=text):
        call(model.eval())
