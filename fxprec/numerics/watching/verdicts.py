"""Judge a step before its optimizer takes it, and keep one that is not finite from changing anything.

What is known is one vector on one device::

    largest of each output | flag of each check of gradients | loss scale, or what all ranks found

The device holds a step by itself: the optimizer reads ``found_inf`` there, as torch's fused ones and fxprec's do for a
loss scaler. The host holds one by taking the gradients away. A parameter without one is left alone by every optimizer,
with its state and step count, and whoever wrapped ``step`` (a learning rate scheduler) sees a call as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fxprec.host_reads import reading_waits
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.optim.gradient_check import GradientCheck
from fxprec.scaling.gradients import parameters_of
from fxprec.scaling.skips import wants_scaler


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of a step in one vector, on the host or on a device.

    Attributes:
        values: as many largest elements as there are ``outputs``, a flag for each check of ``gradients``, and the last:
        ranks: whether these are the two that all ranks found.
        scaled: whether this is the loss scale.
    """

    values: Tensor
    outputs: int
    gradients: int
    ranks: bool = False
    scaled: bool = False

    @classmethod
    def of(cls, largest: Sequence[Tensor], flags: Iterable[Tensor], device: torch.device) -> Numbers:
        """Gather them on a device: the largest elements of outputs, and flags above 0 where gradients are bad."""
        found = [flag.view(()) for flag in flags]
        here = [each.to(device, non_blocking=True) for each in (*largest, *found)]
        values = torch.stack(here) if here else torch.zeros(0, device=device)
        # Flags and sums of them must stay exact once numbers are appended.
        return cls(values.float() if values.dtype in LOW_DTYPES else values, len(largest), len(found))

    def and_more(self, ranks: Tensor | None, scale: Tensor | None) -> Numbers:
        """Return them with what all ranks found, or the scale, if there is either."""
        more = scale if ranks is None else ranks
        if more is None:
            return self
        values = torch.cat([self.values, more.view(-1).to(self.values)])
        return replace(self, values=values, ranks=ranks is not None, scaled=ranks is None)

    def bad_outputs(self) -> list[bool]:
        """Return for each output whether it is nan or has an inf; on the host."""
        return [not value < torch.inf for value in self.values[: self.outputs].tolist()]

    def bad_gradients(self) -> bool:
        """Return whether a check of gradients found inf or nan; on the host."""
        return any(self.values[self.outputs : self.outputs + self.gradients].tolist())


class Verdicts:
    """Verdicts on steps, decided where their numbers are. ``group``: ranks that decide together."""

    def __init__(self, device: torch.device) -> None:
        self.group: Any = None
        self._device = device
        self._limits: dict[tuple[int, int], Tensor] = {}

    @property
    def rank(self) -> int | None:
        """Rank of this process among those that decide together."""
        return None if self.group is None else dist.get_rank(self.group)

    def found(self, numbers: Numbers) -> Tensor:
        """Return 1 where the step is not finite, else 0; 0-dim FP32."""
        if not reading_waits(self._device):
            return torch.tensor(float(any(numbers.bad_outputs()) or numbers.bad_gradients()), device=self._device)
        return self._below_limits(numbers).logical_not().any().float()

    def agreed(self, numbers: Numbers, found: Tensor) -> Tensor | None:
        """Return what the ranks found, 0 or 1, and the rank, from 1, with an output to blame; None without others."""
        rank = self.rank
        if rank is None:
            return None
        # One all-reduce tells both: a maximum of flags, and of rank numbers.
        bad = self._below_limits(numbers)[: numbers.outputs].logical_not().any()
        both = torch.stack([found, bad * (rank + 1.0)])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
        return both

    def began(self, here: bool) -> int | None:
        """Return the rank that knows where a step began not to be finite, if one does; all ranks ask at once."""
        rank = self.rank
        assert rank is not None
        found = torch.tensor(rank + 1 if here else 0, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found) - 1 if found else None

    def elsewhere(self) -> str:
        """Name the other ranks, in words, where nobody can ask them; "" where there are none."""
        rank = self.rank
        if rank is None:
            return ""
        # With a scaler ranks do not ask each other, as they may read at different times.
        others = [other for other in range(dist.get_world_size(self.group)) if other != rank]
        return f"rank {others[0]}" if len(others) == 1 else "another rank"

    def _below_limits(self, numbers: Numbers) -> Tensor:
        key = numbers.outputs, numbers.gradients
        if key not in self._limits:
            self._limits[key] = torch.tensor([torch.inf] * key[0] + [0.5] * key[1], device=self._device)
        return numbers.values < self._limits[key]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's ``step`` reads ``found_inf``."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not wants_scaler(optimizer)


def is_scaled(optimizer: Optimizer) -> bool:
    """Return whether a loss scaler steps the optimizer; another watch tells it no scale."""
    return hasattr(optimizer, "found_inf") and hasattr(optimizer, "grad_scale")


class Hold:
    """Hold on an optimizer's step: values it was told, and gradients taken away, until ``release``."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def hide_gradients(self, optimizer: Optimizer) -> None:
        """Make the step that follows change nothing, by taking the gradients away."""
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._undo.callback(setattr, parameter, "grad", parameter.grad)
                parameter.grad = None

    def tell(self, optimizer: Optimizer, found: Tensor, check: GradientCheck | None) -> None:
        """Make the step that follows change nothing where ``found``, 0-dim FP32 on the device, is 1.

        Args:
            optimizer: one that ``skips_on_device``.
            found: 0 or 1; what a loss scaler or another watch told already counts as well.
            check: what its own ``check_gradients`` found, which need not look again.
        """
        told = getattr(optimizer, "found_inf", None)
        if told is not None and not is_scaled(optimizer):
            told.copy_(torch.maximum(told, found))  # by another watch, which takes it back before this one
            return
        self._tell(optimizer, "found_inf", found if told is None else torch.maximum(told.view(()), found))
        if check is not None:
            self._tell(optimizer, "gradient_check", check)

    def _tell(self, optimizer: Optimizer, name: str, value: Any) -> None:
        before = getattr(optimizer, name, None)
        if before is None:
            self._undo.callback(delattr, optimizer, name)
        else:
            self._undo.callback(setattr, optimizer, name, before)
        setattr(optimizer, name, value)

    def release(self) -> None:
        """Put all back as it was; a name that was told twice ends with its oldest value."""
        self._undo.close()
