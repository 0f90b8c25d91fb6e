"""FP32 masters in the places of an optimizer's low parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxprec.amp.fp16_optimizer import copy_masters, saved_masters, with_masters

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def parameters(*dtypes):
    return [nn.Parameter(torch.randn(3).to(dtype)) for dtype in dtypes]


def test_masters_take_the_places_of_low_parameters_in_their_groups():
    a, b, c, d = parameters(F16, F32, BF16, F16)
    d.requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": [a, b]}, {"params": [c, d], "lr": 0.5}], lr=0.1)
    first, second = with_masters(optimizer)
    assert (first.low, first.fp32, second.low, second.fp32) == ([a], [b], [c], [])
    groups = [group["params"] for group in optimizer.param_groups]
    assert groups[0][0] is first.masters[0] and groups[0][1] is b
    assert groups[1][0] is second.masters[0] and groups[1][1] is d
    for low, master in ((a, first.masters[0]), (c, second.masters[0])):
        assert master.dtype is F32 and master.requires_grad and master.is_leaf
        assert torch.equal(master, low.float())
    assert [*first.low, *second.low] == [a, c]


def test_state_that_exists_follows_in_fp32():
    (a,) = parameters(BF16)
    optimizer = torch.optim.SGD([a], lr=0.1, momentum=0.9)
    a.grad = torch.ones_like(a)
    optimizer.step()
    (group,) = with_masters(optimizer)
    assert list(optimizer.state) == group.masters
    buffer = optimizer.state[group.masters[0]]["momentum_buffer"]
    assert buffer.dtype is F32 and buffer.tolist() == [1, 1, 1]


def test_another_dtype_is_refused_and_nothing_changes():
    a, b = parameters(F16, torch.float64)
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    with pytest.raises(TypeError, match=r"param_groups\[0\]\['params'\]\[1\] is torch.float64"):
        with_masters(optimizer)
    assert optimizer.param_groups[0]["params"] == [a, b]


def test_masters_are_copied_back_rounded():
    a, b = parameters(BF16, F16)
    masters = [torch.full((3,), 1 + 2.0**-9), torch.full((3,), 1 + 2.0**-9)]
    copy_masters([(a, masters[0]), (b, masters[1])])
    copy_masters([])
    assert a.tolist() == [1.0] * 3 and b.tolist() == [1 + 2.0**-9] * 3 and a.requires_grad


def test_saved_masters_must_fit():
    groups = [[torch.zeros(2), torch.zeros(3)], []]
    assert [m.shape[0] for m in saved_masters([[torch.ones(2), torch.ones(3)], []], groups)] == [2, 3]
    for bad in ([[torch.ones(2)], []], [[torch.ones(2), torch.ones(4)], []], [[torch.ones(2), torch.ones(3)]]):
        with pytest.raises(RuntimeError, match="the saved masters have the shapes"):
            saved_masters(bad, groups)
