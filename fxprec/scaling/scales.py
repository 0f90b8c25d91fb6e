"""The scales of a scaler's losses, and how they move: its settings, and what a checkpoint holds of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.scaling import arguments
from fxprec.scaling.loss_scale import LossScale, UpdateRule

_NUMBERS: Final = ("scale", "growth_tracker", "hysteresis_left")


class Scales:
    """Settings as ``fxprec.LossScaler`` documents them; one ``LossScale`` for each loss.

    Raises:
        LossScaleError: a number out of range.
    """

    def __init__(
        self,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        *,
        dynamic: bool,
        min_scale: float | None,
        max_scale: float | None,
        hysteresis: int,
        consecutive_hysteresis: bool,
        num_losses: int,
    ) -> None:
        init_scale = arguments.checked_scale("init_scale", init_scale)
        growth_factor, backoff_factor = arguments.checked_factors(growth_factor, backoff_factor)
        self.growth_interval = arguments.checked_interval("growth_interval", growth_interval)
        self.hysteresis = arguments.checked_interval("hysteresis", hysteresis)
        self.bounds = arguments.checked_bounds(min_scale, init_scale, max_scale)
        self.consecutive = consecutive_hysteresis
        # A static scale moves by factors of 1, which nobody can ask for.
        self.growth_factor, self.backoff_factor = (growth_factor, backoff_factor) if dynamic else (1.0, 1.0)
        count = arguments.checked_interval("num_losses", num_losses)
        self.losses = [LossScale(init_scale, 0, self.hysteresis) for _ in range(count)]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with numbers in place of tensors, which are made again on the first device that is seen."""
        return {**self.__dict__, "losses": [LossScale(*loss.numbers()) for loss in self.losses]}

    @property
    def placed(self) -> bool:
        """Flag: the scales are tensors, since a device is known."""
        return self.losses[0].scale is not None

    @property
    def first(self) -> Tensor:
        """The scale of the first loss, once it is placed."""
        return self.of(0)

    def of(self, loss_id: int) -> Tensor:
        """The scale of a loss, once it is placed."""
        scale = self.losses[loss_id].scale
        assert scale is not None, "used before it was placed"
        return scale

    def place(self, device: torch.device) -> None:
        """Make the tensors; the first loss's last, since its scale tells that all are there."""
        for loss in reversed(self.losses):
            loss.place(device)

    def fill(self, value: float) -> None:
        """Set all scales, which are placed."""
        for loss_id in range(len(self.losses)):
            self.of(loss_id).fill_(value)

    def rule(self, near_floor: bool) -> UpdateRule:
        """Return how scales move now. ``near_floor``: the next update may bring one down to the smallest number."""
        low, high = self.bounds
        if low is None and near_floor and self.backoff_factor < 1:
            low = arguments.SMALLEST_SCALE  # or the scale would reach 0
        factors = self.growth_factor, self.backoff_factor, self.growth_interval
        return UpdateRule(*factors, self.hysteresis, self.consecutive, low, high)

    def saved(self) -> list[dict[str, float]]:
        """Each loss's numbers, for a checkpoint. Reads the device."""
        return [dict(zip(_NUMBERS, loss.numbers(), strict=True)) for loss in self.losses]

    def load(self, state: Mapping[str, Any], losses: Sequence[Mapping[str, Any]]) -> None:
        """Take up what a checkpoint holds. ``state``: torch's five keys; ``losses``: as ``saved`` gave them."""
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        low, high = self.bounds
        for loss, saved in zip(self.losses, losses, strict=True):
            left = min(saved.get("hysteresis_left", self.hysteresis), self.hysteresis)
            scale = max(low or 0.0, min(float(saved["scale"]), math.inf if high is None else high))
            loss.set(scale, int(saved["growth_tracker"]), left)
