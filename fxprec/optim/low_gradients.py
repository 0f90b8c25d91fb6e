"""Marks the parameters of an optimizer that wants low gradients, and unmarks them if another optimizer steps.

The shadow stores of converted models, which make the edge from a parameter to its shadow, read the marks. Weights that
no graph lowers keep FP32 gradients.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxprec.errors import GradientsWarning
from fxprec.scaling.gradients import dtensor_type, parameters_of
from fxprec.shadows import stores
from fxprec.shadows.low_gradients import Wishes, widened


def checked_low_gradients(argument: Any) -> str | None:
    """Return the argument as None (FP32 gradients), "step" (low unless accumulated) or "accumulate" (low then too).

    Raises:
        ValueError: another argument than False, True or "accumulate". RuntimeError: torch has no ``grad_dtype``.
    """
    if argument is False or argument is None:
        return None
    if argument is not True and argument != "accumulate":
        raise ValueError(f"low_gradients must be False, True or 'accumulate', not {argument!r}")
    if not hasattr(Tensor, "grad_dtype"):
        raise RuntimeError(f"low_gradients need Tensor.grad_dtype, which torch {torch.__version__} does not have")
    return "accumulate" if argument == "accumulate" else "step"


def ask_for_low_gradients(parameters: Iterable[Tensor], how: str) -> Wishes:
    """Mark parameters for low gradients, from the next forward on that gives them a shadow.

    The marks count for as long as the optimizer holds the result.

    Raises:
        ValueError: DTensors, which have no persistent shadow.
    """
    parameters = [*parameters]
    dtensor = dtensor_type()
    if dtensor is not None and any(isinstance(parameter, dtensor) for parameter in parameters):
        raise ValueError(
            "low_gradients=True for sharded parameters (DTensors), whose low copies live for one forward only: leave "
            "it out. With FSDP2, MixedPrecisionPolicy(reduce_dtype=...) halves the traffic of gradients"
        )
    _watch_other_optimizers()
    wishes = Wishes(parameters, how)
    # Their shadows' edges cast gradients back: new ones, which do not, are made at the next read.
    for store in stores():
        store.forget(parameters)
    return wishes


def end_low_gradients(parameters: Iterable[Tensor]) -> int:
    """Unmark parameters, whoever marked them, and cast their gradients to FP32; return how many were marked."""
    changed = widened(parameters, how=("step", "accumulate"))
    for store in stores() if changed else ():
        store.forget(changed)
    return len(changed)


@functools.cache
def _watch_other_optimizers() -> None:
    """Register a hook before the steps of all optimizers that widens low gradients for other ones.

    torch's optimizers would fail on a low gradient half-way through their parameters.
    """

    def about_to_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if getattr(optimizer, "writes_shadows", False):
            return
        low = [p for p in parameters_of(optimizer) if p.grad is not None and p.grad.dtype is not p.dtype]
        if low and (count := end_low_gradients(low)):
            warnings.warn(
                f"{type(optimizer).__name__} steps on {count} parameters whose gradients another optimizer keeps low "
                "(low_gradients), which only fxprec.optim can read: they are FP32 from now on",
                category=GradientsWarning,
                stacklevel=3,
            )

    register_optimizer_step_pre_hook(about_to_step)
