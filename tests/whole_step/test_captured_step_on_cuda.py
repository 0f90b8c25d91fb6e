"""A whole step as a real CUDA graph: streams, memory, generators and failed captures, which no CPU can show.

The numbers are those of tests/whole_step/test_captured_step.py, compared bit for bit with the usual loop on
the same device.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import captured_tools as tools
import fxprec
from fxprec import optim

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


OURS, THEIRS, same = tools.OURS, tools.THEIRS, tools.same

#: Torch's fused kernels read a rate that is a tensor as FP32: these are numbers that FP32 holds.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "our AdamW": lambda p: optim.AdamW(p, lr=0.03),
    "our SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, max_norm=0.5),
    "torch's AdamW": lambda p: torch.optim.AdamW(p, lr=2.0**-5, fused=True),
    "torch's SGD": lambda p: torch.optim.SGD(p, lr=2.0**-4, momentum=0.9, fused=True),
}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """No autograd graph of an earlier test is alive, nor any work of it on the device."""
    gc.collect()
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def batches(count: int, rows: int = 4) -> list[tuple[Tensor, Tensor]]:
    return tools.batches(count, rows, "cuda")


def training(name: str = OURS, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    made = tools.Training(name, dtype, device="cuda", **options)
    if name in OPTIMIZERS:
        made.optimizer = OPTIMIZERS[name](made.model.parameters())
        made.schedule = torch.optim.lr_scheduler.StepLR(made.optimizer, step_size=2, gamma=0.5)
    return made


def side_by_side(eager: Any, captured: Any, data: list[tuple[Tensor, Tensor]], **options: Any) -> Any:
    step = captured.captured(data[0], **options)
    loop = {{"accumulate": "parts"}.get(name, name): value for name, value in options.items()}
    for x, y in data:
        expected, loss = eager.eager(x, y, **loop), step(x, y)
        eager.schedule.step()
        captured.schedule.step()
        assert same(loss.cpu(), expected.cpu())
        assert same(captured.state()["model"], eager.state()["model"])
        assert same(captured.seen(x), eager.seen(x))
    assert same(captured.state(), eager.state())
    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_are_those_of_the_usual_loop(name: str, dtype: torch.dtype) -> None:
    step = side_by_side(training(name, dtype), training(name, dtype), batches(20))
    assert step.graphs == ("float32[4, 6], int64[4]",)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_watched_steps_are_those_of_the_usual_loop(name: str) -> None:
    eager, captured = training(name), training(name)
    with fxprec.numerics.watch(captured.model, captured.optimizer, captured.scaler) as watcher:
        side_by_side(eager, captured, batches(8))
    assert watcher.trips == [] and watcher.steps == 8


@pytest.mark.filterwarnings("ignore::fxprec.NonFiniteWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_watched_step_is_skipped_and_explained(name: str) -> None:
    made, data, moved = training(name, dropout=0.3), batches(6), []
    data[3] = (data[3][0] * math.inf, data[3][1])
    with fxprec.numerics.watch(made.model, made.optimizer, made.scaler) as watcher:
        step = made.captured(data[0])
        for each in data:
            before = [parameter.detach().clone() for parameter in made.model.parameters()]
            step(*each)
            moved.append(not same(before, [parameter.detach() for parameter in made.model.parameters()]))
    assert moved[:4] == [True, True, True, False] and moved[5]  # the one after it moves if the host had heard of it
    (trip,) = watcher.trips
    assert trip.step == 3 and trip.finding is not None and trip.finding.node == "inputs[0]"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_is_skipped_on_the_device(name: str) -> None:
    data = batches(8)
    data[4] = (data[4][0] * math.inf, data[4][1])
    options: dict[str, Any] = {"dtype": torch.float16, "init_scale": 2.0**8, "growth_interval": 3}
    captured = training(name, **options)
    side_by_side(training(name, **options), captured, data)
    assert captured.scaler.skipped_steps == 1


@pytest.mark.parametrize("name", [OURS, THEIRS])
def test_accumulation_and_a_second_shape(name: str) -> None:
    eager, captured = training(name), training(name)
    step = side_by_side(eager, captured, batches(4, rows=6), accumulate=3)
    for x, y in (*batches(2, rows=9), *batches(2, rows=6)):
        assert same(step(x, y).cpu(), eager.eager(x, y, parts=3).cpu())
    assert len(step.graphs) == 2 and same(captured.state(), eager.state())


def test_clipping_of_torchs_optimizer() -> None:
    options: dict[str, Any] = {"dtype": torch.float16, "init_scale": 16.0}
    side_by_side(training(THEIRS, **options), training(THEIRS, **options), batches(4), max_norm=0.01)


def test_dropouts_are_drawn_anew_and_by_torchs_generator() -> None:
    captured, (x, y) = training(dropout=0.4), batches(1)[0]
    step = captured.captured((x, y))
    captured.optimizer.param_groups[0]["lr"] = 0.0
    torch.manual_seed(7)
    losses = [step(x, y).item() for _ in range(6)]
    assert len(set(losses)) == 6
    torch.manual_seed(7)
    assert [step(x, y).item() for _ in range(6)] == losses


def test_capturing_changes_no_value_and_no_address() -> None:
    captured, (x, y) = training(dtype=torch.float16, dropout=0.2, init_scale=2.0**4, growth_interval=1), batches(1)[0]
    captured.eager(x, y)
    before, random = tools.everything(captured), torch.cuda.get_rng_state()
    addresses = [p.data_ptr() for p in captured.model.parameters()]
    captured.captured((x, y))
    assert same(tools.everything(captured), before) and torch.equal(torch.cuda.get_rng_state(), random)
    assert [p.data_ptr() for p in captured.model.parameters()] == addresses


@pytest.mark.parametrize("name", [OURS, THEIRS])
def test_the_usual_loop_before_between_and_after(name: str) -> None:
    """Shadows of a forward on the default stream are made anew; those of the capture serve the loop too."""
    eager, captured = training(name), training(name)
    data = batches(8)
    for x, y in data[:2]:
        assert same(captured.eager(x, y).cpu(), eager.eager(x, y).cpu())
    step = captured.captured(data[0])
    for number, (x, y) in enumerate(data[2:]):
        one = captured.eager if number % 3 == 2 else step
        assert same(one(x, y).cpu(), eager.eager(x, y).cpu())
    assert same(captured.state(), eager.state())


def test_two_captured_steps_of_one_model_share_their_shadows() -> None:
    eager, captured = training(), training()
    data = batches(8)
    steps = [captured.captured(data[0]), captured.captured(data[0])]
    for number, (x, y) in enumerate(data):
        assert same(steps[number % 2](x, y).cpu(), eager.eager(x, y).cpu())
    assert same(captured.state(), eager.state())


def test_nothing_waits_for_the_device() -> None:
    for name in OPTIMIZERS:
        captured, (x, y) = training(name, torch.float16, init_scale=2.0**8), batches(1)[0]
        step = captured.captured((x, y))
        step(x, y)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for rate in (0.5, 0.25):
                captured.optimizer.param_groups[0]["lr"] = rate
                step(x, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_batches_of_the_host() -> None:
    eager, captured = training(), training()
    step = captured.captured(tools.batches(1)[0])
    for x, y in tools.batches(4):
        expected = eager.eager(x.cuda(), y.cuda())
        assert same(step(x.pin_memory(), y.pin_memory()).cpu(), expected.cpu())
    assert same(captured.state(), eager.state())


@pytest.mark.parametrize("what", ["item", "mask", "host"])
def test_a_capture_that_fails_names_the_line_and_changes_nothing(what: str) -> None:
    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        if what == "item":
            return loss * (2.0 if loss.item() > 1e9 else 1.0)
        if what == "mask":
            return loss + output[output > 0].sum() * 0
        return loss + torch.tensor([0.0]).to(loss.device).sum()

    captured, eager, (x, y) = training(dropout=0.3), training(dropout=0.3), batches(1)[0]
    before, random = tools.everything(captured), torch.cuda.get_rng_state()
    with pytest.raises(fxprec.CaptureError, match=rf"{re.escape(Path(__file__).name)}:\d+ in loss_of"):
        fxprec.capture_step(captured.model, loss_of, captured.optimizer, captured.scaler, (x, y))
    assert same(tools.everything(captured), before) and torch.equal(torch.cuda.get_rng_state(), random)
    for make in (lambda: captured.eager, lambda: captured.captured((x, y))):  # the device is as it was, too
        one = make()
        torch.manual_seed(3)
        expected = eager.eager(x, y)
        torch.manual_seed(3)
        assert same(one(x, y).cpu(), expected.cpu())


def test_what_fails_only_while_a_graph_is_captured_is_put_back_too() -> None:
    """A read that sync debugging does not see, in an event: the generator must be free again afterwards."""

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        return F.cross_entropy(output, target)

    captured, (x, y) = training(dropout=0.3), batches(1)[0]
    before = tools.everything(captured)
    with pytest.raises(fxprec.CaptureError, match="waits for the device"):
        fxprec.capture_step(captured.model, loss_of, captured.optimizer, captured.scaler, (x, y))
    assert same(tools.everything(captured), before)
    torch.rand(3, device="cuda")
    captured.eager(x, y)
    captured.captured((x, y))(x, y)


@pytest.mark.parametrize("name", [OURS, THEIRS])
def test_checkpoints_go_to_the_usual_loop_and_back(name: str) -> None:
    one, other = (training(name, torch.float16, init_scale=4.0, growth_interval=3) for _ in range(2))
    step, data = one.captured(batches(1)[0]), batches(6)
    for batch in data[:3]:
        step(*batch)
    other.load(one.state())
    for batch in data[3:]:
        assert same(step(*batch).cpu(), other.eager(*batch).cpu())
    one.load(other.state())
    assert same(step(*data[0]).cpu(), other.eager(*data[0]).cpu()) and same(one.state(), other.state())


def test_a_capturable_optimizer_of_torch() -> None:
    ends = []
    for graphs in (True, False):
        made = training(THEIRS)
        made.optimizer = torch.optim.AdamW(
            made.model.parameters(), lr=torch.tensor(0.03, device="cuda"), capturable=True
        )
        step = made.captured(batches(1)[0]) if graphs else made.eager
        for x, y in batches(4):
            step(x, y)
        ends.append(made.state()["model"])
    assert same(*ends)


def test_memory_is_shared_by_the_graphs_and_freed_with_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).cuda()
    converted, scaler = fxprec.convert(model, dtype=torch.bfloat16)
    optimizer = optim.AdamW(converted.parameters(), lr=1e-3)
    data = {rows: torch.randn(rows, 512, device="cuda") for rows in (8192, 8191, 8190)}
    step = fxprec.capture_step(converted, lambda o: o.square().mean(), optimizer, scaler, (data[8192],))
    torch.cuda.synchronize()
    one = torch.cuda.memory_reserved()
    for x in data.values():
        step(x)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    three = torch.cuda.memory_reserved()
    assert three < 1.5 * one
    del step
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < three
