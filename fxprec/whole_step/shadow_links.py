"""Keep shadows and a graph in step: fresh before a replay reads them, and known to be fresh, or stale, after it.

A replay runs no Python, so no shadow store learns of the step. Two cases::

    fxprec.optim     the graph reads the shadows as they are, and writes them with the weights
    any other        the graph begins by copying all weights to their shadows; after it they are stale
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.scaling.gradients import parameters_of
from fxprec.shadows import ShadowStore, stores
from fxprec.whole_step.iteration import Iteration


@dataclass(frozen=True, slots=True)
class _Link:
    """Shadows of one store that the graph reads or writes. ``read``: it does read them."""

    store: ShadowStore
    weights: list[Tensor]
    shadows: list[Tensor]
    marks: list[object]
    read: bool

    def same(self) -> bool:
        return all(map(operator.is_, self.store.marks_of(self.weights), self.marks))


class ShadowLinks:
    """Shadows that a step concerns: those its forward reads, and all those of weights that it changes."""

    def __init__(self, iteration: Iteration) -> None:
        self._optimizer: Optimizer = iteration.optimizer
        self._writes = bool(getattr(self._optimizer, "writes_shadows", False))
        own = {id(store) for store in iteration.stores()}
        parameters = iteration.parameters
        self._links: list[_Link] = []
        for store in stores():
            pairs = [(p, shadow) for p in parameters if (shadow := store.shadow_of(p)) is not None]
            if pairs:
                weights, shadows = map(list, zip(*pairs, strict=True))
                self._links.append(_Link(store, weights, shadows, store.marks_of(weights), id(store) in own))
        self._known = {id(link.store) for link in self._links}

    def same(self) -> bool:
        """Return whether the shadows are still those that the graph reads and writes."""
        return all(link.same() for link in self._links)

    def before(self) -> None:
        """Copy changed weights to their shadows before a replay, where the graph itself does not."""
        if self._writes:
            with torch.no_grad():
                for link in self._links:
                    if link.read:
                        link.store.read(link.weights)

    def after(self) -> None:
        """Mark shadows after a replay: a forward must not read old ones, nor a pending backward new ones."""
        for store in stores():
            # These shadows hold the weights of before the step: the next forward outside refreshes them.
            if not self._writes or id(store) not in self._known:
                store.note_stepping(parameters_of(self._optimizer))
        if self._writes:
            for link in self._links:
                torch.autograd.graph.increment_version(link.shadows)
