"""Hooks that come and go around captures: they run while they are there, and their graphs go with them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

import fxprec
from fxprec.model.conversion import conversion_of
from fxprec.model.entry_point import MOST_RESTARTS

LOW = torch.bfloat16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Branching(Net):
    """Static capture declines it whatever hooks there are."""

    def forward(self, x):
        return super().forward(x * 2 if x.shape[0] > 100 else x)


def converted(model, capture="dynamo"):
    torch._dynamo.reset()
    return fxprec.convert(copy.deepcopy(model), dtype=LOW, capture=capture).module


def same(ours, plain, x):
    assert torch.allclose(ours(x), plain(x), rtol=0.1, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("early", [True, False], ids=["before the first call", "after"])
@pytest.mark.parametrize("make", [Net, Branching])
def test_graphs_that_broke_on_a_hook_go_with_it(make, early, capture):
    model, x, seen = make(), torch.randn(4, 8), []
    ours = converted(model, capture)
    reference = converted(model, capture)
    reference(x)
    if not early:
        ours(x)
    handles = [
        each.register_forward_hook(lambda m, a, out: seen.append(out.mean().item())) for each in (ours.a, ours.b)
    ]
    for _ in range(2):
        same(ours, model, x)
    headline = fxprec.report(ours).headline
    assert len(seen) == 4 and headline.breaks and headline.graphs > 2
    assert all("test_module_hooks.py" in where or "torch/nn" in where for where in headline.net), headline.net
    for handle in handles:
        handle.remove()
    same(ours, model, x)
    after, expected = fxprec.report(ours).headline, fxprec.report(reference).headline
    assert (after.graphs, after.breaks, after.net) == (1, 0, {})
    assert (after.computes, after.casts) == (expected.computes, expected.casts)
    assert after.not_static == expected.not_static
    assert [captured.guards is None for captured in conversion_of(ours).captured] == [
        captured.guards is None for captured in conversion_of(reference).captured
    ]


def test_a_hook_that_stays_keeps_its_graphs():
    model, x = Net(), torch.randn(4, 8)
    ours = converted(model)
    model.a.register_forward_hook(lambda m, a, out: out * 2)
    ours.a.register_forward_hook(lambda m, a, out: out * 2)
    for _ in range(3):
        same(ours, model, x)
    assert conversion_of(ours).captures == 1 and conversion_of(ours).methods["forward"].restarts == 0


@pytest.mark.slow
def test_a_hook_at_every_other_call_does_not_capture_for_ever():
    model, x = Branching(), torch.randn(4, 8)
    ours = converted(model)
    captures = []
    for _ in range(MOST_RESTARTS + 4):
        handle = ours.a.register_forward_hook(lambda m, a, out: None)
        same(ours, model, x)
        handle.remove()
        same(ours, model, x)
        captures.append(conversion_of(ours).captures)
    assert conversion_of(ours).methods["forward"].restarts == MOST_RESTARTS
    assert not conversion_of(ours).net


REGISTER = {
    "forward": lambda hook: modules.register_module_forward_hook(lambda m, a, out: hook(m, out)),
    "pre": lambda hook: modules.register_module_forward_pre_hook(
        lambda m, a: (hook(m, a[0]),) if isinstance(m, nn.Linear) else None
    ),
    "backward": lambda hook: modules.register_module_full_backward_hook(
        lambda m, inner, outer: (hook(m, inner[0]),) if isinstance(m, nn.Linear) else None
    ),
}


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("early", [True, False], ids=["before the first call", "after"])
def test_hooks_of_all_modules_run_while_they_are_there(early, kind):
    model = Branching()
    ours, x = converted(model), torch.randn(4, 8)
    called = []

    def hook(module, value):
        called.append(type(module))
        return value * 3 if isinstance(module, nn.Linear) else None

    def compare():
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [each(value) for each, value in zip((ours, model), inputs, strict=True)]
        counts = []
        for output in outputs:
            before = len(called)
            output.sum().backward()
            counts.append(len(called) - before)
        assert torch.allclose(*outputs, rtol=0.1, atol=0.3)
        assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=0.1, atol=0.3)
        assert counts[0] == counts[1]

    if not early:
        compare()
    handle = REGISTER[kind](hook)
    try:
        compare()
        compare()
        assert called.count(nn.Linear) >= 12
    finally:
        handle.remove()
    compare()
    conversion = conversion_of(ours)
    assert len(conversion.captured) == 1
    if not early:
        assert conversion.captures == 1
        assert conversion.net == {
            "the whole forward": "hooks for all modules were registered after its capture",
        }
