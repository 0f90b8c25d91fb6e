"""The loss scale of one loss, as apex counts it: a ``fxprec.LossScaler`` that moves when a ``scale_loss`` ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch.optim import Optimizer

from fxprec.amp.properties import Properties
from fxprec.errors import NoGradientsError
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.scaling.scale import SMALLEST_SCALE, TORCH_KEYS, checked_bounds, checked_count, checked_scale
from fxprec.torch_internals import growth_tracker

_OWN = ("_device", "_fp16_gradients", "_how", "_overflowed", "_static_unskipped", "scaler")
#: What scripts set of apex's object.
_APEX = ("_loss_scale", "_unskipped", "dynamic", "_scale_seq_len", "_min_loss_scale", "_max_loss_scale")
#: What apex starts a dynamic scale with, and after how many good steps it doubles.
INIT_SCALE, WINDOW = 2.0**16, 2000


@dataclass(frozen=True, slots=True)
class _ScaleRules:
    """Rules by which a scale moves."""

    dynamic: bool
    low: float | None
    high: float | None
    window: int


def _part(name: str) -> property:
    """Return a property of apex's that is a field of ``_ScaleRules``."""

    def get(self: AmpLossScaler) -> Any:
        return getattr(self._how, name)

    def set_(self: AmpLossScaler, value: Any) -> None:
        self._set(self.loss_scale(), self.unskipped, replace(self._how, **{name: value}))

    return property(get, set_)


class AmpLossScaler:
    """Loss scale of one loss.

    A dynamic one starts at 2**16, halves after an overflow and doubles after 2000 good steps, within the bounds. A
    static one stays, and never makes a step be skipped.

    What scripts set of apex's object acts here as it does there, from the next ``scale_loss`` on: ``_loss_scale``,
    ``_unskipped``, ``dynamic``, ``_scale_seq_len``, ``_min_loss_scale`` and ``_max_loss_scale``. Any other attribute is
    refused.

    Attributes:
        scaler: what scales, unscales and checks.
    """

    def __init__(
        self,
        properties: Properties,
        device: str,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
    ) -> None:
        low, high = (min_loss_scale or None, max_loss_scale) if properties.dynamic else (None, None)
        first = INIT_SCALE if properties.dynamic else float(properties.loss_scale)
        self._device, self._fp16_gradients = device, properties.level == "O3"
        self._static_unskipped, self._overflowed = 0, False
        self._how = _ScaleRules(properties.dynamic, low, high, WINDOW)
        self.scaler = self._made(max(low or SMALLEST_SCALE, min(first, math.inf if high is None else high)))

    def _made(self, scale: float) -> LossScaler:
        how = self._how
        return LossScaler(
            self._device,
            scale,
            growth_interval=how.window,
            dynamic=how.dynamic,
            fp16_gradients=self._fp16_gradients,
            min_scale=how.low,
            max_scale=how.high,
            # With a floor the scale stays there, as in apex; without one it would reach 0.
            on_floor=None if how.low is not None else "raise",
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in (*_OWN, *_APEX):
            raise AttributeError(f"{_lacks(name)}. What else can be set is an argument of amp.initialize")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{_lacks(name)}, loss_scale() and _has_overflow. amp.scale_loss unscales, checks and moves the scale; for "
            "a loop of your own fxprec.LossScaler has unscale_, step and update"
        )

    def loss_scale(self) -> float:
        """Return the present scale."""
        return self.scaler.get_scale()

    @property
    def unskipped(self) -> int:
        """Number of good steps since the scale last moved."""
        return int(growth_tracker(self.scaler)) if self.dynamic else self._static_unskipped

    dynamic = _part("dynamic")
    _min_loss_scale = _part("low")
    _max_loss_scale = _part("high")
    _scale_seq_len = _part("window")

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._set(value, self.unskipped, self._how)

    @property
    def _unskipped(self) -> int:
        return self.unskipped

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._set(self.loss_scale(), value, self._how)

    @property
    def _has_overflow(self) -> bool:
        """Flag of an overflow in the last ``scale_loss``; the next step is skipped, or was."""
        return self._overflowed

    def _set(self, scale: float, unskipped: int, how: _ScaleRules) -> None:
        """Go on with other numbers, from the next ``scale_loss`` on.

        Raises:
            RuntimeError: gradients are scaled by it now. LossScaleError: (a ValueError) numbers out of range.
        """
        if any(each.holds_scaled for each in self.scaler._records.states.values()):
            raise RuntimeError(
                "a loss scale was set while gradients are scaled by it: set it after the scale_loss that unscales them"
            )
        scale, unskipped = checked_entry("the loss scaler", {"loss_scale": scale, "unskipped": unskipped})
        checked_bounds(how.low, scale, how.high)
        # Rules are arguments of a LossScaler: other rules need another one.
        if how != self._how:
            self._how, before = how, self._how
            try:
                self.scaler = self._made(scale)
            except BaseException:
                self._how = before
                raise
        self.load(scale, unskipped)

    def scaled(self, loss: Any, optimizers: Iterable[Optimizer], delay_unscale: bool) -> AbstractContextManager[Any]:
        """Scale one loss as ``LossScaler.scale_loss`` does."""
        return self.scaler.scale_loss(loss, optimizers, delay_unscale=delay_unscale)

    def found_inf(self) -> bool:
        """Return whether the gradients unscaled last overflowed; never with a static scale. Reads the device."""
        self._overflowed = self.dynamic and self.scaler.found_inf()
        return self._overflowed

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
        # torch's tracker counts for a dynamic scale alone; apex counts for static ones too.
        count = int(unskipped) if self.dynamic else 0
        own = {key: state[key] for key in TORCH_KEYS} | {"scale": float(loss_scale), "_growth_tracker": count}
        self.scaler.load_state_dict(own)
        self._static_unskipped = int(unskipped)


def _lacks(name: str) -> str:
    return f"a loss scaler of fxprec.amp has no {name!r}; of apex's internals it has {', '.join(_APEX)}"


def checked_entry(name: str, entry: Any) -> tuple[float, int]:
    """Return scale and count of one entry of a saved state, checked.

    Raises:
        RuntimeError: keys are missing. ValueError: numbers out of range.
    """
    if not isinstance(entry, Mapping) or not {"loss_scale", "unskipped"} <= entry.keys():
        raise RuntimeError(f"{name} of the amp state must hold 'loss_scale' and 'unskipped', not {entry!r}")
    scale = checked_scale(f"{name}: loss_scale", entry["loss_scale"])
    return scale, checked_count(f"{name}: unskipped", entry["unskipped"])
