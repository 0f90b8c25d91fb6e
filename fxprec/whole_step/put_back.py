"""Undo training steps, so that a graph's warm-up and capture change no value; and repeat one that a watch asks about.

The graph holds what a watched step (``fxprec.numerics.watch``) has the device do: a reduction for each output, a flag
of the gradients, the skip. A step that was not finite runs once more without the graph, when the host hears of it: the
parameters have not moved, and what else it takes is kept here from before the replay. What is kept of an older step
goes with its numbers. ::

    replay of step 4       batch, random state and buffers of 3 and 4 are kept
    numbers of 3 come      all is well: those of 3 go
    replay of step 5
    numbers of 4 come      inf: 4 runs again, on what is kept of it; 5 was skipped, too
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.capture.untouched import ModelState, RandomState
from fxprec.model.entry_point import CallWatcher
from fxprec.model.warm_up import values_kept
from fxprec.scaling.gradients import late_hooks_aside
from fxprec.torch_internals import foreach_copy_, set_called, was_called
from fxprec.whole_step.iteration import Batch, Iteration, scaler_untouched


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
        # Clones are read back into the same memory, whose addresses a graph holds.
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
def _attributes_put_back(iteration: Iteration) -> Iterator[None]:
    """Put back what modules hold, gradients and random numbers."""
    # A forward may cache tensors on modules: of a warm-up they would be other ones.
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
        values = (value for state in self._before.values() for value in state.values())
        self._values = _SavedTensors([value for value in values if isinstance(value, Tensor)])

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


@contextmanager
def recorded(iteration: Iteration) -> Iterator[list[object]]:
    """Record a step of the block for each watcher: it is looked at by the device alone."""
    with ExitStack() as stack:
        yield [stack.enter_context(watcher.recording()) for watcher in iteration.watchers()]


class Watched:
    """Work around each replay of one graph for those who watch the model; none where nobody does.

    Args:
        iteration: that was captured.
        recordings: of those who watch it, in their order.
    """

    def __init__(self, iteration: Iteration, recordings: list[object]) -> None:
        self._iteration = iteration
        self._pairs = [*zip(iteration.watchers(), recordings, strict=True)]
        # A watcher knows which buffers its model writes; of all others every one may be.
        watched = (model for each in iteration.conversions if each.watcher is not None and (model := each.module()))
        own = {id(buffer) for model in watched for buffer in model.buffers()}
        self._others = [b for root in iteration.roots() for b in root.buffers() if id(b) not in own]

    def kept(self, batch: Batch) -> KeptIteration | None:
        """Snapshot what running this step again needs; the step after it overwrites the buffers."""
        if not self._pairs:
            return None
        # Copied before the launch: on one stream the copies come before what the replay writes.
        written = [buffer for watcher, _ in self._pairs for buffer in watcher.written()]
        return KeptIteration.of(self._iteration, batch, [*written, *self._others])

    def replayed(self, step: KeptIteration | None) -> None:
        """Tell the watchers that a replay was launched."""
        if step is not None:
            for watcher, recording in self._pairs:
                watcher.replayed(recording, self._iteration.optimizer, functools.partial(step.run_again, watcher))


@dataclass(frozen=True, slots=True)
class KeptIteration:
    """Snapshot of a step, from before it runs. ``values``: of ``buffers``, those that it may write."""

    iteration: Iteration
    batch: Batch
    random: RandomState
    buffers: list[Tensor]
    values: list[Tensor]

    @classmethod
    def of(cls, iteration: Iteration, batch: Batch, buffers: list[Tensor]) -> KeptIteration:
        values = [torch.empty_like(buffer) for buffer in buffers]
        _fill(values, buffers)
        # A replay draws what the generator's state gives to the same ops without a graph.
        return cls(iteration, batch.copy(), RandomState(only_torch=True), buffers, values)

    def run_again(self, watcher: CallWatcher, scale: float) -> None:
        """Run forward, and backward at a loss scale, without the graph, for one watcher; then put all back."""
        iteration = self.iteration
        with (
            _attributes_put_back(iteration), values_kept(_buffers(iteration)), late_hooks_aside(iteration.parameters),
            ExitStack() as stack,
        ):  # fmt: skip
            iteration.drop_gradients()
            # The others have seen this step, by its replay.
            for other in iteration.watchers():
                if other is not watcher:
                    stack.enter_context(other.aside())
            self.random.restore()
            _fill(self.buffers, self.values)
            iteration.backward(self.batch, lambda loss: loss * torch.full_like(loss, scale, dtype=torch.float32))


def _fill(to: list[Tensor], values: list[Tensor]) -> None:
    if to:
        with torch.no_grad():
            foreach_copy_(to, values)
