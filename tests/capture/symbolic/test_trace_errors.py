"""Whatever a forward raises while it is traced declines the trace: it is the calls that raise, or do not."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

import fxprec
from fxprec.capture.capturing import CaptureDeclined
from fxprec.capture.symbolic.trace import trace_static


class Stop(BaseException):
    pass


class AtFirst(nn.Module):
    """Raises at its first call: which is no trace, whose writes are undone."""

    def __init__(self, error):
        super().__init__()
        self.l, self.first, self.error = nn.Linear(8, 8), True, error

    def forward(self, x):
        if self.first:
            self.first = False
            raise self.error
        return self.l(x)


X = torch.randn(4, 8)


@pytest.mark.parametrize("error", [Stop, asyncio.CancelledError, GeneratorExit, ValueError, StopIteration])
def test_it_declines_the_trace_and_the_first_call_raises(error):
    torch._dynamo.reset()
    with pytest.raises(CaptureDeclined):
        trace_static(AtFirst(error), ["x"], {})
    model = fxprec.convert(AtFirst(error), dtype=torch.bfloat16).module
    assert model.first
    with pytest.raises(error):
        model(X)
    assert not model.first
    assert model(X).dtype is torch.float32
    assert fxprec.report(model).headline.graphs


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_comes_through(error):
    model = AtFirst(error)
    with pytest.raises(error):
        fxprec.convert(model, dtype=torch.bfloat16)
    assert model.first and type(model) is AtFirst
    with pytest.raises(error):
        model(X)
    assert fxprec.convert(model, dtype=torch.bfloat16).module(X).shape == (4, 8)
