"""The loss scales of ``FP16_Optimizer``: plain numbers, static or dynamic. (Models with FP32 parameters do not need
these: ``fxprec.LossScaler``.)

Sources: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; the defaults are those of NVIDIA apex.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxprec.errors import LossScaleFloorError
from fxprec.scaling.gradients import local_values
from fxprec.scaling.scale import SMALLEST_SCALE, checked_count, checked_interval, checked_scale


class StaticLossScaler:
    """Static loss scale; steps are never skipped. ``scale`` is finite and greater than 0, else ValueError."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = checked_scale("scale", scale)

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient holds inf or nan; a static scale does not look."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Count one iteration."""

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """Return a module's input gradients times the scale, for a backward hook."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward of the loss, in FP32, times the scale."""
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)

    def state_dict(self) -> dict[str, float | int]:
        """Return plain numbers."""
        return {"loss_scale": self.cur_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that ``checked`` let through."""
        self.cur_scale = float(state["loss_scale"])

    def checked(self, state: Any) -> Mapping[str, Any]:
        """Return a saved state of this kind of scale, checked.

        Raises:
            RuntimeError: keys are missing. ValueError: numbers out of range.
        """
        wanted = self.state_dict().keys()
        if not isinstance(state, Mapping) or not wanted <= state.keys():
            raise RuntimeError(f"the state of a {type(self).__name__} holds {sorted(wanted)}, not {state!r}")
        checked_scale("loss_scale", state["loss_scale"])
        checked_count("unskipped", state.get("unskipped", 0))
        return state


class DynamicLossScaler(StaticLossScaler):
    """Loss scale that falls after an overflow and rises after ``scale_window`` good iterations in a row.

    Args:
        init_scale: the first scale.
        scale_factor: what it is divided or multiplied by; above 1.
        scale_window: good iterations before it rises.
        min_loss_scale, max_loss_scale: its bounds; None: none.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_loss_scale: float | None = 1.0,
        max_loss_scale: float | None = None,
    ) -> None:
        super().__init__(checked_scale("init_scale", init_scale))
        if checked_scale("scale_factor", scale_factor) <= 1:
            raise ValueError(f"scale_factor must be greater than 1, not {scale_factor!r}")
        self.scale_factor, self.scale_window = float(scale_factor), checked_interval("scale_window", scale_window)
        self.min_loss_scale = checked_scale("min_loss_scale", min_loss_scale) if min_loss_scale else SMALLEST_SCALE
        self.max_loss_scale = math.inf if max_loss_scale is None else checked_scale("max_loss_scale", max_loss_scale)
        self.cur_scale = max(self.min_loss_scale, min(self.cur_scale, self.max_loss_scale))
        self.unskipped = 0

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient holds inf or nan. Reads the device once."""
        gradients = [local_values(p.grad) for p in params if p.grad is not None]
        if not gradients:
            return False
        first = gradients[0].device
        # One flag a gradient is brought together, so that the host waits once.
        return not bool(torch.stack([torch.isfinite(g).all().to(first) for g in gradients]).all())

    def update_scale(self, overflow: bool) -> None:
        """Move the scale by whether this iteration overflowed.

        Raises:
            LossScaleFloorError: there is no ``min_loss_scale``, and no smaller scale could be taken out again.
        """
        if overflow and self.cur_scale <= SMALLEST_SCALE:
            raise LossScaleFloorError(
                f"the loss scale fell to {self.cur_scale:g}: gradients hold inf or nan at every scale, so it is the "
                "model that makes them. Look at the loss and the inputs of the last step, and at the learning rate"
            )
        if overflow:
            self.cur_scale, self.unskipped = max(self.min_loss_scale, self.cur_scale / self.scale_factor), 0
            return
        self.unskipped += 1
        if self.unskipped == self.scale_window:
            self.cur_scale, self.unskipped = min(self.max_loss_scale, self.cur_scale * self.scale_factor), 0

    def state_dict(self) -> dict[str, float | int]:
        return {"loss_scale": self.cur_scale, "unskipped": self.unskipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.unskipped = int(state["unskipped"])
