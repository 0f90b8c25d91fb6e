"""An optimizer's wish for low gradients: its parameters are marked.

The shadow stores of converted models, which make the edge from a parameter to its shadow, see to it. Weights that no
graph lowers keep FP32 gradients. Where another optimizer takes the parameters over, its gradients are FP32 again.
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
    """None: gradients stay FP32; "step": low, unless they are accumulated; "accumulate": low then too.

    Raises:
        ValueError: another argument than False, True or "accumulate". RuntimeError: torch cannot.
    """
    if argument is False or argument is None:
        return None
    if argument is not True and argument != "accumulate":
        raise ValueError(f"low_gradients must be False, True or 'accumulate', not {argument!r}")
    if not hasattr(Tensor, "grad_dtype"):
        raise RuntimeError(f"low_gradients need Tensor.grad_dtype, which torch {torch.__version__} does not have")
    return "accumulate" if argument == "accumulate" else "step"


def ask_for_low_gradients(parameters: Iterable[Tensor], how: str) -> Wishes:
    """From the next forward on, for those of ``parameters`` that have a shadow then. The optimizer keeps the result.

    Raises:
        ValueError: DTensors, which have none.
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
    for store in stores():
        store.forget(parameters)
    return wishes


def end_low_gradients(parameters: Iterable[Tensor]) -> int:
    """FP32 gradients for all of them, those that are there too, whoever asked for low ones; how many had asked."""
    changed = widened(parameters, how=("step", "accumulate"))
    for store in stores() if changed else ():
        store.forget(changed)
    return len(changed)


@functools.cache
def _watch_other_optimizers() -> None:
    """Before their steps; torch's would fail on a low gradient, half-way through their parameters."""

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
