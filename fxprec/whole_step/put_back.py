"""Everything as it was before some training steps: the warm-up of a graph, and its capture, change no value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.capture.untouched import ModelState, RandomState
from fxprec.torch_internals import set_called, was_called
from fxprec.whole_step.iteration import Iteration
from fxprec.whole_step.scales import scaler_untouched


@contextmanager
def put_back(iteration: Iteration, device: torch.device) -> Iterator[None]:
    """Steps in the block leave no trace on weights, buffers, optimizer, scaler, gradients and random numbers.

    Tensors keep their memory, which a graph holds the addresses of. State that the optimizer makes in the block stays,
    as zeros, which is how a step makes it; after an exception it goes.

    It holds copies of weights, buffers and optimizer state meanwhile, on their devices.
    """
    optimizer: Any = iteration.optimizer
    attributes = [(ModelState(root), _classes(root), root) for root in iteration.roots()]
    buffers = [buffer for root in iteration.roots() for buffer in root.buffers()]
    values = _Values([*iteration.parameters, *buffers])
    gradients = [(p, p.grad) for p in iteration.parameters]
    state = _State(optimizer)
    called = was_called(optimizer)
    random = RandomState()
    completed = False
    try:
        with scaler_untouched(iteration.scaler, device):
            yield
        completed = True
    finally:
        for each, classes, root in attributes:
            if _classes(root) == classes:  # else its conversion was refused at the first call, and is undone
                each.restore()
        values.restore()
        state.restore(keep=completed)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        set_called(optimizer, called)
        random.restore()


def _classes(root: nn.Module) -> list[type]:
    return [*map(type, root.modules())]


class _Values:
    """Tensors and what they held."""

    def __init__(self, tensors: list[Tensor]) -> None:
        with torch.no_grad():
            self._pairs = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, value in self._pairs:
                tensor.copy_(value)


class _State:
    """The state of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = {owner: {**state} for owner, state in optimizer.state.items()}
        self._values = _Values([v for state in self._before.values() for v in state.values() if isinstance(v, Tensor)])

    def restore(self, keep: bool) -> None:
        for owner, state in [*self._optimizer.state.items()]:
            before = self._before.get(owner)
            if before:
                state.update(before)
            elif keep:
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()
            elif before is None:
                del self._optimizer.state[owner]
            else:
                state.clear()
        self._values.restore()
