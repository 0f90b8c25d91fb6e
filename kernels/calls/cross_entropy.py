"""Calls cross-entropy of low logits, which need no FP32 copy where a kernel, a loop or slices of ours serve."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.graph_call import graph_call, triton_serves
from fxprec.kernels.launch.observers import runs_eagerly
from fxprec.kernels.launch.operands import FLOATS, LOW_DTYPES, suits_loops

#: Fewest (logits, classes) on a CPU from which slices of rows by torch's ops, or a compiled loop, beat torch's loss:
#: they pass over memory less often, but take more calls. Classes must be the last dimension: those of images are not.
FEWEST_FOR_SLICES: Final = (1 << 20, 512)
FEWEST_FOR_LOOP: Final = (1 << 18, 128)


@graph_call
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, compiled: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``F.cross_entropy``, in FP32 of FP32, float16 or bfloat16 logits; float64 stays float64.

    Args:
        compiled: on a CPU a C++ loop may run, for many logits.
    """
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    wide = target.dtype is torch.float64 or (weight is not None and weight.dtype is torch.float64)
    if not wide and (weight is None or not weight.requires_grad):
        labels = weight is None and not target.is_floating_point()
        looped = compiled and labels and _are_many(input, *FEWEST_FOR_LOOP) and suits_loops(input)
        low = input.dtype in LOW_DTYPES
        # On a CPU ``kernel`` takes slices, unless it is told to take the loop.
        sliced = labels and low and label_smoothing == 0 and _are_many(input, *FEWEST_FOR_SLICES)
        if looped or sliced or triton_serves(input):
            from fxprec.kernels.nn.cross_entropy import cross_entropy as kernel  # which loads Triton

            return kernel(input, target, weight, **options, compiled=looped)
    return F.cross_entropy(input.float() if input.dtype in LOW_DTYPES else input, target, weight, **options)


def _are_many(logits: Tensor, many: int, classes: int) -> bool:
    """Return whether logits on a CPU are so many, in rows of so many classes, that torch's loss is not the fastest."""
    return (
        runs_eagerly()
        and logits.device.type == "cpu"
        and logits.dtype in FLOATS
        and logits.numel() >= many
        and logits.dim() <= 2
        and logits.shape[-1] >= classes
    )
