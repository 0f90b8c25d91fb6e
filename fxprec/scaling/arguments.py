"""What a loss scaler accepts: numbers in range, closures never, everything checked before anything changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from fxprec.errors import ClosureError, LossScaleError

#: The scales that FP32 holds as normal numbers. The reciprocal of a smaller one may be inf.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, (2 - 2.0**-23) * 2.0**127

#: The five keys of ``torch.amp.GradScaler.state_dict``.
TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def checked_scale(name: str, value: Any) -> float:
    """A scale: finite and greater than 0, as an FP32 number."""
    if not _is_number(value) or not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        raise LossScaleError(
            f"{name} must be finite and greater than 0 in float32 ({SMALLEST_SCALE:.3g} to {LARGEST_SCALE:.3g}), "
            f"not {value!r}"
        )
    return float(value)


def checked_factors(growth: Any, backoff: Any) -> tuple[float, float]:
    """Growth above 1 and backoff between 0 and 1."""
    if not _is_number(growth) or not 1 < growth < math.inf:
        raise LossScaleError(f"growth_factor must be finite and greater than 1, not {growth!r}")
    if not _is_number(backoff) or not 0 < backoff < 1:
        raise LossScaleError(f"backoff_factor must be greater than 0 and less than 1, not {backoff!r}")
    return float(growth), float(backoff)


def checked_dynamic(growth: Any, backoff: Any) -> tuple[float, float]:
    """The same, or both exactly 1, as the state of a static scale has them."""
    return (1.0, 1.0) if growth == backoff == 1.0 else checked_factors(growth, backoff)


def checked_bounds(low: Any, scale: float, high: Any) -> tuple[float | None, float | None]:
    """``min_scale <= scale <= max_scale``, where they are given."""
    low = None if low is None else checked_scale("min_scale", low)
    high = None if high is None else checked_scale("max_scale", high)
    if low is not None and high is not None and low > high:
        raise LossScaleError(f"min_scale={low:g} is above max_scale={high:g}")
    if (low is not None and scale < low) or (high is not None and scale > high):
        raise LossScaleError(f"a scale of {scale:g} is not between min_scale={low} and max_scale={high}")
    return low, high


def checked_interval(name: str, value: Any) -> int:
    """A whole number of at least 1."""
    if not _is_count(value) or value < 1:
        raise LossScaleError(f"{name} must be a whole number of at least 1, not {value!r}")
    return int(value)


def checked_new_scale(value: Any, device: str) -> float:
    """The argument of ``update``: a number, or a tensor of one element (which is read: a host sync)."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.requires_grad or value.device.type != device:
            raise LossScaleError(
                f"new_scale should be a number or a tensor of one element on {device!r} without requires_grad, not "
                f"one of shape {tuple(value.shape)} on {value.device.type!r}"
                + (" that requires grad" if value.requires_grad else "")
            )
        value = value.item()
    return checked_scale("the new scale", value)


def checked_state(state: Any, num_losses: int) -> list[dict[str, Any]]:
    """The state of each loss from a ``state_dict``, ours or torch's. Of the first loss torch's keys are what counts.

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
    checked_dynamic(state["growth_factor"], state["backoff_factor"])
    checked_interval("growth_interval", state["growth_interval"])
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


def refuse_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """``step(optimizer, None)`` is fine, a real closure is not: it would run backward passes that nobody unscales."""
    closure = kwargs.get("closure", args[0] if args else None)
    if callable(closure):
        raise ClosureError(
            "Closure use is not currently supported if GradScaler is enabled: the closure's backward would leave "
            "scaled gradients to the optimizer. For one that evaluates once, call it first:\n"
            "    loss = closure()        # zero_grad, forward, scaler.scale(loss).backward()\n"
            "    scaler.step(optimizer)\n"
            "For one that evaluates several times a step (LBFGS), train in bfloat16, which needs no scaling: "
            "fxprec.convert(model, dtype=torch.bfloat16)"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value < 2**31  # int32 on the device


def checked_count(name: str, value: Any) -> int:
    """A whole number of at least 0."""
    if not _is_count(value) or value < 0:
        raise LossScaleError(f"{name} must be a whole number of at least 0, not {value!r}")
    return int(value)
