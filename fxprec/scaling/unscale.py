"""Take a loss scale out of gradients: refuse those that it cannot be taken out of, unscale, look for inf and nan.

Refused are, beside dtypes (``gradients``), gradients that another optimizer unscaled already, and sums over two scales.
Those come about when the scale changes while scaled gradients that nobody unscaled are still there, as where an
optimizer accumulates while another one steps: new gradients are added to them at another scale.

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from fxprec.host_reads import capturing
from fxprec.scaling.gradients import (
    NamesOf,
    agree,
    group_of_parameters,
    grouped,
    leaves_below,
    parameters_of,
    refuse_dtypes,
    stored_values,
)
from fxprec.scaling.scale import Scales
from fxprec.torch_internals import amp_unscale_

#: device -> 0-dim FP32, above 0 where a gradient on it holds inf or nan.
Flags = dict[torch.device, Tensor]
#: Id of a parameter -> the optimizer that unscaled its gradient.
Claims = dict[int, weakref.ref[Optimizer]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Snapshot of the first gradient of an optimizer, which stands for all of its gradients.

    No weak reference to tensors, which ``torch.utils.swap_tensors`` refuses, but to the memory of the gradient.
    """

    memory: StorageWeakRef
    version: int

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Seen | None:
        gradient = next((p.grad for p in parameters_of(optimizer) if p.grad is not None), None)
        if gradient is None:
            return None
        return cls(StorageWeakRef(stored_values(gradient).untyped_storage()), gradient._version)

    def untouched(self, optimizer: Optimizer) -> bool:
        return not self.memory.expired() and _Seen.of(optimizer) == self


class SpoiledGradients:
    """Gradients of one scaler's optimizers that must not be unscaled: unscaled already, or sums over two scales.

    Attributes:
        claimed: id of a parameter -> the optimizer that unscaled it, since the last ``scale``. (After another one there
            may be new gradients, as where two optimizers of a shared encoder take turns.)
    """

    def __init__(self) -> None:
        self.claimed: Claims = {}
        self._scale: Tensor | None = None
        self._settled: dict[int, _Seen] = {}
        self._left: list[tuple[weakref.ref[Optimizer], _Seen]] = []
        self._mixed: dict[int, weakref.ref[Tensor]] = {}
        self._owners: list[weakref.ref[Optimizer]] = []
        #: In the second iteration optimizers may own gradients that the scaler has not seen yet.
        self._first, self._search = True, False

    def before_update(self, scale: Tensor, known: Mapping[int, Optimizer], used: set[int]) -> None:
        """Remember gradients that are left, before the scale changes.

        Args:
            scale: of the gradients.
            known: id -> every optimizer that the scaler has seen.
            used: ids of those that were unscaled in this iteration.
        """
        self._left, self._search, self._first = [], self._first, False
        # An optimizer that was used has settled gradients; those of others are left, unless untouched since settled.
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
        """Look at what is left when the backward of ``outputs``, scaled by ``scale``, begins."""
        if not (self._left or self._search or self._mixed) or outputs.grad_fn is None:
            return
        if capturing(outputs.device):
            return
        # Weakly: the hook belongs to ``outputs``, which it would keep alive.
        root = weakref.ref(outputs)
        outputs.register_hook(lambda _gradient: self._look(root(), scale))

    def refuse(
        self, optimizer: Optimizer, names_of: NamesOf, claimed: Mapping[int, weakref.ref[Optimizer]] | None = None
    ) -> None:
        """Raise a RuntimeError that names a spoiled gradient of ``optimizer``; ``claimed``: in place of ours."""
        # A gradient that is unscaled twice is too small by the scale.
        owners = self.claimed if claimed is None else claimed
        for parameter in parameters_of(optimizer) if owners else ():
            other = owners[id(parameter)]() if id(parameter) in owners else None
            if other is None or other is optimizer or parameter.grad is None:
                continue
            if any(parameter is owned for owned in parameters_of(other)):  # and not a new one with an old id
                raise RuntimeError(
                    f"{names_of(optimizer)[id(parameter)]} belongs to two optimizers, {type(other).__name__} and "
                    f"{type(optimizer).__name__}: its gradient would be unscaled twice. Give each parameter to one"
                )
        # What was set to zero since is no sum any more: that costs a read, in the rare case that there are any.
        if self._mixed:
            self._forget_zeros()
        for parameter in parameters_of(optimizer) if self._mixed else ():
            mixed = self._mixed.get(id(parameter))
            if mixed is not None and parameter.grad is not None and mixed() is parameter.grad:
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
        # In the second iteration gradients may belong to an optimizer that the scaler has not seen.
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
        """Forget mixed gradients that are gone, or were set to zero in place."""
        held = ((id_, reference()) for id_, reference in self._mixed.items())
        self._mixed = {id_: weakref.ref(g) for id_, g in held if g is not None and holds_any(g)}


def claim(optimizer: Optimizer, claimed: Claims) -> None:
    """Note in ``claimed`` that the optimizer's gradients are unscaled."""
    claimed.update(dict.fromkeys(map(id, parameters_of(optimizer)), weakref.ref(optimizer)))


@dataclass(frozen=True, slots=True)
class GradientChecks:
    """Checks of gradients in ``unscale_`` and ``step``.

    Attributes:
        scales: of the losses.
        fp16_gradients: float16 gradients are accepted.
        process_group: ranks that skip together; None: those of the parameters' meshes.
        names_of: gives the names that messages have.
    """

    scales: Scales
    fp16_gradients: bool
    process_group: Any
    names_of: NamesOf

    def refuse(self, spoiled: SpoiledGradients, optimizer: Optimizer, claimed: Claims) -> None:
        """Raise all that ``unscale_`` would raise for the gradients. ``claimed``: by the optimizers before."""
        spoiled.refuse(optimizer, self.names_of, claimed)
        refuse_dtypes(optimizer, self.fp16_gradients, self.names_of)

    def unscale(
        self, spoiled: SpoiledGradients, optimizer: Optimizer, inverse: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Flags:
        """Multiply the gradients by ``inverse`` in place; return ``found_inf``, or 1 after inf or nan, by device.

        Raises:
            RuntimeError, ValueError, TypeError: as ``LossScaler.unscale_``.
        """
        spoiled.refuse(optimizer, self.names_of)
        # Devices get the scale and a flag of their own: torch's kernel takes tensors of one device and dtype.
        gradients = grouped(optimizer, allow_fp16 or self.fp16_gradients, self.names_of)
        inverses: dict[torch.device, Tensor] = {}
        found: Flags = {}
        for (device, _), tensors in gradients.items():
            if device not in found:
                inverses[device] = inverse.to(device, non_blocking=True)
                found[device] = found_inf.to(device, non_blocking=True, copy=True)
            amp_unscale_(tensors, found[device], inverses[device])
        return self._agreed(spoiled, optimizer, found)

    def check(self, spoiled: SpoiledGradients, optimizer: Optimizer) -> Flags:
        """Look for inf and nan, and leave the gradients as they are."""
        scale = self.scales.first
        return self.unscale(spoiled, optimizer, torch.ones_like(scale), torch.zeros_like(scale), allow_fp16=True)

    def check_for_step(self, spoiled: SpoiledGradients, optimizer: Any) -> tuple[Any, Flags]:
        """Check gradients that the optimizer will unscale in its step.

        Returns:
            The result of its own ``check_gradients``, if it has one (else None), and the flags.
        """
        if not hasattr(optimizer, "check_gradients"):
            return None, self.check(spoiled, optimizer)
        spoiled.refuse(optimizer, self.names_of)
        own = optimizer.check_gradients(self.scales.first)
        return own, self._agreed(spoiled, optimizer, own.found_inf)

    def _agreed(self, spoiled: SpoiledGradients, optimizer: Optimizer, found: Flags) -> Flags:
        """Claim the gradients, and return the flags once all ranks that hold a part of them have the same."""
        claim(optimizer, spoiled.claimed)
        # Asked for, or the meshes of DTensors: it depends on parameters, for a rank without gradients has to join.
        asked = self.process_group
        group = group_of_parameters(parameters_of(optimizer)) if asked is None else asked
        if group is not None:
            agree(found, self.scales.first.device, group)
        return found


def holds_any(gradient: Tensor) -> bool:
    """Return whether anything in it is not 0. Reads the device."""
    return bool((stored_values(gradient) != 0).any())
