"""Put everything back after training steps: the warm-up of a graph, and its capture, change no value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.capture.untouched import ModelState, RandomState
from fxprec.model.warm_up import values_kept
from fxprec.scaling.gradients import late_hooks_aside
from fxprec.torch_internals import set_called, was_called
from fxprec.whole_step.iteration import Iteration
from fxprec.whole_step.scales import scaler_untouched


@contextmanager
def put_back(iteration: Iteration, device: torch.device) -> Iterator[None]:
    """Undo steps of the block on weights, buffers, optimizer, scaler, gradients and random numbers.

    Nor do those who watch the model know of them.

    Tensors keep their memory, which a graph holds the addresses of. State that the optimizer makes in the block stays,
    as zeros, which is how a step makes it; after an exception it goes.

    It holds copies of weights, buffers and optimizer state meanwhile, on their devices.
    """
    optimizer: Any = iteration.optimizer
    with ExitStack() as stack:
        for watcher in iteration.watchers():
            stack.enter_context(watcher.aside())
        stack.enter_context(_attributes_put_back(iteration))
        values = _SavedTensors([*iteration.parameters, *_buffers(iteration)])
        state = _State(optimizer)
        called = was_called(optimizer)
        completed = False
        try:
            with scaler_untouched(iteration.scaler, device):
                yield
            completed = True
        finally:
            values.restore()
            state.restore(keep=completed)
            set_called(optimizer, called)


@contextmanager
def backward_put_back(iteration: Iteration) -> Iterator[None]:
    """Undo forwards and backwards of the block on buffers, gradients and random numbers.

    There are no gradients before, and nobody hears of those that are accumulated.
    """
    with _attributes_put_back(iteration), values_kept(_buffers(iteration)), late_hooks_aside(iteration.parameters):
        iteration.drop_gradients()
        yield


@contextmanager
def _attributes_put_back(iteration: Iteration) -> Iterator[None]:
    """Put back what modules hold, gradients and random numbers."""
    attributes = [(ModelState(root), _classes(root), root) for root in iteration.roots()]
    gradients = [(p, p.grad) for p in iteration.parameters]
    random = RandomState()
    try:
        yield
    finally:
        for each, classes, root in attributes:
            if _classes(root) == classes:  # else its conversion was refused at the first call, and is undone
                each.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random.restore()


def _buffers(iteration: Iteration) -> list[Tensor]:
    return [buffer for root in iteration.roots() for buffer in root.buffers()]


def _classes(root: nn.Module) -> list[type]:
    return [*map(type, root.modules())]


class _SavedTensors:
    """Tensors with copies of their values."""

    def __init__(self, tensors: list[Tensor]) -> None:
        with torch.no_grad():
            self._pairs = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, value in self._pairs:
                tensor.copy_(value)


class _State:
    """State of an optimizer, with copies of its values."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = {owner: {**state} for owner, state in optimizer.state.items()}
        self._values = _SavedTensors(
            [v for state in self._before.values() for v in state.values() if isinstance(v, Tensor)]
        )

    def restore(self, keep: bool) -> None:
        for owner, state in [*self._optimizer.state.items()]:
            before = self._before.get(owner)
            # The graph has the addresses of state that the block made: it stays, at zero as in a first step.
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
