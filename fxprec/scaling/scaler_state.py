"""What a loss scaler is made of and what a checkpoint holds: the scales of its losses, checked and loadable."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.scaling import arguments
from fxprec.scaling.floor import SMALLEST_SCALE, FloorWatch
from fxprec.scaling.loss_scale import LossScale, UpdateRule
from fxprec.scaling.old_scale import OldGradients
from fxprec.scaling.resume import checked_blocks, saved_blocks
from fxprec.scaling.skips import Skips

__all__ = ["ScalerState"]

#: Not pickled.
_REFERENCES = ("_model", "_known", "_claimed", "_old", "_captured", "_process_group")


def _of_first_loss(name: str) -> property:
    def get(self: ScalerState) -> Tensor | None:
        return getattr(self._losses[0], name)

    def set_(self: ScalerState, value: Tensor | None) -> None:
        if value is not None and self._losses[0].scale is None:
            self._lazy_init_scale_growth_tracker(value.device)
        setattr(self._losses[0], name, value)

    return property(get, set_)


class ScalerState(torch.amp.GradScaler):
    """The constructor, the accessors and the checkpoints of ``fxprec.LossScaler``, which documents them."""

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        dynamic: bool = True,
        fp16_gradients: bool = False,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        num_losses: int = 1,
        process_group: Any = None,
        on_floor: Literal["raise", "warn"] | None = "raise",
        recheck: bool = False,
    ) -> None:
        init_scale = arguments.checked_scale("init_scale", init_scale)
        growth_factor, backoff_factor = arguments.checked_factors(growth_factor, backoff_factor)
        arguments.checked_interval("growth_interval", growth_interval)
        self._hysteresis = arguments.checked_interval("hysteresis", hysteresis)
        self._bounds = arguments.checked_bounds(min_scale, init_scale, max_scale)
        self._on_floor = arguments.checked_choice("on_floor", on_floor, ("raise", "warn", None))
        self._consecutive = consecutive_hysteresis
        self._fp16_gradients = fp16_gradients
        self._recheck = recheck
        self._process_group = process_group
        count = arguments.checked_interval("num_losses", num_losses)
        self._losses = [LossScale(init_scale, 0, self._hysteresis) for _ in range(count)]
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        # torch leaves these out of a disabled scaler, and its accessors fail.
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        if not dynamic:  # torch's update multiplies by one of these; its constructor would not take them
            self._growth_factor = self._backoff_factor = 1.0
        self._floor = FloorWatch(self._bounds[0])
        self._skips = Skips()
        self._reset_references()
        self._forget_iteration()

    __init__.__qualname__ = "LossScaler.__init__"  # which Python's messages about arguments name

    # torch's private names, which Accelerate and Lightning read: those of the first loss.
    _scale: Any = _of_first_loss("scale")
    _growth_tracker: Any = _of_first_loss("growth_tracker")

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # The first loss last: its scale tells that all are there.
        for loss in reversed(self._losses):
            loss.place(dev)

    def get_scale(self, loss_id: int = 0) -> float:
        """The scale of a loss; 1.0 if scaling is disabled. Reads the device."""
        return self._losses[loss_id].number() if self._enabled else 1.0

    def set_growth_factor(self, new_factor: float) -> None:
        """Raises LossScaleError unless it is above 1."""
        self._growth_factor = arguments.checked_factors(new_factor, 0.5)[0]

    def set_backoff_factor(self, new_factor: float) -> None:
        """Raises LossScaleError unless it is between 0 and 1."""
        self._backoff_factor = arguments.checked_factors(2.0, new_factor)[1]
        self._floor.reset()

    def set_growth_interval(self, new_interval: int) -> None:
        """Raises LossScaleError unless it is a whole number of at least 1."""
        self._growth_interval = arguments.checked_interval("growth_interval", new_interval)

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys, and "fxprec": each loss's scale and trackers, skips, how gradients stand.

        Loads into ``torch.amp.GradScaler`` too. Save between two iterations; or within an accumulation, with the
        gradients, after any ``backward`` or ``scale_loss``.

        Raises:
            RuntimeError: ``scale_loss`` keeps gradients of earlier losses aside, which you cannot save.
        """
        if not self._enabled:
            return {}
        keys = ("scale", "growth_tracker", "hysteresis_left")
        losses = [dict(zip(keys, loss.numbers(), strict=True)) for loss in self._losses]
        extra: dict[str, Any] = {"losses": losses, "skipped_steps": self._skips.count}
        extra["scaled"] = self._scaled_since_update
        states = [(self._known[i], state) for i, state in self._per_optimizer_states.items() if i in self._known]
        extra["blocks"] = saved_blocks(states) + self._blocks
        return {**super().state_dict(), "fxprec": extra}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of ours or of ``torch.amp.GradScaler``. Nothing changes if it is refused.

        Raises:
            TypeError: no dict. RuntimeError: empty, or keys are missing. LossScaleError: (a ValueError) numbers out of
                range, or another number of losses.
        """
        if not self._enabled:
            return
        losses = arguments.checked_state(state_dict, len(self._losses))
        extra = state_dict.get("fxprec", {})
        blocks = checked_blocks(extra.get("blocks", []), len(self._losses))
        self._growth_factor = float(state_dict["growth_factor"])
        self._backoff_factor = float(state_dict["backoff_factor"])
        self._growth_interval = int(state_dict["growth_interval"])
        low, high = self._bounds
        for loss, saved in zip(self._losses, losses, strict=True):
            left = min(saved.get("hysteresis_left", self._hysteresis), self._hysteresis)
            scale = max(low or 0.0, min(float(saved["scale"]), math.inf if high is None else high))
            loss.set(scale, int(saved["growth_tracker"]), left)
        self._init_scale, self._init_growth_tracker, _ = self._losses[0].start
        self._skips = Skips(extra.get("skipped_steps", 0))
        self._floor.reset()
        self._old = OldGradients()
        self._forget_iteration()
        if extra.get("scaled"):  # saved within an accumulation: its gradients come from a file, not from a backward
            self._scaled_since_update = True
            self._blocks = blocks
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, copy and deepcopy, between two iterations, as torch's.

        Raises:
            AssertionError: within one. TypeError: a process group, which only this process knows.
        """
        if self._process_group is not None:
            raise TypeError("a LossScaler with a process_group cannot be pickled or copied: save its state_dict()")
        state = super().__getstate__()
        for name in ("_scale", "_growth_tracker", *_REFERENCES):
            state.pop(name, None)
        state["_losses"] = [LossScale(*loss.numbers()) for loss in self._losses]
        state["_floor"] = FloorWatch(self._bounds[0])
        state["_skips"] = Skips(self._skips.count)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_references()
        self._process_group = None

    def _reset_references(self) -> None:
        """What is known of other objects: nothing."""
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._known: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._claimed: dict[int, weakref.ref[Optimizer]] = {}
        self._old = OldGradients()
        self._captured = False

    def _fresh_notes(self) -> dict[str, Any]:
        """Attributes for iterations that leave no trace: what a captured graph is made of."""
        notes: dict[str, Any] = {"_floor": FloorWatch(self._bounds[0]), "_skips": Skips(), "_old": OldGradients()}
        flags = dict.fromkeys(("_captured", "_scaled_since_update", "_scaled_outside"), False)
        return {**notes, **flags, "_claimed": {}, "_blocks": [], "_on_floor": None}

    def _forget_iteration(self) -> None:
        if self._enabled:
            self._per_optimizer_states.clear()
        self._claimed.clear()
        self._scaled_since_update = self._scaled_outside = False
        self._blocks: list[dict[str, Any]] = []

    def _rule(self) -> UpdateRule:
        low, high = self._bounds
        if low is None and self._floor.near and self._backoff_factor < 1:
            low = SMALLEST_SCALE  # or the scale would reach 0
        return UpdateRule(
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            self._hysteresis,
            self._consecutive,
            low,
            high,
        )
