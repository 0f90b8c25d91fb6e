"""The loss scale of one loss, as apex counts it: a ``fxprec.LossScaler`` that moves when a ``scale_loss`` ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, NoReturn

from torch.optim import Optimizer

from fxprec.amp.properties import Properties
from fxprec.errors import NoGradientsError
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.scaling.scale import (
    SMALLEST_SCALE,
    TORCH_KEYS,
    checked_bounds,
    checked_count,
    checked_interval,
    checked_scale,
)
from fxprec.torch_internals import growth_tracker

_OWN = ("_overflowed", "_static_unskipped", "scaler")
#: What scripts set of apex's object.
_APEX = ("_loss_scale", "_unskipped", "dynamic", "_scale_seq_len", "_min_loss_scale", "_max_loss_scale")
#: What apex starts a dynamic scale with, and after how many good steps it doubles.
INIT_SCALE, WINDOW = 2.0**16, 2000
#: Growth and backoff factor of a scale, by whether it is dynamic.
_FACTORS = {True: (2.0, 0.5), False: (1.0, 1.0)}


def _of_rule(name: str) -> property:
    """Return a property of apex's that is a field of the scaler's ``UpdateRule``."""

    def get(self: AmpLossScaler) -> Any:
        return getattr(self.scaler._scales.rule, name)

    def set_(self: AmpLossScaler, value: Any) -> None:
        self._set(self.loss_scale(), self.unskipped, **{name: value})

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
        # Bounds are those of a scale that moves; a static one may be anything. apex takes a minimum of 0 for none.
        low, high = (min_loss_scale or None, max_loss_scale) if properties.dynamic else (None, None)
        first = INIT_SCALE if properties.dynamic else float(properties.loss_scale)
        self._static_unskipped, self._overflowed = 0, False
        self.scaler = LossScaler(
            device,
            max(low or SMALLEST_SCALE, min(first, math.inf if high is None else high)),
            growth_interval=WINDOW,
            dynamic=properties.dynamic,
            fp16_gradients=properties.level == "O3",
            min_scale=low,
            max_scale=high,
            on_floor=_on_floor(low),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        # A misspelt name, or one of apex's that nothing reads here, would go unnoticed.
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

    @property
    def dynamic(self) -> bool:
        """Flag of a scale that moves; a static one stays."""
        return self.scaler._scales.rule.backoff_factor < 1

    @dynamic.setter
    def dynamic(self, value: bool) -> None:
        growth, backoff = _FACTORS[bool(value)]
        self._set(self.loss_scale(), self.unskipped, growth_factor=growth, backoff_factor=backoff)

    _min_loss_scale = _of_rule("min_scale")
    _max_loss_scale = _of_rule("max_scale")
    _scale_seq_len = _of_rule("growth_interval")

    # The names by which scripts set apex's two numbers, which each keep the other one.
    _loss_scale = property(loss_scale, lambda self, value: self._set(value, self.unskipped))
    _unskipped = property(lambda self: self.unskipped, lambda self, value: self._set(self.loss_scale(), value))

    @property
    def _has_overflow(self) -> bool:
        """Flag of an overflow in the last ``scale_loss``; the next step is skipped, or was."""
        return self._overflowed

    def _set(self, scale: float, unskipped: int, **rule: Any) -> None:
        """Go on with other numbers, from the next ``scale_loss`` on.

        Raises:
            RuntimeError: gradients are scaled by it now. LossScaleError: (a ValueError) numbers out of range.
        """
        if any(each.holds_scaled for each in self.scaler._records.states.values()):
            raise RuntimeError(
                "a loss scale was set while gradients are scaled by it: set it after the scale_loss that unscales them"
            )
        scale, unskipped = checked_entry("the loss scaler", {"loss_scale": scale, "unskipped": unskipped})
        changed = replace(self.scaler._scales.rule, **rule)
        low, high = checked_bounds(changed.min_scale, scale, changed.max_scale)
        checked_interval("growth_interval", changed.growth_interval)
        # All is checked: from here on nothing is refused.
        self.scaler._scales.rule = replace(changed, min_scale=low, max_scale=high)
        self.scaler._records.on_floor = _on_floor(low)
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
        # apex lets such a block pass, where our scaler and torch's say that a check is missing.
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


def _on_floor(min_scale: float | None) -> Literal["raise"] | None:
    """Return what happens at the floor: with one the scale stays there, as in apex; without, it would reach 0."""
    return "raise" if min_scale is None else None


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
