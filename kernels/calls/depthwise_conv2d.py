"""Calls depthwise convolutions in bfloat16 on a CPU, with the backward in FP32 if oneDNN has no bfloat16 kernel::

    y = conv2d(x, w, b), a filter a channel        torch's, low
    dx, dw, db                                     torch's, of FP32 copies with their channels last; rounded once

oneDNN has depthwise kernels for a bfloat16 backward only of filters up to 3 x 3, with stride and dilation 1. For others
it computes the gradient of the filters by a general product for each channel, and that of strided images by a dense
convolution. Forward and backward are 1.2 to 3.3 times as fast in FP32 (``python -m benchmarks depthwise``, two cores of
a Xeon with AMX, the same where oneDNN is held to AVX512-BF16). Nothing more is saved for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.graph_call import graph_call, stands_for
from fxprec.kernels.launch.kernel_op import KernelOp, eager_gradients
from fxprec.kernels.launch.observers import TRANSFORM, runs_unseen, watcher
from fxprec.kernels.launch.operands import memory_format_of, suits_loops

#: Largest filters that oneDNN has a kernel for, and fewest elements of images whose FP32 copies pay.
_SMALL: Final = 3
_FEWEST: Final = 20_000


@stands_for(F.conv2d)
@graph_call
def depthwise_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return ``F.conv2d``, bit for bit, with gradients computed in FP32 and rounded once where that is faster."""
    if input.dtype is torch.bfloat16 and input.device.type == "cpu":
        strides, paddings, dilations = map(pair, (stride, padding, dilation))
        if pays(input, weight, bias, strides, dilations, groups):
            return DEPTHWISE(input, weight, bias, [*strides], [*paddings], [*dilations])
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


def pair(size: Any) -> tuple[int, int]:
    """Return a size of two dimensions as a pair: torch takes one number for both."""
    values = tuple(size) if isinstance(size, tuple | list) else (size,)
    return values[0], values[-1]


def has_no_kernel(sizes: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Return whether oneDNN lacks a kernel for the bfloat16 backward of a depthwise weight of these sizes."""
    return sizes[1] == 1 and (min(sizes[2:]) > _SMALL or max(*stride, *dilation) > 1)


def pays(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    """Return whether a backward may follow that is faster in FP32.

    False under tracers and modes, which count, trace or save convolutions and do not know our op. That is asked first,
    since a tracer makes guards of the sizes read here.
    """
    if not runs_unseen() or not torch.is_grad_enabled():
        return False
    tensors = [each for each in (x, weight, bias) if each is not None]
    return (
        all(each.dtype is torch.bfloat16 and suits_loops(each) for each in tensors)
        and x.dim() == 4
        and groups == x.shape[1] == weight.shape[0]
        and has_no_kernel(weight.shape, stride, dilation)
        and x.numel() >= _FEWEST
        and any(each.requires_grad for each in tensors)
    )


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Compute the convolution in FP32 or float64, differentiable any number of times, with the result in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    shift = None if bias is None else bias.to(wide)
    return F.conv2d(x.to(wide), weight.to(wide), shift, stride, padding, dilation, x.shape[1]).to(x.dtype)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    return F.conv2d(x, weight, bias, stride, padding, dilation, x.shape[1])


def backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, biased: bool, stride: list[int], padding: list[int], dilation: list[int],
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the wanted gradients of x, weight and bias, differentiable.

    Args:
        grad, x, weight: of one dtype, which the gradients have, too.
    """
    sizes, groups = [len(weight)] if biased else None, x.shape[1]
    found = torch.ops.aten.convolution_backward(
        grad, x, weight, sizes, stride, padding, dilation, False, [0, 0], groups, wanted
    )
    return [each for each, want in zip(found, wanted, strict=True) if want]


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, biased: bool, stride: list[int], padding: list[int], dilation: list[int],
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    wide_grad, image = (each.to(wide, memory_format=torch.channels_last) for each in (grad, x))
    found = backward_reference(wide_grad, image, weight.to(wide), biased, stride, padding, dilation, wanted)
    made = _fake_backward(grad, x, weight, biased, wanted)
    return [own.copy_(each) for own, each in zip(made, found, strict=True)]


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor, biased: bool, *rest: Any) -> list[Tensor]:
    image = torch.empty_like(x, memory_format=memory_format_of(x))
    made = image, torch.empty_like(weight), weight.new_empty(len(weight))
    return [each for each, wanted in zip(made, rest[-1], strict=True) if wanted]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.settings = inputs
    # The bias's values are read by no gradient: it is not saved, and may be written to.
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[:3]]
    if torch.is_grad_enabled():
        # The bias was not saved: its gradient is a sum, whatever its values.
        of_x, of_weight, *_ = eager_gradients(reference, (x, weight, None, *ctx.settings), (grad,))
        return of_x, of_weight, grad.float().sum((0, 2, 3)).to(grad.dtype) if wanted[2] else None
    run: Any = backward_reference if watcher(TRANSFORM) is not None else _backward_op
    found = iter(run(grad, x, weight, ctx.biased, *ctx.settings, wanted))
    return tuple([next(found) if each else None for each in wanted])


_backward_op = KernelOp("depthwise_conv2d_backward", _backward, _fake_backward)
#: (x, weight, bias, stride, padding, dilation) -> y. It asks nothing of the sizes: ``pays`` does.
DEPTHWISE = KernelOp("depthwise_conv2d", _forward, _forward, backward=_gradients, setup_context=_setup_context)
