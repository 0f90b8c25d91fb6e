"""The dynamic loss scale: the numbers it may be, how it grows and backs off, and when it has nowhere left to fall.

A scale is three numbers on its device, moved without a host sync:

    overflow     hysteresis_left -= 1; at 0 the scale backs off      growth_tracker = 0
    no overflow  growth_tracker += 1; at growth_interval the scale grows and growth_tracker = 0
                 hysteresis_left is refilled when the scale grows, or with ``consecutive`` at once

Sources: ``torch.amp.GradScaler`` for scale and growth tracker; hysteresis as Megatron-LM's ``DynamicGradScaler`` and
DeepSpeed's ``DynamicLossScaler`` (there ``consecutive_hysteresis``) have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.errors import LossScaleError
from fxprec.host_reads import OnHost, capturing
from fxprec.torch_internals import amp_update_scale_

#: The scales that FP32 holds as normal numbers. The reciprocal of a smaller one may be inf.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, (2 - 2.0**-23) * 2.0**127

#: The five keys of ``torch.amp.GradScaler.state_dict``.
TORCH_KEYS: Final = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
#: The numbers of one loss in our part of a checkpoint.
_NUMBERS: Final = ("scale", "growth_tracker", "hysteresis_left")


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
        """Return the scale (a host sync)."""
        return self.start[0] if self.scale is None else self.scale.item()

    def numbers(self) -> tuple[float, int, int]:
        """Return scale, growth tracker and hysteresis left, as Python numbers (a host sync)."""
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
        for name, number in zip(_NUMBERS, self.start, strict=True):
            if (tensor := getattr(self, name)) is not None:
                tensor.fill_(number)

    def update(self, found_inf: Tensor, rule: UpdateRule) -> None:
        """Move the scale in place. ``found_inf``: 0-dim FP32 on the scale's device, above 0 after an overflow."""
        scale, tracker, left = self.scale, self.growth_tracker, self.hysteresis_left
        assert scale is not None and tracker is not None and left is not None, "updated before it was placed"
        before = scale.clone() if rule.hysteresis > 1 else None
        amp_update_scale_(scale, tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval)
        # torch's kernel knows no hysteresis: a tolerated overflow gets its scale back.
        if before is not None:
            overflow = found_inf > 0
            # After a good step the tracker is 0 exactly when an interval is complete.
            refill = ~overflow if rule.consecutive else ~overflow & (tracker == 0)
            left.copy_(torch.where(overflow, left - 1, left).clamp_(min=0).masked_fill_(refill, rule.hysteresis))
            scale.copy_(torch.where(overflow & (left > 0), before, scale))
        if rule.min_scale is not None or rule.max_scale is not None:
            scale.clamp_(rule.min_scale, rule.max_scale)

    def fell_to(self, floor: float, found_inf: Tensor, rule: UpdateRule) -> Tensor:
        """Return 1.0 after an overflow that leaves the scale at the floor, unless hysteresis tolerates it; else 0.0."""
        assert self.scale is not None and self.hysteresis_left is not None
        # Compared after the update: an overflow at the floor leaves the scale there, too.
        hit = (found_inf > 0) & (self.scale <= floor)
        return (hit & (self.hysteresis_left <= 0) if rule.hysteresis > 1 else hit).float()


class Scales:
    """Scales of a scaler's losses, and the rule by which they move.

    Args:
        init_scale: of every loss.
        rule: as ``fxprec.LossScaler`` was asked for it, unchecked.
        dynamic: False: the scales stay.
        num_losses: how many.

    Raises:
        LossScaleError: a number out of range.
    """

    def __init__(self, init_scale: float, rule: UpdateRule, dynamic: bool, num_losses: int) -> None:
        init_scale = checked_scale("init_scale", init_scale)
        factors = checked_factors(rule.growth_factor, rule.backoff_factor)
        interval = checked_count("growth_interval", rule.growth_interval, 1)
        hysteresis = checked_count("hysteresis", rule.hysteresis, 1)
        bounds = checked_bounds(rule.min_scale, init_scale, rule.max_scale)
        # A static scale moves by factors of 1, which nobody can ask for.
        factors = factors if dynamic else (1.0, 1.0)
        self.rule = UpdateRule(*factors, interval, hysteresis, rule.consecutive, *bounds)
        self.losses = [LossScale(init_scale, 0, hysteresis) for _ in range(checked_count("num_losses", num_losses, 1))]

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
        """Return the scale of a loss, once it is placed."""
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

    def rule_now(self, near_floor: bool) -> UpdateRule:
        """Return how scales move in the next update; ``near_floor``: it may bring one to the smallest number."""
        if self.rule.min_scale is None and near_floor and self.rule.backoff_factor < 1:
            return replace(self.rule, min_scale=SMALLEST_SCALE)  # or the scale would reach 0
        return self.rule

    def saved(self) -> list[dict[str, float]]:
        """Return each loss's numbers, for a checkpoint. Reads the device."""
        return [dict(zip(_NUMBERS, loss.numbers(), strict=True)) for loss in self.losses]

    def load(self, state: Mapping[str, Any], losses: Sequence[Mapping[str, Any]]) -> None:
        """Restore what a checkpoint holds. ``state``: torch's five keys; ``losses``: from ``checked_state``."""
        self.rule = replace(
            self.rule,
            growth_factor=float(state["growth_factor"]),
            backoff_factor=float(state["backoff_factor"]),
            growth_interval=int(state["growth_interval"]),
        )
        # Bounds and hysteresis are this scaler's, whatever the file's was made with.
        low, high = self.rule.min_scale, self.rule.max_scale
        for loss, saved in zip(self.losses, losses, strict=True):
            left = min(saved.get("hysteresis_left", self.rule.hysteresis), self.rule.hysteresis)
            scale = max(low or 0.0, min(float(saved["scale"]), math.inf if high is None else high))
            loss.set(scale, int(saved["growth_tracker"]), left)


class FloorWatch:
    """Detector of overflows that took a scale to its floor, without a host sync.

    That is the end: gradients hold inf or nan at every scale, and every further step would be skipped.

    Most updates cost nothing: a scale of 2**16 that halves at most once an update needs 16 of them to come to a floor
    of 1. Only when it may have come there, each update notes on the device whether an overflow left it at the floor.
    Where reading does not wait (a CPU) this is read at once; on CUDA it is copied to pinned memory and looked at when
    the copy is done, an update or two later.

    Args:
        floor: its ``min_scale``; None: the smallest whose reciprocal is finite.
    """

    def __init__(self, floor: float | None) -> None:
        self.floor = SMALLEST_SCALE if floor is None else floor
        self.reset()

    def reset(self) -> None:
        """Forget what is known: the scales are others than after the last update."""
        self._updates = 0
        self._safe_until = 0
        # What updates left, on its way to the host: the smallest scale, a flag for each loss checked; which update.
        self._notes: list[tuple[OnHost, int]] = []

    @property
    def near(self) -> bool:
        """Return whether the next update may bring a scale to the floor."""
        return self._updates >= self._safe_until

    def note(self, updated: list[tuple[LossScale, Tensor]], losses: list[LossScale], rule: UpdateRule) -> None:
        """Note after an update whether an overflow took a loss's scale to the floor, or found it there.

        Args:
            updated: each loss that was checked, with its ``found_inf``.
            losses: all of them.
            rule: how they moved.
        """
        if rule.backoff_factor >= 1:
            return  # a static scale falls nowhere
        # A graph that is captured records no copy to the host: its replays are noted one by one instead.
        if self.near and not capturing(updated[0][1].device):
            scales = torch.stack([loss.scale for loss in losses if loss.scale is not None])
            hits = [loss.fell_to(self.floor, found, rule) for loss, found in updated]
            self._notes.append((OnHost.of(torch.stack([scales.amin(), *hits])), self._updates))
        self._updates += 1

    def fallen(self, backoff_factor: float) -> bool:
        """Return whether a scale fell to the floor, as far as is known."""
        fallen, waiting = False, list[tuple[OnHost, int]]()
        for found, update in self._notes:
            if not found.done():
                waiting.append((found, update))
                continue
            scale, *hits = found.values.tolist()
            fallen |= any(hits)
            # So many updates can pass unwatched: the scale backs off once in each at most.
            if scale > self.floor:
                steps = math.log(self.floor / scale) / math.log(backoff_factor)
                # One less, for what rounding does to the logarithms and to the scale.
                self._safe_until = max(self._safe_until, update + int(steps) - 1)
        self._notes = waiting
        return fallen


def scaled(outputs: Any, times_scale: Callable[[Tensor], Tensor]) -> Any:
    """Return ``outputs`` times the scale; low precision is cast to FP32 first: in float16 65536 times a loss is inf.

    Args:
        outputs: a floating-point tensor, or an iterable of them, nested or not. Lists, tuples and namedtuples come back
            as what they were, other iterables as an iterator (as torch's scaler does).
        times_scale: a tensor -> its product with the scale.

    Raises:
        TypeError: anything else.
    """
    if isinstance(outputs, Tensor):
        if not (outputs.is_floating_point() or outputs.is_complex()):
            raise TypeError(f"a loss of {outputs.dtype} has no gradient: scale floating-point tensors")
        return times_scale(outputs.float() if outputs.dtype.itemsize < 4 else outputs)
    if isinstance(outputs, (str, bytes, Mapping)) or not isinstance(outputs, Iterable):
        raise TypeError(f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}")
    parts = (scaled(part, times_scale) for part in outputs)
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(*parts) if hasattr(outputs, "_fields") else type(outputs)(parts)
    return parts


def checked_scale(name: str, value: Any) -> float:
    """Return a scale: finite and greater than 0, as an FP32 number; else raise LossScaleError, as all below do."""
    if not _is_number(value) or not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        raise LossScaleError(
            f"{name} must be finite and greater than 0 in float32 ({SMALLEST_SCALE:.3g} to {LARGEST_SCALE:.3g}), "
            f"not {value!r}"
        )
    return float(value)


def checked_factors(growth: Any, backoff: Any) -> tuple[float, float]:
    """Return growth, above 1, and backoff, between 0 and 1."""
    if not _is_number(growth) or not 1 < growth < math.inf:
        raise LossScaleError(f"growth_factor must be finite and greater than 1, not {growth!r}")
    if not _is_number(backoff) or not 0 < backoff < 1:
        raise LossScaleError(f"backoff_factor must be greater than 0 and less than 1, not {backoff!r}")
    return float(growth), float(backoff)


def checked_bounds(low: Any, scale: float, high: Any) -> tuple[float | None, float | None]:
    """Return ``min_scale`` and ``max_scale``, around the scale where they are given."""
    low = None if low is None else checked_scale("min_scale", low)
    high = None if high is None else checked_scale("max_scale", high)
    if low is not None and high is not None and low > high:
        raise LossScaleError(f"min_scale={low:g} is above max_scale={high:g}")
    if (low is not None and scale < low) or (high is not None and scale > high):
        raise LossScaleError(f"a scale of {scale:g} is not between min_scale={low} and max_scale={high}")
    return low, high


def checked_count(name: str, value: Any, least: int = 0) -> int:
    """Return a whole number of at least ``least``, which int32 holds, as on the device."""
    # True is an Integral, and no number that anybody means.
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) < 2**31:
        raise LossScaleError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def checked_new_scale(value: Any, device: str) -> float:
    """Return the argument of ``update``: a number, or a tensor of one element (which is read: a host sync)."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.requires_grad or value.device.type != device:
            raise LossScaleError(
                f"new_scale should be a number or a tensor of one element on {device!r} without requires_grad, not "
                f"one of shape {tuple(value.shape)} on {value.device.type!r}"
                + (" that requires grad" if value.requires_grad else "")
            )
        value = value.item()  # torch's scaler takes a tensor, too
    return checked_scale("the new scale", value)


def checked_state(state: Any, num_losses: int) -> list[dict[str, Any]]:
    """Return the state of each loss from a ``state_dict``, ours or torch's. Torch's keys count for the first loss.

    Raises:
        TypeError: no mapping. RuntimeError: empty, or keys are missing. LossScaleError: values out of range, or
            another number of losses.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a scaler's state is a dict, not {type(state).__name__}")
    if not state:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. "
            "Save it from an enabled one, or leave load_state_dict out"
        )
    if missing := [key for key in TORCH_KEYS if key not in state]:
        raise RuntimeError(f"the scaler's state lacks {missing}; it has {sorted(map(str, state))}")
    # Both factors are exactly 1 in the state of a static scale.
    if not state["growth_factor"] == state["backoff_factor"] == 1.0:
        checked_factors(state["growth_factor"], state["backoff_factor"])
    checked_count("growth_interval", state["growth_interval"], 1)
    losses = _states_of_losses(state, num_losses)
    for i, loss in enumerate(losses):
        if missing := [key for key in ("scale", "growth_tracker") if key not in loss]:
            raise RuntimeError(f"the scaler's state lacks {missing} of loss {i}; it has {sorted(map(str, loss))}")
        checked_scale(f"the saved scale of loss {i}", loss["scale"])
        for key in ("growth_tracker", "hysteresis_left"):
            checked_count(f"the saved {key} of loss {i}", loss.get(key, 0))
    return losses


def _states_of_losses(state: Mapping[str, Any], num_losses: int) -> list[dict[str, Any]]:
    first = {"scale": state["scale"], "growth_tracker": state["_growth_tracker"]}
    extra = state.get("fxprec")
    if extra is None:  # torch's
        return [first] * num_losses
    # A file is anybody's: each level of it is checked before it is read.
    if not isinstance(extra, Mapping) or not isinstance(extra.get("losses"), list):
        raise RuntimeError("the scaler's state lacks the list 'losses' under 'fxprec'")
    checked_count("the saved skipped_steps", extra.get("skipped_steps", 0))
    without = extra.get("steps_without_gradients", 0)
    checked_count("the saved steps_without_gradients", without)
    if without > extra.get("skipped_steps", 0):
        raise LossScaleError(f"the state holds {without} steps without gradients, and fewer skipped steps")
    losses = extra["losses"]
    if len(losses) != num_losses:
        advice = f": make it with num_losses={len(losses)}" if losses else ""
        raise LossScaleError(f"the state holds {len(losses)} losses, this scaler has num_losses={num_losses}{advice}")
    if not all(isinstance(loss, Mapping) for loss in losses):
        raise RuntimeError("the scaler's state of each loss under 'fxprec' is a dict")
    return [{**losses[0], **first}, *map(dict, losses[1:])]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
