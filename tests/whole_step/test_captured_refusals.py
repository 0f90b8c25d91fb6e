"""What a captured step refuses: optimizers, arguments, several devices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import captured_tools as tools
import fxprec
from fxprec import optim

Net, Training = tools.Net, tools.Training
batches, recorder, same = tools.batches, tools.recorder, tools.same


@pytest.mark.parametrize(
    ("optimizer", "scaler", "said"),
    [
        (lambda p: torch.optim.AdamW(p), None, r"AdamW reads its learning rate.*fxprec.optim.AdamW"),
        (lambda p: torch.optim.SGD(p, lr=0.1), None, r"SGD reads its learning rate.*fused=True"),
        (lambda p: torch.optim.Adagrad(p), None, r"Adagrad reads.*an optimizer of fxprec.optim"),
        (lambda p: torch.optim.Adam(p, capturable=True), "enabled", r"Adam cannot skip a step on the device"),
        (lambda p: torch.optim.RMSprop(p, capturable=True), None, "take one step before capture_step"),
        (lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.5), None, "the first step of SGD with dampening"),
    ],
)
def test_optimizers_that_no_graph_holds(optimizer: Any, scaler: Any, said: str, recorder: Any) -> None:
    model = Net()
    scaling = None if scaler is None else fxprec.LossScaler("cpu")
    with pytest.raises(fxprec.CaptureError, match=said):
        fxprec.capture_step(model, F.cross_entropy, optimizer(model.parameters()), scaling, batches(1)[0])


def test_a_step_that_somebody_wrapped_is_refused(recorder: Any) -> None:
    training = Training()
    before = training.optimizer.step
    training.optimizer.step = lambda *args: before(*args)  # type: ignore[method-assign]
    with pytest.raises(fxprec.CaptureError, match="step of this AdamW was replaced"):
        training.captured(batches(1)[0])


def test_momentum_with_dampening_is_captured_once_it_runs(recorder: Any) -> None:
    results = []
    for graphs in (True, False):
        training = Training()
        training.optimizer = optim.SGD(training.model.parameters(), 0.1, momentum=0.9, dampening=0.5)
        training.eager(*batches(1)[0])
        step = training.captured(batches(1)[0]) if graphs else training.eager
        results.append([step(*batch) for batch in batches(3)])
    assert same(*results)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"model": F.relu}, TypeError, "takes a module, not a"),
        ({"optimizer": None}, TypeError, "not a NoneType"),
        ({"scaler": 2.0}, TypeError, "not a float"),
        ({"loss_fn": 3}, TypeError, "loss_fn must be callable"),
        ({"accumulate": 0}, ValueError, "accumulate must be a whole number of at least 1, not 0"),
        ({"accumulate": 3}, ValueError, r"3 equal parts.*4 \(argument 0\), 4 \(argument 1\)"),
        ({"max_norm": -1.0}, ValueError, "max_norm must be greater than 0"),
        ({"example_batch": torch.ones(2)}, TypeError, r"write \(x, y\)"),
        ({"example_batch": ()}, TypeError, "got none"),
        ({"example_batch": (torch.ones(4, 6), [1])}, TypeError, "argument 1 is a list"),
        ({"example_batch": (torch.ones(4, 6), (torch.ones(4), 1))}, TypeError, "argument 1 is a tuple.*one by one"),
        ({"max_graphs": 0}, ValueError, "max_graphs must be a whole number of at least 1, not 0"),
        ({"example_batch": (torch.ones(4, 6, requires_grad=True), 1)}, ValueError, r"argument 0.*detach"),
        ({"example_batch": (torch.ones(4, 6).to_sparse(), 1)}, TypeError, "argument 0.*sparse"),
        ({"loss_fn": lambda o, y: o}, TypeError, r"what loss_fn returned must be the loss.*float32\[4, 3\]"),
        ({"loss_fn": None, "example_batch": (torch.ones(4, 6),)}, TypeError, "the output of the model"),
    ],
)
def test_arguments_are_checked(change: dict[str, Any], error: type[Exception], said: str) -> None:
    training = Training()
    given = {"model": training.model, "loss_fn": F.cross_entropy, "optimizer": training.optimizer, "scaler": None}
    step = None
    with pytest.raises(error, match=said):
        step = fxprec.capture_step(**{**given, "example_batch": batches(1)[0], **change})
        step(*{**given, "example_batch": batches(1)[0], **change}["example_batch"])
    assert step is None or "loss_fn" in change


def test_gradients_of_parameters_that_nobody_named_are_refused(recorder: Any) -> None:
    training, (x, _) = Training(init_scale=4.0), batches(1)[0]
    judge, before = nn.Linear(3, 1), tools.everything(training)

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (judge(output) - target).square().mean()

    batch = x, torch.ones(4, 1)
    with pytest.raises(fxprec.CaptureError, match=r"parameter of shape \(1, 3\).*requires_grad_\(False\)"):
        fxprec.capture_step(training.model, loss_of, training.optimizer, training.scaler, batch)
    assert judge.weight.grad is None and same(tools.everything(training), before)
    judge.requires_grad_(False)
    step = fxprec.capture_step(training.model, loss_of, training.optimizer, training.scaler, batch)
    assert step(*batch) > step(*batch)


def test_a_buffer_that_a_forward_replaces_is_refused(recorder: Any) -> None:
    class Mean(Net):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.in_place = in_place
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            mean = self.mean * 0.9 + output.detach().mean(0) * 0.1
            if self.in_place:
                self.mean.copy_(mean)
            else:
                self.mean = mean
            return output

    model, batch = Mean(in_place=False), batches(1)[0]
    held = model.mean
    with pytest.raises(fxprec.CaptureError, match=r"replaces the buffer mean.*self\.mean\.copy_"):
        fxprec.capture_step(model, F.cross_entropy, optim.SGD(model.parameters(), lr=0.1), None, batch)
    assert model.mean is held and not held.any()
    model = Mean(in_place=True)
    fxprec.capture_step(model, F.cross_entropy, optim.SGD(model.parameters(), lr=0.1), None, batch)(*batch)
    assert model.mean.all()


def test_contradictions_are_refused() -> None:
    training = Training("our Adam, clipping")
    with pytest.raises(ValueError, match=r"max_norm=1.0 and an optimizer with max_norm=0.3"):
        training.captured(batches(1)[0], max_norm=1.0)
    other = Training()
    training.optimizer = other.optimizer
    with pytest.raises(ValueError, match="none of the optimizer's parameters belongs to the model"):
        training.captured(batches(1)[0])
    parallel = nn.DataParallel(other.model)
    with pytest.raises(fxprec.CaptureError, match="DataParallel"):
        fxprec.capture_step(parallel, F.cross_entropy, other.optimizer, None, batches(1)[0])
    ranks = fxprec.LossScaler("cpu", process_group=object())
    with pytest.raises(fxprec.CaptureError, match="in one process, and this model has several ranks"):
        fxprec.capture_step(other.model, F.cross_entropy, other.optimizer, ranks, batches(1)[0])
    moved = Net()
    optimizer = torch.optim.SGD(moved.parameters(), 0.1)
    moved.norm.to("meta")
    with pytest.raises(fxprec.CaptureError, match="on cpu, meta"):
        fxprec.capture_step(moved, F.cross_entropy, optimizer, None, batches(1)[0])


def test_a_captured_step_is_not_copied() -> None:
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(Training().captured(batches(1)[0]))
