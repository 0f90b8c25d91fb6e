"""Steps that are skipped on the device: the host never learns whether, and does not wait.

The contract is torch's: an optimizer that sets ``_step_supports_amp_scaling`` reads its attributes ``grad_scale`` and
``found_inf`` in ``step``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.scaling.gradients import parameters_of
from fxprec.scaling.stages import CHECK
from fxprec.torch_internals import is_wrapped_by_scheduler


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Return whether a skip by the optimizer itself leaves everything as it was.

    Not so where somebody wrapped ``step`` to see whether it runs (Accelerate; torch's lr schedulers only count calls),
    and not in the first step of torch's fused optimizers, which makes their state, for a skipped step too.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return is_plain_step(optimizer) and not makes_state(optimizer)


def wants_scaler(optimizer: Optimizer) -> bool:
    """The older contract of torch's, where ``step`` takes the scaler itself."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and _takes_scaler(type(optimizer))


@lru_cache(maxsize=64)
def _takes_scaler(optimizer: type[Optimizer]) -> bool:
    return "grad_scaler" in signature(optimizer.step).parameters


def is_plain_step(optimizer: Optimizer) -> bool:
    """Return whether ``step`` is its class's, perhaps wrapped by torch's lr schedulers. (Others copy their mark.)"""
    step: Any = optimizer.__dict__.get("step")
    return step is None or (is_wrapped_by_scheduler(step) and step.__wrapped__ is type(optimizer).step)


def step_on_device(
    optimizer: Any, scale: Tensor, state: Mapping[str, Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``optimizer.step`` with its ``grad_scale`` and ``found_inf``, which are gone afterwards, whatever happens.

    Args:
        optimizer: may have a ``grad_scale`` of the user's, which is multiplied in.
        scale: the loss scale.
        state: the scaler's of this optimizer: its stage, and flags on every device.
        args, kwargs: for ``step``.
    """
    flags = [flag.view(()).to(scale.device, non_blocking=True) for flag in state["found_inf_per_device"].values()]
    unscaled = state["stage"] is OptState.UNSCALED
    given = getattr(optimizer, "grad_scale", None)
    optimizer.grad_scale = given if unscaled else scale if given is None else scale * given
    # One at most: fused kernels take it off the step count again.
    optimizer.found_inf = torch.stack(flags).amax() if len(flags) > 1 else flags[0]
    if CHECK in state:
        optimizer.gradient_check = state[CHECK]
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
        if CHECK in state:
            del optimizer.gradient_check


def makes_state(optimizer: Optimizer) -> bool:
    """Return whether the next step of one of torch's fused optimizers, or of ours, makes state."""
    if isinstance(optimizer, torch.optim.SGD) and all(group["momentum"] == 0 for group in optimizer.param_groups):
        return False
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.SGD)):
        return False
    known = optimizer.state
    if len(known) == sum(len(group["params"]) for group in optimizer.param_groups) and all(known.values()):
        return False  # the usual case, without a look at each parameter
    return any(p.grad is not None and not known.get(p) for p in parameters_of(optimizer))
