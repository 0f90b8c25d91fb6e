"""Leave a model as it was: whatever is asked of it, parameters, buffers, gradients and random numbers stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fxprec.capture.untouched import ModelState, RandomState
from fxprec.model.module import conversion_of
from fxprec.model.warm_up import buffers_kept


@contextlib.contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Within, the model has no gradients; afterwards all is as before, the random number generators too."""
    conversion = conversion_of(model)
    state, random, calls = ModelState(model), RandomState(), conversion.calls
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    writes = any(captured.program.writes_weights for captured in conversion.captured)
    weights = [(parameter, parameter.detach().clone()) for parameter in model.parameters()] if writes else []
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with buffers_kept(model):
            yield
    finally:
        with torch.no_grad():
            for parameter, value in weights:
                parameter.copy_(value)
        state.restore()
        random.restore()
        conversion.calls = calls
        for parameter, gradient in gradients:
            parameter.grad = gradient
