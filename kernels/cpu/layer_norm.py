"""Computes layer norms of low inputs on a CPU, with gradients of the weight and the bias that are added up in FP32::

    y = layer_norm(x, w, b)            torch's kernel, which reads and writes low and computes in FP32
    dx, dw, db                         torch's FP32 kernel, of some rows at a time; dx rounded once

Torch's backward of a low x adds up dw and db over the rows in x's dtype, where a sum of hundreds takes no more terms:
of 4,096 rows whose gradients are around 1 the bias's is 75 % off, of 100,000 it is noise, under torch.autocast as well.
This backward takes as long as torch's, give or take what FP32 copies of ``_ELEMENTS`` elements cost; nothing more is
saved for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.kernel_op import KernelOp, eager_gradients
from fxprec.kernels.launch.observers import COMPILER, DUAL, SCRIPT, TRANSFORM, watcher
from fxprec.kernels.launch.operands import suits_loops

#: Of the rows that are FP32 at a time: they fit a core's cache, and memory for them is taken from the system once.
_ELEMENTS: Final = 1 << 19


def serves(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether a backward may follow that adds up over low rows.

    False under compilers and transforms, which have no rule for our op.
    """
    if watcher(COMPILER, SCRIPT, TRANSFORM, DUAL) is not None or not torch.is_grad_enabled():
        return False
    parameters = [each for each in (weight, bias) if each is not None]
    return (
        x.dtype is torch.bfloat16
        and any(each.requires_grad for each in parameters)
        and all(map(suits_loops, (x, *parameters)))
        and len({each.dtype for each in parameters}) == 1
    )


def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return ``F.layer_norm(x, shape, weight, bias, eps)``, bit for bit.

    Args:
        x: bfloat16 [*, *shape], on a CPU.
        shape: the dimensions that are normalized, the last ones of x.
        weight: FP32 or bfloat16, of that shape, or None; likewise the bias, in the same dtype.
        eps: added to the variance.

    Returns:
        as torch's. Gradients are those of FP32, rounded once to the dtypes of x, weight and bias.
    """
    return _op(x, weight, bias, [*shape], eps)[0]


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float) -> Tensor:
    """Compute the norm in FP32 or float64, differentiable any number of times, with the result in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale, shift = (None if each is None else each.to(wide) for each in (weight, bias))
    return F.layer_norm(x.to(wide), shape, scale, shift, eps).to(x.dtype)


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.native_layer_norm(x, shape, weight, bias, eps)


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    parameter = bias if weight is None else weight
    sizes = *x.shape[: x.dim() - len(shape)], *[1] * len(shape)
    mean, rstd = (x.new_empty(sizes, dtype=None if parameter is None else parameter.dtype) for _ in range(2))
    return torch.empty_like(x, memory_format=torch.contiguous_format), mean, rstd


def backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, shape: list[int],
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the wanted gradients of x, weight and bias in their common dtype, differentiable."""
    found = torch.ops.aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, wanted)
    return [each for each, want in zip(found, wanted, strict=True) if want]


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, shape: list[int],
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    made = _fake_backward(grad, x, weight, bias, mean, rstd, shape, wanted)
    of_x, of_parameters = (made[0], made[1:]) if wanted[0] else (None, made)
    sums = [torch.zeros_like(each, dtype=torch.float32) for each in of_parameters]
    scale, shift = (None if each is None else each.float() for each in (weight, bias))
    outer = x.dim() - len(shape)
    rows = [each.reshape(prod(x.shape[:outer]), *each.shape[outer:]) for each in (grad, x, mean, rstd)]
    step = max(1, _ELEMENTS // max(prod(shape), 1))
    for first in range(0, len(rows[0]), step):
        part = slice(first, first + step)
        dy, values, mean, rstd = (each[part].float() for each in rows)
        found = backward_reference(dy, values, scale, shift, mean, rstd, shape, wanted)
        if of_x is not None:
            of_x.view(rows[1].shape)[part] = found.pop(0)
        for total, each in zip(sums, found, strict=True):
            total += each
    for own, total in zip(of_parameters, sums, strict=True):
        own.copy_(total)
    return made


def _fake_backward(grad: Tensor, x: Tensor, weight: Any, bias: Any, *rest: Any) -> list[Tensor]:
    pairs = zip((x, weight, bias), rest[-1], strict=True)
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each, want in pairs if want]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, ctx.shape, ctx.eps = inputs
    # The statistics are saved for the backward, and are no differentiable results.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, bias, *output[1:])


def _gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    saved, wanted = ctx.saved_tensors, [*ctx.needs_input_grad[:3]]
    if grad is None or not any(wanted):
        return (None,) * 5
    if torch.is_grad_enabled():
        again = partial(reference, shape=ctx.shape, eps=ctx.eps)
        return *eager_gradients(again, saved[:3], (grad,)), None, None
    run: Any = backward_reference if watcher(TRANSFORM) is not None else _backward_op
    found = iter(run(grad, *saved, ctx.shape, wanted))
    return *(next(found) if each else None for each in wanted), None, None


_backward_op = KernelOp("layer_norm_backward", _backward, _fake_backward)
_op = KernelOp("layer_norm", _forward, _fake, backward=_gradients, setup_context=_setup_context)
