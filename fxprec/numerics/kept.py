"""Leave a model as it was: whatever is asked of it, parameters, buffers, gradients and random numbers stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fxprec.capture.untouched import ModelState, RandomState
from fxprec.model.module import conversion_of
from fxprec.model.warm_up import buffers_kept
from fxprec.torch_internals import late_hooks_of


@contextlib.contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Within, the model has no gradients; afterwards all is as before, the random number generators too.

    Nobody hears of gradients that are accumulated within: such hooks step optimizers.
    """
    conversion = conversion_of(model)
    state, random, calls = ModelState(model), RandomState(), conversion.calls
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    writes = any(captured.program.writes_weights for captured in conversion.captured)
    weights = [(parameter, parameter.detach().clone()) for parameter in model.parameters()] if writes else []
    hooks = [(held, {**held}) for parameter, _ in gradients if (held := late_hooks_of(parameter))]
    for parameter, _ in gradients:
        parameter.grad = None
    for held, _ in hooks:
        held.clear()
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
        for held, those in hooks:
            held.update(those)
        for parameter, gradient in gradients:
            parameter.grad = gradient
