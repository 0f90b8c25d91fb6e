"""Gather what is known before an optimizer steps, as one vector on one device: outputs, and gradients.

::

    largest of each output | flag of each check of gradients | loss scale, or what all ranks found
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.host_reads import reading_waits


@dataclass(frozen=True, slots=True)
class Numbers:
    """Vector of ``outputs`` and ``gradients`` numbers; on the host or on a device."""

    values: Tensor
    outputs: int
    gradients: int

    @classmethod
    def of(cls, largest: Sequence[Tensor], flags: Iterable[Tensor], device: torch.device) -> Numbers:
        """Gather them on a device: the largest elements of outputs, and flags above 0 where gradients are bad."""
        found = [flag.view(()) for flag in flags]
        here = [each.to(device, non_blocking=True) for each in (*largest, *found)]
        values = torch.stack(here) if here else torch.zeros(0, device=device)
        # Flags and sums of them must stay exact once numbers are appended.
        low = values.dtype in (torch.float16, torch.bfloat16)
        return cls(values.float() if low else values, len(largest), len(found))

    def and_more(self, more: Tensor) -> Tensor:
        """Return the vector, and numbers after it."""
        return torch.cat([self.values, more.view(-1).to(self.values)])

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
        others = [other for other in range(dist.get_world_size(self.group)) if other != rank]
        return f"rank {others[0]}" if len(others) == 1 else "another rank"

    def _below_limits(self, numbers: Numbers) -> Tensor:
        key = numbers.outputs, numbers.gradients
        if key not in self._limits:
            self._limits[key] = torch.tensor([torch.inf] * key[0] + [0.5] * key[1], device=self._device)
        return numbers.values < self._limits[key]
