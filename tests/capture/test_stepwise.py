"""Forwards that run after they have returned: every step is in the net, none outside, and values are the original's."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools

import pytest
import torch
from torch import nn

import fxprec
from fxprec.model.conversion import conversion_of

LOW = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::fxprec.ServiceWarning")


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.log = []


class Yields(Layers):
    def forward(self, x):
        try:
            for layer in self.layers:
                x = layer(x)
                try:
                    sent = yield x
                except ValueError:
                    sent = 3.0
                self.log.append(sent)
                if sent is not None:
                    x = x * sent
        finally:
            self.log.append("end")
        return self.layers[0](x)


class GivesAnExpression(Layers):
    def forward(self, x):
        return (layer(x) for layer in self.layers)


class GivesAMap(Layers):
    def forward(self, x):
        return map(lambda layer: layer(x), self.layers)


class GivesAnIterator(Layers):
    def forward(self, x):
        return itertools.accumulate(self.layers, lambda x, layer: layer(x), initial=x)


class Within(Layers):
    def forward(self, x):
        return {"first": self.layers[0](x), "rest": (layer(x) for layer in self.layers)}


class WithoutGradients(Layers):
    @torch.no_grad()
    def forward(self, x):
        for layer in self.layers:
            yield layer(x)


class Awaits(Layers):
    async def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            await asyncio.sleep(0)
        return x


class YieldsAsynchronously(Layers):
    async def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            await asyncio.sleep(0)
            yield x


def gathered(output):
    """All values, and that nobody else runs under autocast between two steps."""
    if inspect.iscoroutine(output):
        return [asyncio.run(_beside(output))]
    if hasattr(output, "__aiter__"):
        return asyncio.run(_beside(_all(output)))
    values = [output.pop("first")] if isinstance(output, dict) else []
    for value in output["rest"] if isinstance(output, dict) else output:
        assert not torch.is_autocast_enabled("cpu")
        values.append(value)
    return values


async def _all(output):
    return [value async for value in output]


async def _beside(awaitable):
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        assert not torch.is_autocast_enabled("cpu")
        await asyncio.sleep(0)
    return task.result()


KINDS = [
    Yields,
    GivesAnExpression,
    GivesAMap,
    GivesAnIterator,
    Within,
    WithoutGradients,
    Awaits,
    YieldsAsynchronously,
]


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_lowered_and_gives_the_original_dtype(kind, capture, tools):
    model = kind()
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture=capture).module
    x = torch.randn(4, 8)
    for _ in range(2):
        theirs, ours = model(x), converted(x)
        assert type(ours) is type(theirs) or kind in (GivesAMap, GivesAnIterator)  # which come as generators
        expected, values = gathered(theirs), gathered(ours)
        assert len(values) == len(expected)
        for ours, theirs in zip(values, expected, strict=True):
            assert ours.dtype is torch.float32
            assert ours.requires_grad == theirs.requires_grad
            assert torch.allclose(ours, theirs, atol=0.1)
    assert converted.log == model.log
    assert torch.float32 not in tools.matmul_dtypes(lambda: gathered(converted(x)))


def test_send_throw_close_and_the_value_of_return():
    model = Yields()
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW).module
    x = torch.randn(4, 8)
    results = []
    for each in (model, converted):
        steps = each(x)
        values = [next(steps), steps.send(2.0), steps.throw(ValueError("now"))]
        with pytest.raises(StopIteration) as stop:
            steps.send(1.0)
        results.append([*values, stop.value.value])
        stopped = each(x)
        next(stopped)
        stopped.close()
        failing = each(x)
        next(failing)
        with pytest.raises(KeyError):
            failing.throw(KeyError("k"))
    assert converted.log == model.log == [2.0, 3.0, 1.0, "end", "end", "end"]
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype is torch.float32 and torch.allclose(ours, theirs, atol=0.2)


def test_steps_train():
    model = Yields()
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW).module
    x = torch.randn(4, 8)
    for each in (model, converted):
        torch.stack([value.square().mean() for value in each(x)]).sum().backward()
    for ours, theirs in zip(converted.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=0.1, atol=0.01)


@pytest.mark.filterwarnings("error")
def test_the_report_and_one_warning_say_why():
    converted = fxprec.convert(Yields(), dtype=LOW).module
    with pytest.warns(fxprec.ServiceWarning, match="the forward is a generator") as caught:
        converted(torch.randn(4, 8))
    assert caught[0].filename == __file__
    converted(torch.randn(4, 8))  # only once
    assert "the forward is a generator, which runs after the call" in str(fxprec.report(converted))
    fxprec.convert(Awaits(), dtype=LOW)  # nobody awaits what a trace of it would make
    with pytest.raises(fxprec.CaptureError, match="the forward is a generator"):
        fxprec.convert(Yields(), capture="symbolic").module(torch.randn(4, 8))


def test_what_is_given_step_by_step_is_recorded():
    converted = fxprec.convert(GivesAnExpression(), dtype=LOW).module
    converted(torch.randn(4, 8))
    assert "which runs after the call" in str(conversion_of(converted).net)
    assert conversion_of(converted).declined == ["returns a generator, which runs after the call"]
