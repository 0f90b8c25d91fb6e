"""Leave a model as it was: whatever is asked of it, parameters, buffers, gradients and random numbers stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

from fxprec.capture.untouched import ModelState, RandomState
from fxprec.model.module import conversion_of
from fxprec.model.warm_up import values_kept
from fxprec.scaling.gradients import late_hooks_aside


@contextlib.contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Give a model no gradients while the context lasts, and put all back after it, random number generators too.

    A backward of a call that was made before finds what it read. Nobody hears of gradients that are accumulated
    within: such hooks step optimizers.
    """
    conversion = conversion_of(model)
    state, random, calls = ModelState(model), RandomState(), conversion.calls
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    writes = any(captured.program.writes_weights for captured in conversion.captured)
    written = [*model.buffers(), *(model.parameters() if writes else ())]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        values = values_kept(tensor for tensor in written if not is_lazy(tensor))
        with late_hooks_aside(parameter for parameter, _ in gradients), values:
            yield
    finally:
        if writes:
            conversion.store.mark_stale()  # a version that a shadow knows may come again, with other values
        state.restore()
        random.restore()
        conversion.calls = calls
        for parameter, gradient in gradients:
            parameter.grad = gradient
