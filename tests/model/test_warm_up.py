"""Example inputs: the graph exists, and nothing else of the model or of the process moved."""

from __future__ import annotations

import copy
import logging
import random

import pytest
import torch
from torch import nn

import fxprec

LOW = torch.bfloat16


class Busy(nn.Module):
    """Writes whatever a forward can write."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.calls = 0
        self.seen = []
        self.last = None
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mask", None)
        self.register_buffer("wide", torch.zeros(1).expand(4))  # several elements in one place: no copy into it

    def forward(self, x):
        self.calls += 1
        self.seen.append(1)
        self.last = x
        self.count += 1
        if self.mask is None:
            self.mask = torch.ones(x.shape[0], 1)
        x = x * random.choice([1.0, 1.0]) + torch.rand(()) * 0
        return self.norm(self.fc(x)) * self.mask + self.wide.sum()


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.filterwarnings("error")
def test_nothing_moves(tools, capture):
    model = Busy()
    state = copy.deepcopy(model.state_dict())
    attributes = dict(model.__dict__)
    random.seed(3)
    generators = random.getstate(), torch.get_rng_state()
    x = torch.randn(4, 8, generator=torch.Generator())
    fxprec.convert(model, (x,), capture=capture)
    assert (random.getstate(), model.calls, model.seen, model.last, model.mask) == (generators[0], 0, [], None, None)
    assert torch.equal(torch.get_rng_state(), generators[1])
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(model.__dict__[name] is value for name, value in attributes.items())
    model(x)
    assert (model.calls, model.seen, model.count.item()) == (1, [1], 1)
    assert tools.matmul_dtypes(model, x) == {LOW: 1}


def test_lazy_modules_take_their_shapes(tools):
    for capture in ("auto", "dynamo"):
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(8, 4))
        fxprec.convert(model, (torch.randn(3, 5),), capture=capture)
        assert type(model[0]) is nn.Linear and model[0].weight.shape == (8, 5)
        assert model[1].num_batches_tracked == 0 and torch.equal(model[1].running_var, torch.ones(8))
        assert tools.matmul_dtypes(model, torch.randn(3, 5)) == {LOW: 2}


def test_lazy_modules_without_examples(tools):
    model, _ = fxprec.convert(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 4)))
    x = torch.randn(3, 5)
    model(x).sum().backward()
    assert list(fxprec.report(model).headline.net) == ["the whole forward"]
    assert model[0].weight.grad is not None
    assert tools.matmul_dtypes(model, x) == {LOW: 2}


def test_an_error_of_the_model_puts_everything_back():
    model = Busy()
    attributes = dict(model.__dict__)
    hook = model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"\(4, 9\)"):
        fxprec.convert(model, (torch.randn(4, 9),))
    hook.remove()
    assert type(model) is Busy
    assert model.__dict__.keys() == attributes.keys()
    assert all(model.__dict__[name] is value for name, value in attributes.items())
    assert (model.calls, model.seen) == (0, [])


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_an_error_of_the_model_is_told_once(capture: str):
    """Without what torch logs of an op that fails on fake tensors: twenty lines before the error."""
    logged: list[logging.LogRecord] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record)

    log, listening = logging.getLogger("torch._subclasses.fake_tensor"), Listening()
    log.addHandler(listening)
    try:
        with pytest.raises(ValueError, match="mat1 and mat2"):
            fxprec.convert(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 5),), capture=capture)
    finally:
        log.removeHandler(listening)
    assert not logged
    assert not log.disabled


def test_shapes_that_depend_on_values(tools):
    """Fake tensors cannot know them: the costs go without, the call does not fail."""

    class Select(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x[x[:, 0] > 0])

    model, _ = fxprec.convert(Select(), (torch.randn(4, 8),))
    x = torch.randn(6, 8)
    assert model(x).shape == (int((x[:, 0] > 0).sum()), 8)
    assert tools.matmul_dtypes(model, x) == {LOW: 1}
