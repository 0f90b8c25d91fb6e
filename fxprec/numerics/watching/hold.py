"""Keep a step of an optimizer from changing anything.

By the device: the optimizer reads ``found_inf`` there, as torch's fused ones and fxprec's do for a loss scaler. By the
host: it finds no gradients. A parameter without one is left alone by every optimizer, with its state and step count,
and whoever wrapped ``step`` (a learning rate scheduler) sees a call as ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.optim.gradient_check import GradientCheck
from fxprec.scaling.gradients import parameters_of
from fxprec.scaling.skips import wants_scaler


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's ``step`` reads ``found_inf``."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not wants_scaler(optimizer)


def is_scaled(optimizer: Optimizer) -> bool:
    """Return whether a loss scaler steps the optimizer; another watch tells it no scale."""
    return hasattr(optimizer, "found_inf") and hasattr(optimizer, "grad_scale")


class Hold:
    """Hold on an optimizer's step: values it was told, and gradients taken away, until ``release``."""

    def __init__(self) -> None:
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._told: list[tuple[Any, str, Any]] = []

    def hide_gradients(self, optimizer: Optimizer) -> None:
        """Make the step that follows change nothing, by taking the gradients away."""
        self._hidden += [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def tell(self, optimizer: Optimizer, found: Tensor, check: GradientCheck | None) -> None:
        """Make the step that follows change nothing where ``found``, 0-dim FP32 on the device, is 1.

        Args:
            optimizer: one that ``skips_on_device``.
            found: 0 or 1; what a loss scaler or another watch told already counts as well.
            check: what its own ``check_gradients`` found, which need not look again.
        """
        told = getattr(optimizer, "found_inf", None)
        if told is not None and not is_scaled(optimizer):
            told.copy_(torch.maximum(told, found))  # by another watch, which takes it back before this one
            return
        self._tell(optimizer, "found_inf", found if told is None else torch.maximum(told.view(()), found))
        if check is not None:
            self._tell(optimizer, "gradient_check", check)

    def _tell(self, optimizer: Optimizer, name: str, value: Any) -> None:
        self._told.append((optimizer, name, getattr(optimizer, name, None)))
        setattr(optimizer, name, value)

    def release(self) -> None:
        """Put all back as it was."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        # Newest first: a name that was told twice ends with its oldest value.
        for optimizer, name, before in reversed(self._told):
            if before is None:
                delattr(optimizer, name)
            else:
                setattr(optimizer, name, before)
        self._hidden.clear()
        self._told.clear()
