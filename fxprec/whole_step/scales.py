"""Handle the scaler of a step: unmoved while the step is captured; after a replay as after an eager step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from fxprec.scaling.loss_scaler import LossScaler
from fxprec.torch_internals import fresh_states, place_scale, scale_names, scaler_states, set_scaler_states


def scale_tensors(scaler: GradScaler) -> list[Tensor]:
    """Return scale and trackers, where they were placed."""
    losses: Any = scaler._scales.losses if isinstance(scaler, LossScaler) else [scaler]
    names = ("scale", "growth_tracker", "hysteresis_left") if isinstance(scaler, LossScaler) else scale_names
    if not scaler.is_enabled():
        return []
    return [tensor for loss in losses for name in names if (tensor := getattr(loss, name)) is not None]


def scale_rule(scaler: GradScaler) -> tuple[float, ...] | None:
    """Return how the scale moves, as numbers that a graph holds; None for a disabled scaler."""
    if not scaler.is_enabled():
        return None
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), float(scaler.get_growth_interval())


def refuse_open_iteration(scaler: GradScaler) -> None:
    """Raise a RuntimeError if something was scaled, unscaled or stepped since the last update.

    The step ends with an update of its own, which would move the scale under these gradients.
    """
    if not scaler.is_enabled():
        return
    open_ = any(state["stage"] is not OptState.READY for state in scaler_states(scaler).values())
    if open_ or (isinstance(scaler, LossScaler) and scaler._records.scaled):
        raise RuntimeError(
            "the scaler has begun an iteration (scale, unscale_ or step was called since its last update), and a "
            "captured step is a whole one: finish it with scaler.step and scaler.update, drop it with "
            "scaler.update(scaler.get_scale()), or give the captured step a scaler of its own"
        )


def forget_iteration(scaler: GradScaler) -> None:
    """Drop an iteration that an error ended, whose gradients are gone: the next one may begin."""
    if not scaler.is_enabled():
        return
    if isinstance(scaler, LossScaler):
        scaler._drop_iteration()
    else:
        set_scaler_states(scaler, fresh_states())


@contextmanager
def scaler_untouched(scaler: GradScaler, device: torch.device) -> Iterator[None]:
    """Undo iterations of the block: scales and trackers, what was skipped, and what is known of gradients.

    The scales are placed on the device, where a graph will find them.
    """
    if not scaler.is_enabled():
        yield
        return
    # A scale made lazily within the capture would lie in the graph's pool.
    place_scale(scaler, device)
    tensors = scale_tensors(scaler)
    values = [tensor.clone() for tensor in tensors]
    try:
        with scaler._aside() if isinstance(scaler, LossScaler) else _states_aside(scaler):
            yield
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


@contextmanager
def _states_aside(scaler: GradScaler) -> Iterator[None]:
    kept = scaler_states(scaler)
    set_scaler_states(scaler, fresh_states())
    try:
        yield
    finally:
        set_scaler_states(scaler, kept)
