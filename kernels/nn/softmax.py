"""Scale, mask, softmax over the last dimension and dropout, in one kernel forward and one backward.

    y = dropout(softmax(x * scale + mask))

all in FP32 and rounded once. Without dropout only y is saved, and the backward is ``y * (dy - sum(y * dy)) * scale``.
With dropout, which is no function of what comes out of it, the backward computes softmax again from x, the mask and
two FP32 numbers a row, and the dropout from its seed: that costs the bytes of reading y, and no second result is
written. The causal mask is computed, and what it masks is not read.

Bytes an element of a low x: 4 forward, 6 backward (eager scale, mask and softmax: 12 and 10, with dropout 17 and 15).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxprec.kernels.launch.kernel_op import KernelOp, eager_gradients
from fxprec.kernels.launch.operands import FLOATS
from fxprec.kernels.launch.philox import draw_seeds, drop_threshold, keep_factor
from fxprec.kernels.launch.triton_support import can_launch
from fxprec.kernels.nn.softmax_kernels import launch_backward, launch_forward


def softmax(
    x: Tensor,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    training: bool = True,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """``dropout(softmax(x * scale + mask, dim=-1), dropout_p, training)``, computed in FP32 and rounded once.

    On a CPU the same runs as plain torch, with another order of sums. A row that is masked everywhere is NaN, as in
    eager torch, and so is a row that holds a NaN where it is not masked. Gradients can be differentiated again, in
    plain torch. The same seed of torch's generator drops the same elements, on every device.

    Args:
        x: float32, float16 or bfloat16 [..., rows, columns], any strides; columns that are not next to each other
            are copied first. Its last dimension is that of the softmax.
        scale: what x is multiplied by.
        mask: either additive (float32, float16 or bfloat16; differentiable: its gradient goes through one FP32
            tensor of x's shape) or bool, True where a row attends to a column. Of any shape that broadcasts to x's,
            e.g. [B, 1, 1, columns]; it is read by its strides and never expanded. With a mask x has at most 4
            dimensions.
        causal: row i attends to columns up to i only, as ``is_causal`` of
            ``torch.nn.functional.scaled_dot_product_attention``; together with a mask, where both allow it.
        dropout_p: in [0, 1).
        training: False leaves dropout out.
        output_dtype: float32, float16 or bfloat16; None is x's.

    Returns:
        contiguous, x's shape.

    Raises:
        TypeError: x, the mask or output_dtype of another dtype.
        ValueError: a mask that does not broadcast to x's shape or is on another device; no last dimension, or with
            causal none before it; dropout_p out of its range.
    """
    dtype = x.dtype if output_dtype is None else output_dtype
    _check(x, mask, causal, dtype)
    drop_threshold(dropout_p)
    if training and dropout_p > 0:
        seed = draw_seeds(1, x.device)
        return _SOFTMAX_DROPOUT(x, mask, seed, float(scale), causal, float(dropout_p), dtype)[0]
    return _SOFTMAX(x, mask, float(scale), causal, dtype)


def reference(
    x: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, causal: bool, p: float, dtype: torch.dtype
) -> Tensor:
    """The same in plain torch, on any device, differentiable any number of times.

    Args:
        seed: int64 [1], of the dropout; None for no dropout.
    """
    y = torch.softmax(_logits(x, mask, scale, causal), dim=-1)
    if seed is not None:
        y = y * keep_factor(seed, x, x.shape[-1], p)
    return y.to(dtype)


def _logits(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    z = x.float() * scale
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else z + mask.float()
    if causal:
        z = z.masked_fill(torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).triu(1), -torch.inf)
    return z


def _check(x: Tensor, mask: Tensor | None, causal: bool, dtype: torch.dtype) -> None:
    if x.dtype not in FLOATS or dtype not in FLOATS:
        raise TypeError(
            f"softmax takes and gives float32, float16 and bfloat16, got x {x.dtype} and output_dtype {dtype}: it "
            "computes in float32. Use torch.softmax for other dtypes."
        )
    if x.dim() < 1 or (causal and x.dim() < 2):
        raise ValueError(
            f"softmax takes x of {2 if causal else 1} or more dimensions, got {x.dim()} (causal={causal})."
        )
    if mask is None:
        return
    if mask.dtype not in (*FLOATS, torch.bool):
        raise TypeError(
            f"softmax takes a mask of bool (True: attend), float32, float16 or bfloat16 (added), got {mask.dtype}."
        )
    if x.dim() > 4:
        raise ValueError(f"softmax takes a mask for x of at most 4 dimensions, got {x.dim()}: flatten the first ones.")
    if mask.device != x.device:
        raise ValueError(f"softmax got x on {x.device} and a mask on {mask.device}: move the mask.")
    lead = x.dim() - mask.dim()
    if lead < 0 or any(m not in (1, n) for m, n in zip(mask.shape, x.shape[lead:], strict=True)):
        raise ValueError(
            f"softmax: a mask of shape {tuple(mask.shape)} does not broadcast to x's {tuple(x.shape)}, as in "
            "[B or 1, H or 1, rows or 1, columns]."
        )


# Without dropout: y is all that is saved.


def _forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype) -> Tensor:
    if not can_launch(x.device) or x.numel() == 0:
        with torch.no_grad():
            return reference(x, mask, None, scale, causal, 0.0, dtype).contiguous()
    return launch_forward(x, mask, None, scale, causal, 0.0, dtype)[0]


def _fake(x: Tensor, *rest: Any) -> Tensor:
    """What all ops give but the forward with dropout: of the first argument's shape, in the dtype that comes last."""
    return torch.empty(x.shape, dtype=rest[-1], device=x.device)


def _backward_launch(y: Tensor, dy: Tensor, scale: float, causal: bool, dtype: torch.dtype) -> Tensor:
    if not can_launch(y.device) or y.numel() == 0:
        with torch.no_grad():
            return (_derivative(y, dy) * scale).to(dtype).contiguous()
    return launch_backward(y, dy, None, None, None, None, 1.0, causal, 0.0, scale, dtype)


def _derivative(y: Tensor, dy: Tensor) -> Tensor:
    """The gradient of softmax's input, FP32, in plain torch and differentiable, through y too."""
    y, dy = y.float(), dy.float()
    return y * (dy - (y * dy).sum(dim=-1, keepdim=True))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mask, ctx.scale, ctx.causal, _ = inputs
    ctx.save_for_backward(output)
    ctx.x_dtype, ctx.mask = x.dtype, None if mask is None else (mask.shape, mask.dtype)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    if torch.is_grad_enabled():
        return (*_split(ctx, _derivative(y, dy)), None, None, None)
    if not ctx.needs_input_grad[1]:
        return _SOFTMAX_BACKWARD(y, dy, ctx.scale, ctx.causal, ctx.x_dtype), None, None, None, None
    return (*_split(ctx, _SOFTMAX_BACKWARD(y, dy, 1.0, ctx.causal, torch.float32)), None, None, None)


def _split(ctx: Any, dz: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of the additive mask from that of ``x * scale + mask``, which is FP32."""
    dx = (dz * ctx.scale).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
    dmask = None
    if ctx.needs_input_grad[1]:
        shape, dtype = ctx.mask
        dmask = dz.sum_to_size(shape).to(dtype)
    return dx, dmask


_SOFTMAX_BACKWARD = KernelOp("softmax_backward", _backward_launch, _fake)
_SOFTMAX = KernelOp("softmax", _forward, _fake, backward=_backward, setup_context=_setup)


# With dropout: x, the mask, the seed and the statistics are saved.


def _dropout_forward(
    x: Tensor, mask: Tensor | None, seed: Tensor, scale: float, causal: bool, p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if not can_launch(x.device) or x.numel() == 0:
        with torch.no_grad():
            z = _logits(x, mask, scale, causal).flatten(0, -2) if x.dim() > 1 else _logits(x, mask, scale, causal)[None]
            top = z.amax(dim=-1) if z.numel() else z.new_zeros(z.shape[0])
            statistics = torch.stack((top, (z - top[:, None]).exp().sum(dim=-1).reciprocal()))
            return reference(x, mask, seed, scale, causal, p, dtype).contiguous(), statistics
    y, statistics = launch_forward(x, mask, seed, scale, causal, p, dtype)
    assert statistics is not None
    return y, statistics


def _dropout_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake(x, *rest), x.new_empty((2, x.shape[:-1].numel()), dtype=torch.float32)


def _dropout_backward_launch(
    dy: Tensor, x: Tensor, mask: Tensor | None, seed: Tensor, statistics: Tensor,
    scale: float, causal: bool, p: float, out_scale: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if not can_launch(x.device) or x.numel() == 0:
        with torch.no_grad():
            y = reference(x, mask, None, scale, causal, p, torch.float32)
            return (_derivative(y, dy * keep_factor(seed, x, x.shape[-1], p)) * out_scale).to(dtype).contiguous()
    return launch_backward(None, dy, x, mask, seed, statistics, scale, causal, p, out_scale, dtype)


def _dropout_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, mask, seed, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, mask, seed, output[1])
    ctx.scale, ctx.x_dtype, ctx.mask = ctx.settings[0], x.dtype, None if mask is None else (mask.shape, mask.dtype)


def _dropout_backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, mask, seed, statistics = ctx.saved_tensors
    if dy is None:
        return (None,) * 7
    if torch.is_grad_enabled():
        return eager_gradients(reference, (x, mask, seed, *ctx.settings), (dy,))
    scale, causal, p, _dtype = ctx.settings
    alone = not ctx.needs_input_grad[1]
    out_scale, dtype = (scale, x.dtype) if alone else (1.0, torch.float32)
    dz = _SOFTMAX_DROPOUT_BACKWARD(dy, x, mask, seed, statistics, scale, causal, p, out_scale, dtype)
    return (*((dz, None) if alone else _split(ctx, dz)), None, None, None, None, None)


_SOFTMAX_DROPOUT_BACKWARD = KernelOp("softmax_dropout_backward", _dropout_backward_launch, _fake)
_SOFTMAX_DROPOUT = KernelOp(
    "softmax_dropout", _dropout_forward, _dropout_fake, backward=_dropout_backward, setup_context=_dropout_setup
)
