"""Backward kernels of ``fxprec.kernels`` in the reference: the same formulas in plain torch, with derivatives.

A backward kernel is an op without autograd, which computes in FP32 whatever it is given. Of what a forward has saved
norms read mean and deviation: they have the values that were saved, and derivatives as functions of the input. Softmax
reads its result. A cross entropy that makes gradients in its forward has these as results, differentiable there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.cpu import depthwise
from fxprec.kernels.nn import max_pool
from fxprec.kernels.nn.cross_entropy_reference import count_targets, reference

_aten = torch.ops.aten


def _normalized(rows: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows less their mean, over their deviation, and 1 / deviation; both as [rows, 1] as they were saved."""
    if mean is not None:
        own = rows.mean(1, keepdim=True)
        # Saved statistics give the values, the rows' own ones the derivatives.
        rows = rows - (mean.detach() + own - own.detach())
    square, rstd = rows.square().mean(1, keepdim=True), rstd.detach()
    rstd = rstd - 0.5 * rstd**3 * (square - square.detach())
    return rows * rstd, rstd


def _through(gradient: Tensor, value: Tensor, rstd: Tensor, center: bool) -> Tensor:
    """Return the gradient of rows, given that of their normalized values."""
    inner = gradient - value * (gradient * value).mean(1, keepdim=True)
    return (inner - gradient.mean(1, keepdim=True) if center else inner) * rstd


def _group_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, groups: int, silu: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    shape, rows = (1, -1, *(1,) * (x.dim() - 2)), (len(x) * groups, -1)
    others = [0, *range(2, x.dim())]
    value, rstd = _normalized(x.reshape(rows), *(each.reshape(-1, 1) for each in statistics))
    spread, scale = value.view(x.shape), x.new_ones(()) if weight is None else weight.view(shape)
    if silu:
        z = spread * scale if bias is None else spread * scale + bias.view(shape)
        dy = _silu_backward(dy, z)
    dx = _through((dy * scale).reshape(rows), value, rstd, center=True).view(x.shape)
    found = (dx, (dy * spread).sum(others), dy.sum(others))
    return [each for each, want in zip(found, wanted, strict=True) if want]


def _batch_norm_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, spread: Tensor, weight: Tensor | None, bias: Tensor | None,
    eps: float, relu: bool, training: bool, input: bool, affine: bool, residual: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    def channels(whole: Tensor) -> Tensor:
        return whole.movedim(1, 0).flatten(1)

    def whole(rows: Tensor) -> Tensor:
        return rows.view(x.movedim(1, 0).shape).movedim(0, 1)

    gradient, scale = channels(dy), x.new_ones(()) if weight is None else weight[:, None]
    if training:
        value, rstd = _normalized(channels(x), mean[:, None], spread[:, None])
    else:
        rstd = (spread[:, None] + eps).rsqrt()
        value = (channels(x) - mean[:, None]) * rstd
    if relu:
        made = value * scale + (0.0 if bias is None else bias[:, None]) if y is None else channels(y)
        gradient = torch.where(made > 0, gradient, 0.0 * made)  # whose derivative is 0, and not unknown
    scaled, none = gradient * scale, x.new_empty(0)
    dx = _through(scaled, value, rstd, center=True) if training else scaled * rstd
    sums = ((gradient * value).sum(1), gradient.sum(1)) if affine else (none, none)
    return whole(dx) if input else none, *sums, whole(gradient) if residual else none


def _of_rows(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return gradients of each row's cross entropy: of its logits, and of its target where that is probabilities."""
    factor = 1.0 if weight is None else weight
    soft, kept = target, None
    if not target.is_floating_point():
        kept = (target != ignore_index)[:, None]
        soft = F.one_hot(torch.where(kept[:, 0], target, 0).long(), logits.shape[1]).to(logits.dtype)
    wanted = (soft * (1 - smoothing) + smoothing / logits.shape[1]) * factor
    norms = logits.logsumexp(1, keepdim=True)
    p = (logits - norms).exp()
    gradient = p * (wanted.sum(1, keepdim=True) + 2 * z_loss * norms) - wanted
    of_target = (smoothing - 1) * factor * (logits - norms)
    return gradient if kept is None else torch.where(kept, gradient, 0.0), of_target


def _over(target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor | float:
    """Return the divisor of a reduction."""
    if reduction != "mean":
        return 1.0
    return max(1, len(target)) if target.is_floating_point() else count_targets(target, weight, ignore_index)


def _cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, smoothing: float,
    z_loss: float, _compiled: bool, gradient: bool,
) -> Any:  # fmt: skip
    settings = (target, weight, ignore_index, reduction, smoothing, z_loss)
    made = logits.new_empty(0)
    if gradient:
        rows, _ = _of_rows(logits, target, weight, ignore_index, smoothing, z_loss)
        made = rows / _over(target, weight, ignore_index, reduction)
    _, stats, denominator, _ = torch.ops.fxprec.cross_entropy(logits.detach(), *settings, False, False)
    return reference(logits, *settings), stats, denominator, made


def _cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, _stats: Tensor, _denominator: Tensor,
    ignore_index: int, reduction: str, smoothing: float, z_loss: float, _compiled: bool, target_gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_logits, of_target = _of_rows(logits, target, weight, ignore_index, smoothing, z_loss)
    factor = (grad / _over(target, weight, ignore_index, reduction)).reshape(-1, 1)
    return of_logits * factor, of_target * factor if target_gradient else logits.new_empty(0)


def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, reduction: str,
    smoothing: float, z_loss: float, chunk: int, *wanted: bool,
) -> tuple[Any, ...]:  # fmt: skip
    settings = (ignore_index, smoothing, z_loss, chunk)
    loss = reference(F.linear(hidden, weight, bias), target, None, ignore_index, reduction, smoothing, z_loss)
    count = count_targets(target, None, ignore_index) if reduction == "mean" else loss.new_empty(0)
    ones = hidden.new_ones(len(hidden))
    return loss, count, *_linear_cross_entropy_backward(ones, hidden, weight, target, bias, *settings, *wanted)


def _linear_cross_entropy_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int,
    smoothing: float, z_loss: float, _chunk: int, *wanted: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, _ = _of_rows(F.linear(hidden, weight, bias), target, None, ignore_index, smoothing, z_loss)
    rows = rows * grad[:, None]
    found = (rows @ weight, rows.T @ hidden, rows.sum(0))
    return tuple(each if want else hidden.new_empty(0) for each, want in zip(found, wanted, strict=True))


def _scaled_gradient(values: Tensor, factor: Tensor, denominator: Tensor | None, _dtype: torch.dtype) -> Tensor:
    return values * (factor if denominator is None else factor / torch.where(denominator == 0, 1.0, denominator))


def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return silu's gradient; torch's own op has no derivative."""
    return dy * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


#: Op -> what the reference calls, with the same arguments and results.
KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "fxprec::group_norm_backward": _group_norm_backward,
    "fxprec::batch_norm_backward": _batch_norm_backward,
    "fxprec::cross_entropy": _cross_entropy,
    "fxprec::cross_entropy_backward": _cross_entropy_backward,
    "fxprec::linear_cross_entropy": _linear_cross_entropy,
    "fxprec::linear_cross_entropy_backward": _linear_cross_entropy_backward,
    "fxprec::scaled_gradient": _scaled_gradient,
    "fxprec::max_pool2d_backward": max_pool.backward_reference,
    "fxprec::depthwise_conv2d_backward": depthwise.backward_reference,
}
