"""A training step of fxprec on a GPU that is not there: all that it launches, and torch's ops between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

import fxprec
from benchmarks.measure.training_step import Setup
from benchmarks.measure.variants import converted
from benchmarks.predict.launches import Unread, launches_of
from benchmarks.predict.ops import Uncomputed
from benchmarks.predict.parts import Parts
from benchmarks.workloads.training import Workload
from fxprec.kernels.launch import observers

__all__ = ["parts_of", "unseen"]


def parts_of(workload: Workload, device: torch.device, dtype: torch.dtype) -> Parts:
    """Of the third step, when states and shadows are there. The process has pretended the machine.

    Regions are fused, whatever their size, as for a step that will be captured; the loss is inside; fxprec's AdamW.
    """
    step = converted(workload, Setup(device, dtype, batches=1), own=True, inside=True, fuse=True)
    with unseen(), Uncomputed():
        step()
        step()
    count = sum(parameter.numel() for parameter in step.model.parameters())
    shadows = fxprec.report(step.model).headline.weights.shadow_bytes
    unread: list[Unread] = []
    with unseen(), Uncomputed() as ops:
        # Of AdamW's kernel, whose tensors are in tables: weights, gradients and moments in FP32, and shadows.
        launches = launches_of(step, (16 * count, 12 * count + shadows), unread)
    return Parts([(launch,) for launch in launches], ops.work, unread)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Kernels run as without a dispatch mode: that which counts ops is part of the device that is not there."""
    own = observers.dispatch_modes

    def others() -> int:
        return max(0, own() - 1)

    observers.dispatch_modes = others
    object.__setattr__(observers.ANY_MODE, "is_on", others)
    try:
        yield
    finally:
        observers.dispatch_modes = own
        object.__setattr__(observers.ANY_MODE, "is_on", own)
