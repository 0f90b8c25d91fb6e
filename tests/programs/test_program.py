"""Programs: the rewritten graph as a function of its weights, low ones first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.capture.symbolic.trace import trace_static
from fxprec.passes.context import Context
from fxprec.passes.policy.policy import Policy
from fxprec.passes.runner import run_passes
from fxprec.programs.program import lift

LOW = torch.bfloat16


class Net(nn.Module):
    """A weight that is read low, one that is read both ways, one that is read wide, a buffer, and a constant."""

    def __init__(self):
        super().__init__()
        self.low = nn.Parameter(torch.randn(4, 4))
        self.both = nn.Parameter(torch.randn(4, 4))
        self.wide = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.tensor(2.0))
        self.table = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x):
        y = F.linear(F.linear(x, self.low), self.both)
        return (y.exp() + self.wide + self.both.sum()) * self.scale + self.table


@pytest.fixture
def rewritten():
    gm = trace_static(Net(), ("x",), {}).gm
    return run_passes(gm, Context(low=LOW, policy=Policy.preset("O1")))


def test_weights_are_arguments_low_ones_first(rewritten):
    program = lift(rewritten, LOW)
    assert program.low == ("low", "both")
    assert program.plain == ("both", "wide", "scale")
    names = [node.name for node in program.gm.graph.find_nodes(op="placeholder")]
    assert names == ["low_low", "low_both", "plain_both", "plain_wide", "plain_scale", "x"]
    assert [node.target for node in program.gm.graph.find_nodes(op="get_attr")] == ["table"]
    x = torch.randn(2, 4)
    low = [rewritten.get_parameter(name).to(LOW) for name in program.low]
    plain = [getattr(rewritten, name) for name in program.plain]
    assert torch.equal(program.function(*low, *plain, x), rewritten(x))  # which still stands on its own


def test_a_program_takes_whatever_stands_in_for_a_weight(rewritten):
    program = lift(rewritten, LOW)
    zeros = [torch.zeros(4, 4, dtype=LOW)] * 2
    output = program.function(*zeros, torch.zeros(4, 4), torch.ones(4), torch.tensor(1.0), torch.randn(2, 4))
    assert torch.equal(output, (2 + rewritten.table).expand(2, 4))


def test_only_casts_of_parameters_to_the_low_dtype_are_left_out(rewritten):
    assert lift(rewritten, torch.float16).low == ()
    for node in rewritten.graph.find_nodes(op="get_attr"):
        node.meta["kind"] = "buffer"
    program = lift(rewritten, LOW)
    assert program.low == () and "low" in program.plain


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_a_checkpoint_recomputes_with_the_same_random_numbers(tools):
    model, _ = fxprec.convert(Recomputed())
    x = torch.randn(2, 8)
    torch.manual_seed(5)
    model(x).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(5)
    model.inner(x).sum().backward()  # neither converted nor checkpointed
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=0.05, rtol=0.05)
    # two in the forward, one more in the recomputation (the last one's result is not needed), three in the backward
    assert tools.matmul_dtypes(lambda: model(x).sum().backward()) == {LOW: 2 + 1 + 3}


class Named(nn.Module):
    """Paths that are no names, and that become the same one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("layer-1", "layer 1", "layer_1")})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_paths_that_are_no_names():
    model = Named()
    expected = model(torch.ones(2, 3))
    fxprec.convert(model)
    torch.testing.assert_close(model(torch.ones(2, 3)), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("arguments", "idle"),
    [
        ({"p": 0.0}, True),
        ({"p": 0.0, "training": True, "inplace": True}, True),
        ({"training": False}, True),
        ({"p": 0.5, "training": False}, True),
        ({}, False),
        ({"p": 1.0}, False),
    ],
    ids=str,
)
def test_dropouts_that_do_nothing_are_left_out(arguments, idle):
    def forward(x):
        return F.dropout(F.relu(x), *[arguments["p"]] if "p" in arguments else [], **_without(arguments, "p")) + 1

    gm = run_passes(trace_static(_Function(forward), ("x",), {}).gm, Context(low=LOW, policy=Policy.preset("O1")))
    program = lift(gm, LOW)
    assert any(node.target is F.dropout for node in gm.graph.nodes)  # what one reads keeps it
    assert any(node.target is F.dropout for node in program.gm.graph.nodes) is not idle
    x = torch.randn(50)
    if idle:
        assert torch.equal(program.function(x), forward(x))
    else:
        assert not torch.equal(program.function(x), F.relu(x) + 1)


def _without(arguments, name):
    return {key: value for key, value in arguments.items() if key != name}


class _Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_a_program_calls_the_bodies_of_graph_calls():
    """Nobody traces it: the question for proxies, asked at each norm of each call, would cost what a small op costs."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(2, 8)
    fxprec.convert(model, (x,), dtype=torch.bfloat16)
    assert any(hasattr(node.target, "is_graph_call") for node in fxprec.graph_module(model).graph.nodes)
    model(x)
    entered: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        model(x)
    finally:
        sys.setprofile(before)
    files = [Path(name).name for name in entered]
    assert "layer_norm.py" in files and "graph_call.py" not in files
