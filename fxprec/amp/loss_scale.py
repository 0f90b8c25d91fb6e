"""The loss scale of one loss, as apex counts it: a ``fxprec.LossScaler`` that moves when a ``scale_loss`` ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from numbers import Integral, Real
from typing import Any

from torch.optim import Optimizer

from fxprec.amp.properties import Properties
from fxprec.errors import NoGradientsError
from fxprec.loss_scaler import LossScaler
from fxprec.scaling.floor import SMALLEST_SCALE
from fxprec.torch_internals import growth_tracker

__all__ = ["AmpLossScaler", "checked_entry"]

#: What apex starts a dynamic scale with, and after how many good steps it doubles.
INIT_SCALE, WINDOW = 2.0**16, 2000


class AmpLossScaler:
    """The scale of one loss.

    A dynamic one starts at 2**16, halves after an overflow and doubles after 2000 good steps, within the bounds. A
    static one stays, and never makes a step be skipped.

    Attributes:
        dynamic: whether it moves.
        scaler: what scales, unscales and checks.
    """

    def __init__(
        self,
        properties: Properties,
        device: str,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
    ) -> None:
        self.dynamic = properties.dynamic
        low, high = (min_loss_scale or None, max_loss_scale) if self.dynamic else (None, None)
        first = INIT_SCALE if self.dynamic else float(properties.loss_scale)
        first = max(low or SMALLEST_SCALE, min(first, math.inf if high is None else high))
        self.scaler = LossScaler(
            device,
            first,
            growth_interval=WINDOW,
            dynamic=self.dynamic,
            fp16_gradients=properties.level == "O3",
            min_scale=low,
            max_scale=high,
            # With a floor the scale stays there, as in apex; without one it would reach 0.
            on_floor=None if low is not None else "raise",
        )
        self._static_unskipped = 0

    def loss_scale(self) -> float:
        """The present scale."""
        return self.scaler.get_scale()

    @property
    def unskipped(self) -> int:
        """Good steps since the scale last moved."""
        return int(growth_tracker(self.scaler)) if self.dynamic else self._static_unskipped

    def scaled(self, loss: Any, optimizers: Iterable[Optimizer], delay_unscale: bool) -> AbstractContextManager[Any]:
        """``LossScaler.scale_loss`` of the one loss."""
        return self.scaler.scale_loss(loss, optimizers, delay_unscale=delay_unscale)

    def found_inf(self) -> bool:
        """Whether the gradients that were unscaled last overflowed; never with a static scale. Reads the device."""
        return self.dynamic and self.scaler.found_inf()

    def update(self) -> None:
        """Move the scale by what was found. A block that made no gradients (``autograd.grad``) moves nothing.

        Raises:
            LossScaleFloorError: there is no ``min_loss_scale``, and no smaller scale could be taken out again.
        """
        try:
            self.scaler.update()
        except NoGradientsError:
            return
        if not self.dynamic:
            self._static_unskipped += 1

    def load(self, loss_scale: float, unskipped: int) -> None:
        """Continue from these numbers."""
        state = self.scaler.state_dict()
        self.scaler.load_state_dict(
            {
                "scale": float(loss_scale),
                "growth_factor": state["growth_factor"],
                "backoff_factor": state["backoff_factor"],
                "growth_interval": state["growth_interval"],
                "_growth_tracker": int(unskipped) if self.dynamic else 0,
            }
        )
        self._static_unskipped = int(unskipped)


def checked_entry(name: str, entry: Any) -> tuple[float, int]:
    """Scale and count of one entry of a saved state.

    Raises:
        RuntimeError: keys are missing. ValueError: numbers out of range.
    """
    if not isinstance(entry, Mapping) or not {"loss_scale", "unskipped"} <= entry.keys():
        raise RuntimeError(f"{name} of the amp state must hold 'loss_scale' and 'unskipped', not {entry!r}")
    scale, unskipped = entry["loss_scale"], entry["unskipped"]
    if not isinstance(scale, Real) or isinstance(scale, bool) or not math.isfinite(scale) or scale <= 0:
        raise ValueError(f"{name}: loss_scale must be finite and greater than 0, not {scale!r}")
    if not isinstance(unskipped, Integral) or isinstance(unskipped, bool) or unskipped < 0:
        raise ValueError(f"{name}: unskipped must be a whole number of at least 0, not {unskipped!r}")
    return float(scale), int(unskipped)
