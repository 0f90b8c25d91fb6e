"""Gradients of an old scale that a changed scale would spoil.

Scaled gradients that nobody unscaled may still be there when the scale changes: an optimizer that accumulates while
another one steps. New gradients would be added to them at another scale, and the sum could not be unscaled.

    update     which optimizers have gradients and were not used; a usual loop has none, and nothing more is done
    backward   as it begins: are these gradients still there, untouched, and is the scale another one? Only such a
               case reads from the device
    unscale    refuse gradients that were

Gradients that an optimizer unscaled in an earlier iteration, and that just lie there until its ``zero_grad``, are told
apart by the identity and version of one of them. What is missed: gradients of an optimizer that the scaler never saw,
after the second iteration; a graph below a sum of scaled losses, in the second one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from fxprec.scaling.cuda_graphs import capturing
from fxprec.scaling.gradients import leaves_below, local, parameters_of
from fxprec.torch_internals import sparse_values


@dataclass(frozen=True, slots=True)
class _Seen:
    """The first gradient of an optimizer as it was; stands for all of its.

    No weak reference to tensors, which ``torch.utils.swap_tensors`` refuses, but to the memory of the gradient.
    """

    memory: StorageWeakRef
    version: int

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Seen | None:
        gradient = next((p.grad for p in parameters_of(optimizer) if p.grad is not None), None)
        if gradient is None:
            return None
        return cls(StorageWeakRef(_numbers(gradient).untyped_storage()), gradient._version)

    def untouched(self, optimizer: Optimizer) -> bool:
        return not self.memory.expired() and _Seen.of(optimizer) == self


class OldGradients:
    """Gradients of earlier scales that updates of one scaler left behind."""

    def __init__(self) -> None:
        self._scale: Tensor | None = None
        self._settled: dict[int, _Seen] = {}
        self._left: list[tuple[weakref.ref[Optimizer], _Seen]] = []
        self._mixed: dict[int, weakref.ref[Tensor]] = {}
        self._owners: list[weakref.ref[Optimizer]] = []
        #: In the second iteration optimizers may own gradients that the scaler has not seen yet.
        self._first, self._search = True, False

    def before_update(self, scale: Tensor, known: Mapping[int, Optimizer], used: set[int]) -> None:
        """Before the scale changes.

        Args:
            scale: of the gradients.
            known: id -> every optimizer that the scaler has seen.
            used: ids of those that were unscaled in this iteration.
        """
        self._left, self._search, self._first = [], self._first, False
        for id_, optimizer in known.items():
            settled = self._settled.get(id_)
            if id_ in used:
                seen = _Seen.of(optimizer)
                if seen is not None:
                    self._settled[id_] = seen
            elif (settled is None or not settled.untouched(optimizer)) and (seen := _Seen.of(optimizer)) is not None:
                self._left.append((weakref.ref(optimizer), seen))
        if self._left or self._search:
            self._scale = scale.clone()
            self._owners = [weakref.ref(optimizer) for optimizer in known.values()]

    def watch(self, outputs: Tensor, scale: Tensor) -> None:
        """Look when the backward of ``outputs``, scaled by ``scale``, begins."""
        if not (self._left or self._search or self._mixed) or outputs.grad_fn is None:
            return
        if capturing(outputs.device):
            return
        root = weakref.ref(outputs)
        outputs.register_hook(lambda _gradient: self._look(root(), scale))

    def refuse_mixed(self, optimizer: Optimizer, names_of: Callable[[Optimizer], dict[int, str]]) -> None:
        """Raise a RuntimeError that names a gradient of ``optimizer`` which is (a sum with) one of an old scale."""
        if not self._mixed:
            return
        self._forget_zeros()
        for parameter in parameters_of(optimizer):
            if _is(self._mixed.get(id(parameter)), parameter.grad):
                raise RuntimeError(
                    f"the gradient of {names_of(optimizer)[id(parameter)]} is a sum over two scales: the scale changed "
                    "while scaled gradients were still there. Call update() only when every optimizer that has "
                    "gradients was stepped, or zero_grad() the others"
                )

    def _look(self, outputs: Tensor | None, scale: Tensor) -> None:
        self._forget_zeros()
        left, search, self._left, self._search = self._left, self._search, [], False
        owners = [owner for each, seen in left if (owner := each()) is not None and seen.untouched(owner)]
        kept = [p for owner in owners for p in parameters_of(owner) if p.grad is not None]
        if search and outputs is not None:
            owned = {id(p) for reference in self._owners if (owner := reference()) for p in parameters_of(owner)}
            kept += [p for p in leaves_below(outputs) if p.grad is not None and id(p) not in owned]
        if not kept or self._scale is None or torch.equal(scale, self._scale):
            return
        for parameter in kept:
            gradient = parameter.grad
            if gradient is not None and holds_any(gradient):
                self._mixed[id(parameter)] = weakref.ref(gradient)

    def _forget_zeros(self) -> None:
        """Mixed gradients that are gone, or were set to zero in place."""
        held = ((id_, reference()) for id_, reference in self._mixed.items())
        self._mixed = {id_: weakref.ref(g) for id_, g in held if g is not None and holds_any(g)}


def holds_any(gradient: Tensor) -> bool:
    """Return whether anything in it is not 0. Reads the device."""
    return bool((_numbers(gradient) != 0).any())


def _numbers(gradient: Tensor) -> Tensor:
    """Return the stored numbers of it that are on this rank."""
    held = local(gradient)
    if held.layout is torch.sparse_coo:
        return sparse_values(held)
    return held if held.layout is torch.strided else held.values()


def _is(reference: weakref.ref[Tensor] | None, gradient: Tensor | None) -> bool:
    return reference is not None and gradient is not None and reference() is gradient
