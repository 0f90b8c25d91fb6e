"""Cross-entropy in plain torch: torch's own, which autograd differentiates at will, and the kernel's formulas."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["count_targets", "launch_in_torch", "reference"]


def reference(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The same in plain torch: logits of any shape that torch takes, float64 included; computed in FP32 or FP64."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    x = logits.to(dtype)
    soft = target.is_floating_point()
    target, weight = target.to(dtype) if soft else target, None if weight is None else weight.to(dtype)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(x, target, weight, reduction=reduction, **options)
    if z_loss == 0:
        return loss
    squares = z_loss * x.logsumexp(min(1, x.dim() - 1)).square()
    if not soft:
        squares = torch.where(target.view(squares.shape) == ignore_index, 0.0, squares)
    if reduction == "mean":
        share = squares.numel() if soft else count_targets(target, weight, ignore_index)
        return loss + squares.sum() / share
    return loss + (squares if reduction == "none" else squares.sum())


def count_targets(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """A mean's denominator: how many labels are not ``ignore_index``, or their classes' weights. FP32, 0-dim.

    A label that is no class weighs nothing here: its own loss is NaN.
    """
    kept = target != ignore_index
    if weight is None:
        return kept.sum(dtype=torch.float32)
    kept = kept & (target >= 0) & (target < len(weight))
    return torch.where(kept, weight.float()[torch.where(kept, target, 0).long()], 0.0).sum()


@torch.no_grad()
def launch_in_torch(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    stats: Tensor, losses: Tensor | None, shares: Tensor | None, grad_output: Tensor | None,
    denominator: Tensor | None, scale: float, gradient: Tensor | None, target_gradient: Tensor | None,
) -> None:  # fmt: skip
    """What ``cross_entropy_kernels.launch`` does, where no kernel runs.

    :raises IndexError: a target outside of [0, C), as torch on a CPU.
    """
    x = logits.float()
    count, columns = x.shape
    weights = x.new_ones(()) if weight is None else weight.float()
    keep, spread = 1.0 - label_smoothing, label_smoothing / columns
    live = torch.ones(count, dtype=torch.bool, device=x.device)
    hit, label = x.new_zeros(count), torch.zeros(count, dtype=torch.int64, device=x.device)
    if target.is_floating_point():
        given = (target.float() * keep + spread) * weights
    else:
        live = target != ignore_index
        label = torch.where(live, target, 0).long()
        outside = (label < 0) | (label >= columns)
        if outside.any():
            raise IndexError(f"Target {int(label[outside][0])} is out of bounds.")
        share = (weights.expand(columns)[label] * live).float()
        hit = share * keep
        given = (spread * weights).expand_as(x) * live[:, None]
        if shares is not None:
            shares.copy_(share)
    linear = target.is_floating_point() or label_smoothing > 0
    if losses is not None:
        largest = x.amax(1)
        shift = torch.where(largest == -math.inf, 0.0, largest)
        log_sum = (x - shift[:, None]).exp().sum(1).log()
        stats.copy_(torch.stack((largest, log_sum, hit + given.sum(1))))
    largest, log_sum, mass = stats
    place = (x - largest[:, None]) - log_sum[:, None]
    lse = largest + log_sum
    if losses is not None:
        loss = -hit * place.gather(1, label[:, None])[:, 0] + z_loss * lse * lse
        loss = loss - (given * place).sum(1) if linear else loss
        losses.copy_(torch.where(live, loss, 0.0))
    if gradient is not None:
        factor = x.new_full((count,), scale)
        factor = factor if grad_output is None else factor * grad_output
        factor = factor if denominator is None else factor / denominator
        value = (mass + 2.0 * z_loss * lse)[:, None] * place.exp() - given
        value.scatter_add_(1, label[:, None], -hit[:, None])
        gradient.copy_(torch.where(live[:, None], value * factor[:, None], 0.0))
        if target_gradient is not None:
            target_gradient.copy_(-keep * weights * place * factor[:, None])
