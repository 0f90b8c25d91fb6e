"""Calls layer norm of bfloat16 values on a CPU, with gradients of weight and bias that are added up in FP32::

    y = layer_norm(x, w, b)            torch's kernel, which reads and writes low and computes in FP32
    dx, dw, db                         of more than 64 rows torch's FP32 kernels, of some rows at a time, rounded once

Torch's backward of a low x adds up dw and db over the rows in x's dtype. In bfloat16 a sum stops growing at some
hundreds, since a term of 1 is then less than half of its last bit: of 4,096 rows whose gradients are around 1 the
bias's is 75 % off, of 100,000 it is noise, under torch.autocast as well; of 64 rows it is 1 %, and of 300 3 %.
This backward finds mean and variance again, in FP32 copies of ``_ELEMENTS`` elements at a time, and saves less.
Forward and backward take 1.2 to 1.8 times as long as torch's (two cores of an AMD EPYC, 512 x 64 to 4,096 x 768).
torch's FP32 kernel between casts would take less time where tensors are small. It must not stand in for small ones
while nobody looks: a checkpoint whose forward ran under a dispatch mode, and runs again without, saves other tensors.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.graph_call import graph_call, stands_for
from fxprec.kernels.launch.kernel_op import KernelOp
from fxprec.kernels.launch.observers import TRANSFORM, runs_eagerly, watcher
from fxprec.kernels.launch.operands import suits_loops

#: Elements that are converted to FP32 at a time: they fit a core's cache, and memory for them is taken from the system
#: once.
_ELEMENTS: Final = 1 << 19
#: Of so many rows torch's own sums are 1 % off at most, and a call of ours takes longer than all that is computed.
_FEW_ROWS: Final = 64


@stands_for(F.layer_norm)
@graph_call
def layer_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Return ``F.layer_norm``, with gradients of weight and bias that are added up in FP32.

    The result is torch's, bit for bit. Gradients of a bfloat16 input of more than 64 rows on a CPU are those of FP32,
    rounded once to the dtypes of input, weight and bias. Compilers and transforms, which have no rule for our op, see
    the norm in FP32 between two casts, whose last bit may differ.
    """
    # Gradients first: frozen programs and evaluations ask no more.
    if (
        torch.is_grad_enabled()
        and input.dtype is torch.bfloat16
        and input.device.type == "cpu"
        and input.numel() > _FEW_ROWS * prod(normalized_shape)
    ):
        if not runs_eagerly():
            return reference(input, weight, bias, normalized_shape, eps)
        # Written out, not ``any(...)``: each norm of each training step asks.
        wanted = (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
        one_dtype = weight is None or bias is None or weight.dtype is bias.dtype
        if wanted and one_dtype and suits_loops(input, weight, bias):
            return _op(input, weight, bias, normalized_shape, eps)
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float) -> Tensor:
    """Compute the norm in FP32 or float64, differentiable any number of times, with the result in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale, shift = (None if each is None else each.to(wide) for each in (weight, bias))
    return F.layer_norm(x.to(wide), shape, scale, shift, eps).to(x.dtype)


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float) -> Tensor:
    return torch.native_layer_norm(x, shape, weight, bias, eps)[0]


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the wanted gradients of x, weight and bias in FP32 or float64, differentiable."""
    wide = torch.promote_types(x.dtype, torch.float32)
    grad, x = grad.to(wide), x.to(wide)
    weight, bias = (None if each is None else each.to(wide) for each in (weight, bias))
    _, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
    found = torch.ops.aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, wanted)
    return [each for each, want in zip(found, wanted, strict=True) if want]


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    if x.numel() <= _ELEMENTS:
        # One slice, of small tensors, for which each call of an op counts.
        own = [each.dtype for each, want in zip((x, weight, bias), wanted, strict=True) if want and each is not None]
        found = backward_reference(grad, x, weight, bias, shape, eps, wanted)
        return [each.to(dtype).contiguous() for each, dtype in zip(found, own, strict=True)]
    made = _fake_backward(grad, x, weight, bias, shape, eps, wanted)
    of_x, of_parameters = (made[0], made[1:]) if wanted[0] else (None, made)
    sums = [torch.zeros_like(each, dtype=torch.float32) for each in of_parameters]
    grads, rows = (each.reshape(prod(x.shape[: x.dim() - len(shape)]), *shape) for each in (grad, x))
    # In slices of rows: each is converted to FP32, and its sums are added to the totals in FP32.
    step = max(1, _ELEMENTS // max(prod(shape), 1))
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        found = backward_reference(grads[part], rows[part], weight, bias, shape, eps, wanted)
        if of_x is not None:
            of_x.view(rows.shape)[part] = found.pop(0)
        for total, each in zip(sums, found, strict=True):
            total += each
    for own, total in zip(of_parameters, sums, strict=True):
        own.copy_(total)
    return made


def _fake_backward(grad: Tensor, x: Tensor, weight: Any, bias: Any, *rest: Any) -> list[Tensor]:
    pairs = zip((x, weight, bias), rest[-1], strict=True)
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each, want in pairs if want]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tensors, wanted = ctx.saved_tensors, [*ctx.needs_input_grad[:3]]
    given: Any = (grad, *tensors, *ctx.settings, wanted)
    # Under a transform (vmap, jvp) the backward op has no rule of its own. The formula in torch's ops needs none.
    if watcher(TRANSFORM) is not None:
        inputs = [each for each, want in zip(tensors, wanted, strict=True) if want]
        found = iter([each.to(own.dtype) for each, own in zip(backward_reference(*given), inputs, strict=True)])
    else:
        found = iter(_backward_op(*given))
    return tuple([next(found) if want else None for want in wanted])


_backward_op = KernelOp("layer_norm_backward", _backward, _fake_backward)
_op = KernelOp("layer_norm", _forward, _fake, backward=_gradients, reference=reference)
