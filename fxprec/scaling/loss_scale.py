"""The scale of one loss: three numbers on its device, moved without a host sync.

    overflow     hysteresis_left -= 1; at 0 the scale backs off      growth_tracker = 0
    no overflow  growth_tracker += 1; at growth_interval the scale grows and growth_tracker = 0
                 hysteresis_left is refilled when the scale grows, or with ``consecutive`` at once

Sources: ``torch.amp.GradScaler`` for scale and growth tracker; hysteresis as Megatron-LM's ``DynamicGradScaler`` and
DeepSpeed's ``DynamicLossScaler`` (there ``consecutive_hysteresis``) have it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.torch_internals import amp_update_scale_


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """Rule by which scales move. ``hysteresis``: the overflow that backs off, counted from the last refill."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int = 1
    consecutive: bool = False
    min_scale: float | None = None
    max_scale: float | None = None


class LossScale:
    """Scale of one loss (FP32), with growth tracker and hysteresis left (int32): 0-dim tensors once a device is known.

    Before that they are numbers, ``start``.
    """

    __slots__ = ("growth_tracker", "hysteresis_left", "scale", "start")

    def __init__(self, scale: float, growth_tracker: int, hysteresis_left: int) -> None:
        self.start = (scale, growth_tracker, hysteresis_left)
        self.scale: Tensor | None = None
        self.growth_tracker: Tensor | None = None
        self.hysteresis_left: Tensor | None = None

    def number(self) -> float:
        """The scale (a host sync)."""
        return self.start[0] if self.scale is None else self.scale.item()

    def numbers(self) -> tuple[float, int, int]:
        """Scale, growth tracker and hysteresis left, as Python numbers (a host sync)."""
        if self.scale is None or self.growth_tracker is None or self.hysteresis_left is None:
            return self.start
        return self.scale.item(), int(self.growth_tracker.item()), int(self.hysteresis_left.item())

    def place(self, device: torch.device) -> None:
        """Make the tensors; the scale last, since its presence tells other threads that all are there."""
        scale, growth_tracker, hysteresis_left = self.start
        self.hysteresis_left = torch.full((), hysteresis_left, dtype=torch.int32, device=device)
        self.growth_tracker = torch.full((), growth_tracker, dtype=torch.int32, device=device)
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)

    def set(self, scale: float, growth_tracker: int, hysteresis_left: int) -> None:
        """Overwrite, in place where there are tensors: captured CUDA graphs hold their addresses."""
        self.start = (scale, growth_tracker, hysteresis_left)
        if self.scale is not None and self.growth_tracker is not None and self.hysteresis_left is not None:
            self.scale.fill_(scale)
            self.growth_tracker.fill_(growth_tracker)
            self.hysteresis_left.fill_(hysteresis_left)

    def update(self, found_inf: Tensor, rule: UpdateRule) -> None:
        """Move the scale in place. ``found_inf``: 0-dim FP32 on the scale's device, above 0 after an overflow."""
        scale, growth_tracker, left = self.scale, self.growth_tracker, self.hysteresis_left
        assert scale is not None and growth_tracker is not None and left is not None, "updated before it was placed"
        before = scale.clone() if rule.hysteresis > 1 else None
        amp_update_scale_(
            scale, growth_tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
        )
        if before is not None:
            overflow = found_inf > 0
            # After a good step the tracker is 0 exactly when an interval is complete.
            refill = ~overflow if rule.consecutive else ~overflow & (growth_tracker == 0)
            left.copy_(torch.where(overflow, left - 1, left).clamp_(min=0).masked_fill_(refill, rule.hysteresis))
            scale.copy_(torch.where(overflow & (left > 0), before, scale))
        if rule.min_scale is not None or rule.max_scale is not None:
            scale.clamp_(rule.min_scale, rule.max_scale)
