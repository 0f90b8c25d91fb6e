"""How a scaler takes a scale out of gradients: refused, unscaled and checked, agreed upon by the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.scaling.agreement import agree, group_of
from fxprec.scaling.gradients import grouped, refuse_dtypes
from fxprec.scaling.records import Records
from fxprec.scaling.refusals import claim, refuse_shared
from fxprec.scaling.scales import Scales
from fxprec.scaling.stages import CHECK
from fxprec.torch_internals import amp_unscale_


@dataclass(frozen=True, slots=True)
class GradientChecks:
    """Checks of gradients in ``unscale_`` and ``step``.

    Attributes:
        scales: of the losses.
        fp16_gradients: float16 gradients are accepted.
        process_group: ranks that skip together; None: those of the parameters' meshes.
        names_of: an optimizer -> id of each of its parameters -> its name.
    """

    scales: Scales
    fp16_gradients: bool
    process_group: Any
    names_of: Callable[[Optimizer], dict[int, str]]

    def refuse(self, records: Records, optimizer: Optimizer, claimed: dict[int, weakref.ref[Optimizer]]) -> None:
        """All that ``unscale_`` would refuse of the gradients. ``claimed``: parameters of the optimizers before."""
        self._refuse_spoiled(records, optimizer, claimed)
        refuse_dtypes(optimizer, self.fp16_gradients, self.names_of)

    def unscale(
        self, records: Records, optimizer: Optimizer, inverse: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients by ``inverse``, in place; ``found_inf`` or 1 for each device, where one is inf or nan.

        Raises:
            RuntimeError, ValueError, TypeError: as ``LossScaler.unscale_``.
        """
        self._refuse_spoiled(records, optimizer, records.claimed)
        gradients = grouped(optimizer, allow_fp16 or self.fp16_gradients, self.names_of)
        inverses: dict[torch.device, Tensor] = {}
        found: dict[torch.device, Tensor] = {}
        for (device, _), tensors in gradients.items():
            if device not in found:
                inverses[device] = inverse.to(device, non_blocking=True)
                found[device] = found_inf.to(device, non_blocking=True, copy=True)
            amp_unscale_(tensors, found[device], inverses[device])
        claim(optimizer, records.claimed)
        self._agree(optimizer, found)
        return found

    def check(self, records: Records, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        """Look for inf and nan, and leave the gradients as they are."""
        scale = self.scales.first
        return self.unscale(records, optimizer, torch.ones_like(scale), torch.zeros_like(scale), allow_fp16=True)

    def check_for_step(self, records: Records, optimizer: Any, state: dict[str, Any]) -> dict[torch.device, Tensor]:
        """Check, as ``check`` does, gradients that the optimizer unscales in its step, by its own means if any."""
        check = getattr(optimizer, "check_gradients", None)
        if check is None:
            return self.check(records, optimizer)
        self._refuse_spoiled(records, optimizer, records.claimed)
        claim(optimizer, records.claimed)
        state[CHECK] = check(self.scales.first)
        found = state[CHECK].found_inf
        self._agree(optimizer, found)
        return found

    def _agree(self, optimizer: Optimizer, found: dict[torch.device, Tensor]) -> None:
        group = group_of(optimizer, self.process_group)
        if group is not None:
            agree(found, self.scales.first.device, group)

    def _refuse_spoiled(
        self, records: Records, optimizer: Optimizer, claimed: dict[int, weakref.ref[Optimizer]]
    ) -> None:
        refuse_shared(optimizer, claimed, self.names_of)
        records.old.refuse_mixed(optimizer, self.names_of)
