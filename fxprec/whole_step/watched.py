"""A captured step of a model that is watched (``fxprec.numerics.watch``).

The graph holds what a watched step has the device do: a reduction for each output, a flag of the gradients, the skip.
A step that was not finite runs once more without the graph, when the host hears of it: the parameters have not moved,
and what else it takes is kept here from before the replay. What is kept of an older step goes with its numbers. ::

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

import torch
from torch import Tensor

from fxprec.capture.untouched import RandomState
from fxprec.model.watcher import CallWatcher
from fxprec.torch_internals import foreach_copy_
from fxprec.whole_step.batch import Batch
from fxprec.whole_step.iteration import Iteration
from fxprec.whole_step.put_back import backward_put_back


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
        watched = (model for each in iteration.conversions if each.watcher is not None and (model := each.module()))
        own = {id(buffer) for model in watched for buffer in model.buffers()}
        self._others = [b for root in iteration.roots() for b in root.buffers() if id(b) not in own]

    def kept(self, batch: Batch) -> KeptIteration | None:
        """Snapshot what running this step again needs; the step after it overwrites the buffers."""
        if not self._pairs:
            return None
        written = [buffer for watcher, _ in self._pairs for buffer in watcher.written()]
        return KeptIteration.of(self._iteration, batch, [*written, *self._others])

    def replayed(self, step: KeptIteration | None) -> None:
        """Tell the watchers that a replay was launched."""
        if step is not None:
            for watcher, recording in self._pairs:
                again = functools.partial(step.run_again, watcher)
                watcher.replayed(recording, self._iteration.optimizer, again)


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
        _copy(values, buffers)
        # A replay draws what the generator's state gives to the same ops without a graph.
        return cls(iteration, batch.copy(), RandomState(only_torch=True), buffers, values)

    def run_again(self, watcher: CallWatcher, scale: float) -> None:
        """Run forward, and backward at a loss scale, without the graph, for one watcher; then put all back."""
        with backward_put_back(self.iteration), ExitStack() as stack:
            for other in self.iteration.watchers():
                if other is not watcher:
                    stack.enter_context(other.aside())
            self.random.restore()
            _copy(self.buffers, self.values)
            self.iteration.backward(self.batch, lambda loss: loss * torch.full_like(loss, scale, dtype=torch.float32))


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:
        with torch.no_grad():
            foreach_copy_(to, values)
