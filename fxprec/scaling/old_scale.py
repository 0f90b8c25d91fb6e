"""Gradients of an old scale that a changed scale would spoil.

Scaled gradients that nobody unscaled may still be there when the scale changes: micro-batches before an ``update``. New
ones would be added to them at another scale, and the sum could not be unscaled. Looking costs nothing in a usual loop:
only after an update that left such gradients behind does the next backward look at them, as it begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.scaling.gradients import local, parameters_of

__all__ = ["OldGradients"]


class OldGradients:
    """What is known of gradients that an update left behind at ``scale``.

    Args:
        scale: the scale they have.
        optimizers: those that might own some; None: nobody knows, all that the next backward reaches.
    """

    def __init__(self, scale: Tensor, optimizers: Iterable[Optimizer] | None) -> None:
        self.scale = scale
        self._optimizers = None if optimizers is None else weakref.WeakSet(optimizers)
        self._mixed: dict[int, weakref.ref[Tensor]] = {}

    def watch(self, outputs: Tensor, scale: Tensor) -> None:
        """Look when the backward of ``outputs``, scaled by ``scale``, begins."""
        if not outputs.requires_grad or outputs.grad_fn is None:
            return
        candidates = self._leaves_below(outputs) if self._optimizers is None else self._owned

        def look(_gradient: Tensor) -> None:
            kept = [p for p in candidates() if p.grad is not None]
            # Reads from the device, in this rare case only.
            if kept and not torch.equal(scale, self.scale):
                self._mixed.update(
                    {id(p): weakref.ref(p.grad) for p in kept if p.grad is not None and bool(_holds_any(p.grad))}
                )

        outputs.register_hook(look)

    def refuse_mixed(self, optimizer: Optimizer, names_of: Callable[[Optimizer], dict[int, str]]) -> None:
        """Raise a RuntimeError that names a gradient of ``optimizer`` which is a sum over two scales."""
        for parameter in parameters_of(optimizer) if self._mixed else ():
            seen = self._mixed.get(id(parameter))
            if seen is not None and parameter.grad is not None and seen() is parameter.grad:
                raise RuntimeError(
                    f"the gradient of {names_of(optimizer)[id(parameter)]} is a sum over two scales: the scale changed "
                    "while scaled gradients were still there. Call update() only when every optimizer that has "
                    "gradients was stepped, or zero_grad() the others"
                )

    def _owned(self) -> Iterator[Tensor]:
        for optimizer in [*(self._optimizers or ())]:
            yield from parameters_of(optimizer)

    @staticmethod
    def _leaves_below(outputs: Tensor) -> Callable[[], list[Tensor]]:
        root = weakref.ref(outputs)

        def leaves() -> list[Tensor]:
            tensor = root()
            waiting = [] if tensor is None or tensor.grad_fn is None else [tensor.grad_fn]
            seen, found = set(waiting), list[Tensor]()
            while waiting:
                node = waiting.pop()
                if hasattr(node, "variable"):
                    found.append(cast(Any, node).variable)
                after = {below for below, _ in node.next_functions if below is not None} - seen
                seen |= after
                waiting += after
            return found

        return leaves


def _holds_any(gradient: Tensor) -> Tensor:
    held = local(gradient)
    return (
        held.values() if held.is_sparse and held.is_coalesced() else held._values() if held.is_sparse else held
    ).any()
