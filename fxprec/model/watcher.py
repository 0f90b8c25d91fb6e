"""Who looks on as a converted model is trained: ``fxprec.numerics.watch``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from fxprec.model.entry_point import EntryPoint


class CallWatcher(Protocol):
    """Protocol of a model's watch. All but ``call`` is for ``capture_step``, whose graphs run no Python to look at."""

    def call(self, entry: EntryPoint, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run a call that records gradients, by ``run``."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """Steps in the block are none of the loop's: they leave no trace, and what was known stays."""
        ...

    def recording(self) -> AbstractContextManager[object]:
        """A step in the block is looked at by the device alone; what comes is for ``replayed``, of its replays."""
        ...

    def fixed(self) -> Hashable:
        """Return what a recording takes as given."""
        ...

    def begin(self) -> None:
        """A captured step comes next: read what is known of those before it."""
        ...

    def written(self) -> Iterable[Tensor]:
        """The buffers that a call of the model may write."""
        ...

    def replayed(self, recording: object, optimizer: Optimizer, again: Callable[[float], None]) -> None:
        """A captured step was launched.

        Args:
            recording: of its graph.
            optimizer: that steps in it.
            again: run its forward and backward once more, without the graph, at a loss scale.
        """
        ...
