"""Weights that become another dtype, or go elsewhere."""

from __future__ import annotations

import torch
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Two, net

CASES = case = Cases("dtypes_of_weights")


@case(no_twin="it becomes float64 on the way")
def to_double(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(m, x)
    m.double()
    t.backward(t(m, x.double()))
    m.float()
    t(m, x)


@case(no_twin="it becomes float64 on the way")
def to_double_with_ids(t: Run):
    m, ids = t.convert(nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4))), torch.tensor([0, 3, 1])
    t(m, ids)
    m.double()
    t.backward(t(m, ids))


@case(no_twin="it becomes bfloat16 on the way", no_autocast="the model is low by then")
def to_low_with_ids(t: Run):
    m, ids = t.convert(nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4))), torch.tensor([0, 3, 1])
    t(m, ids)
    m.bfloat16()
    t(m, ids)


@case(no_twin="it becomes bfloat16 on the way", no_autocast="the model is low by then")
def to_low(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(m, x)
    m.to(torch.bfloat16)
    t(m, x.bfloat16())
    m.float()
    t(m, x)


@case(no_twin="one layer becomes float64 on the way")
def one_layer_to_double(t: Run):
    m, x = t.convert(net(lambda s, x: s.r(s.l(x).double()), Two)), t.randn(4, 8)
    m.r.double()
    t.backward(t(m, x))


@case
def to_the_same_device(t: Run):
    t.changes(Two(), lambda m: m.to("cpu"), lambda m: m.cpu())


@case
def to_channels_last(t: Run):
    m, x = t.convert(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))), t.randn(2, 2, 5, 5)
    t.backward(t(m, x))
    m.to(memory_format=torch.channels_last)
    t.backward(t(m, x.to(memory_format=torch.channels_last)))


@case
def to_meta_and_back(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(m, x)
    state = {name: value.clone() for name, value in m.state_dict().items()}
    m.to_empty(device="cpu")
    m.load_state_dict(state)
    t.backward(t(m, x))
