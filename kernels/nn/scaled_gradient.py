"""Scales a gradient computed in the forward by the backward's factor: ``values * (grad_output / denominator)``.

The factor stays on the device. If no one can read the values again they are overwritten, and a factor of 1 moves
nothing: a program reads it and ends. Otherwise the values are read once and the result is written once.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fxprec.kernels.launch.kernel_op import KernelOp
from fxprec.kernels.launch.observers import ANY_MODE, COMPILER, TRANSFORM, watcher
from fxprec.kernels.launch.triton_support import can_launch, constexpr, jit, on_device, tl
from fxprec.kernels.torch_internals import keeps_graph, storage_owners

_BLOCK: Final = 4096
#: Owners of a saved tensor's memory: the graph's own tensor, the one it unpacks, and the storage object that asks.
_OWNERS: Final = 3


@jit()
def scale_kernel(values, factor, denominator, results, count, IN_PLACE: constexpr, BLOCK: constexpr):
    """Scale BLOCK elements. Grid: ceil(count / BLOCK).

    values: fp32, fp16, bf16 [count]; multiplied in fp32. factor: fp32 [1]. denominator: fp32 [1] or None.
    results: fp32, fp16, bf16 [count], written; with IN_PLACE the values, untouched where the factor is 1.
    """
    by = tl.load(factor)
    if denominator is not None:
        over = tl.load(denominator)
        by = tl.div_rn(by, tl.where(over == 0.0, 1.0, over))
    # A loss without a loss scale: the values are the gradient already.
    if IN_PLACE:
        if by == 1.0:
            return
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.load(values + places, mask=inside, other=0.0).to(tl.float32) * by
    tl.store(results + places, value.to(results.dtype.element_ty), mask=inside)


def _launch(values: Tensor, factor: Tensor, denominator: Tensor | None, results: Tensor) -> None:
    if not can_launch(values.device):
        by = factor if denominator is None else factor / torch.where(denominator == 0, 1.0, denominator)
        results.copy_(values.float() * by)
    elif values.numel():
        count = values.numel()
        with on_device(values.device):
            scale_kernel[(-(-count // _BLOCK),)](
                values, factor, denominator, results, count, IN_PLACE=results is values, BLOCK=_BLOCK, num_warps=8
            )  # fmt: skip


def _scaled(values: Tensor, factor: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    results = torch.empty_like(values, dtype=dtype)
    _launch(values, factor, denominator, results)
    return results


def _fake(values: Tensor, factor: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(values, dtype=dtype)


_op = KernelOp("scaled_gradient", _scaled, _fake)


def scaled_gradient(values: Tensor, factor: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``values * (factor / denominator)`` in a backward, rounded once to ``dtype``.

    Args:
        values: contiguous float32, float16 or bfloat16 that only this graph has saved. They are overwritten and
            returned where the dtype is theirs and the graph is being freed, in plain eager mode.
        factor: one float32 on the same device, the gradient of the loss.
        denominator: one float32 on the same device, or None for 1. Zero divides nothing: no row had a label, and the
            values are zeros.
    """
    if values.dtype == dtype and _last_look(values):
        with torch.no_grad():
            # An output of the forward has a grad_fn, which its gradient must not have.
            values = values.detach()
            _launch(values, factor, denominator, values)
        return values
    return _op(values, factor, denominator, dtype)


def wants_gradients_now() -> bool:
    """Return whether a forward may make gradients: no transform or export runs, which have a backward of their own."""
    return torch.is_grad_enabled() and (
        not torch.compiler.is_exporting() if torch.compiler.is_compiling() else watcher(TRANSFORM) is None
    )


def _last_look(values: Tensor) -> bool:
    """Return whether this backward alone still reads its graph's saved tensors, and no tracer records it."""
    if type(values) is not Tensor or watcher(COMPILER, ANY_MODE) is not None or keeps_graph():
        return False
    # Someone else may hold the saved tensor: a hook, or the output itself.
    owners = storage_owners(values)
    return owners is not None and owners <= _OWNERS
