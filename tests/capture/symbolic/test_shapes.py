"""Shapes of a traced graph: known where the ops run on fake tensors, else absent; no weight is touched."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import fxprec
from fxprec.capture.symbolic.trace import propagate_shapes, trace_static


def test_shapes_and_input_dtypes_are_recorded_and_nothing_real_moves():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    gm = trace_static(model, ("input",), {}).gm
    assert propagate_shapes(gm, (torch.randn(2, 1, 6, 6, generator=torch.Generator()),))
    nodes = {node.name: node for node in gm.graph.nodes}
    assert nodes["input_1"].meta["dtype"] is torch.float32
    assert nodes["dropout"].meta["val"].shape == (2, 4, 4, 4)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_low_inputs_meet_fp32_weights():
    gm = symbolic_trace(nn.Linear(4, 3))
    assert propagate_shapes(gm, (torch.randn(2, 4, dtype=torch.bfloat16),))
    assert next(iter(gm.graph.nodes)).meta["dtype"] is torch.bfloat16


def test_an_op_that_fails_leaves_no_shapes():
    gm = symbolic_trace(nn.Linear(4, 3))
    assert not propagate_shapes(gm, (torch.randn(2, 5),))
    assert not any("val" in node.meta for node in gm.graph.nodes)


def test_o3_with_example_inputs():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    converted, _ = fxprec.convert(model, (torch.randn(1, 3, 8, 8),), level="O3")
    assert converted(torch.randn(2, 3, 8, 8)).dtype is torch.float32


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_printed_dtypes_are_those_of_the_rewritten_graph(capture):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1))
    converted, _ = fxprec.convert(model, (torch.randn(2, 8),), capture=capture)
    gm = fxprec.graph_module(converted)
    printed = dict(re.findall(r'^ +(\w+): "(\w+)\[\w+, 8\]"', gm.print_readable(print_output=False), re.MULTILINE))
    short = {torch.float32: "f32", torch.bfloat16: "bf16"}
    precisions = {node.name: node.meta["precision"] for node in gm.graph.nodes if node.op != "output"}
    annotated = {name: short[precision.output] for name, precision in precisions.items() if precision.output}
    assert set(printed.values()) == {"f32", "bf16"}
    assert printed.items() <= annotated.items()


class Alike(nn.Module):
    """Parameters that differ from the first in one thing each, and one that differs in nothing."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 6))
        self.same = nn.Parameter(torch.randn(4, 6))
        self.shape = nn.Parameter(torch.randn(8, 6))
        self.strides = nn.Parameter(torch.randn(6, 4).t())
        self.dtype = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        self.fixed = nn.Parameter(torch.randn(4, 6), requires_grad=False)
        self.device = nn.Parameter(torch.empty(4, 6, device="meta"))

    def forward(self, x):
        weights = self.first, self.same, self.shape, self.strides, self.dtype, self.device
        return [weight * x for weight in weights], self.first.requires_grad, self.fixed.requires_grad


def test_every_parameter_has_its_own_shape_strides_and_dtype():
    model = Alike()
    gm = trace_static(model, ("x",), {}).gm
    assert propagate_shapes(gm, (torch.tensor(2.0),))
    weights = gm.graph.find_nodes(op="get_attr")
    assert {node.target for node in weights} == dict(model.named_parameters()).keys()
    for node in weights:
        fake, real = node.meta["val"], model.get_parameter(node.target)
        assert fake.shape == real.shape and fake.stride() == real.stride()
        assert fake.dtype == real.dtype and fake.device == real.device
    asked = [node for node in gm.graph.nodes if "requires_grad" in node.args]
    assert len(asked) == 2
    known = [node.meta["val"] for node in asked if "val" in node.meta]
    assert known == [True, False] or (torch.__version__ < "2.13" and not known)  # which notes tensors only
