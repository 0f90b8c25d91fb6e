"""An optimizer's wish for low gradients: its parameters are marked.

The shadow stores of converted models, which make the edge from a parameter to its shadow, see to it. Weights that no
graph lowers keep FP32 gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fxprec.low_gradients import mark
from fxprec.scaling.gradients import dtensor_type
from fxprec.shadows import stores

__all__ = ["ask_for_low_gradients", "checked_low_gradients"]


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


def ask_for_low_gradients(parameters: Iterable[Tensor], how: str) -> None:
    """From the next forward on, for those of ``parameters`` that have a shadow then.

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
    for parameter in parameters:
        mark(parameter, how)
    for store in stores():
        store.forget(parameters)
