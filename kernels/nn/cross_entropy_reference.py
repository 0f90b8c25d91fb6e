"""Computes cross-entropy in plain torch: a reference that can be differentiated, and the kernel's formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

#: Elements computed at once: 1 MB in FP32, which fits into a cache.
_AT_ONCE: Final = 1 << 18


def reference(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the loss by torch's own ops, in FP32 or, for float64, FP64; logits of any shape that torch takes."""
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
    """Return a mean's denominator: the number, or class weights, of labels that are not ignored. FP32, 0-dim.

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
    """Run ``cross_entropy_kernels.launch`` in plain torch, on as many rows at a time as fit into a cache.

    Raises:
        IndexError: a target outside of [0, C), as torch on a CPU.
    """
    columns = logits.shape[1]
    soft = target.is_floating_point()
    if not soft:
        check_bounds(target, columns, ignore_index)
    factor = factors(stats, scale, grad_output, denominator)
    # Most losses are plain ones, for which torch's softmax kernels need fewest passes.
    if weight is None and label_smoothing == z_loss == 0 and not soft:
        return _run_plain(logits, target, ignore_index, stats, losses, shares, factor, gradient)
    for at in _slices(logits):
        loss_rows, share_rows, gradient_rows, target_rows = (
            None if each is None else each[at] for each in (losses, shares, gradient, target_gradient)
        )
        _run_rows(
            logits[at], target[at], weight, ignore_index, label_smoothing, z_loss, stats[:, at], loss_rows, share_rows,
            factor[at], gradient_rows, target_rows,
        )  # fmt: skip
    return None


def check_bounds(target: Tensor, columns: int, ignore_index: int) -> None:
    """Raise IndexError for a label outside of [0, C), as torch does on a CPU."""
    outside = (target != ignore_index) & ((target < 0) | (target >= columns))
    if outside.any():
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")


def factors(stats: Tensor, scale: float, grad_output: Tensor | None, denominator: Tensor | None) -> Tensor:
    """Return the factor of each row's gradient: FP32 [rows], on the device of the rows' statistics, [3, rows]."""
    factor = stats.new_full(stats.shape[1:], scale)
    if grad_output is not None:
        factor *= grad_output
    if denominator is not None:
        factor /= denominator
    return factor


def _slices(logits: Tensor) -> Iterator[slice]:
    count, columns = logits.shape
    rows = max(1, _AT_ONCE // max(columns, 1))
    return (slice(start, start + rows) for start in range(0, count, rows))


def _run_plain(
    logits: Tensor, target: Tensor, ignore_index: int, stats: Tensor, losses: Tensor | None, shares: Tensor | None,
    factor: Tensor, gradient: Tensor | None,
) -> None:  # fmt: skip
    """Compute the usual case, labels alone, by torch's softmax kernels: a third of the passes of ``_run_rows``."""
    live = target != ignore_index
    label = torch.where(live, target, 0).long()[:, None]
    share = live.float()
    if shares is not None:
        shares.copy_(share)
    less = -share[:, None]
    # One for all slices: fresh memory costs more than what is computed in it.
    buffers: Tensor | None = None
    for at in _slices(logits):
        some = logits[at]
        if buffers is None:
            buffers = torch.empty((2, *some.shape), dtype=torch.float32, device=logits.device)
        x, values = buffers[:, : len(some)]
        x.copy_(some)
        if losses is None:
            torch.softmax(x, 1, out=values)
        else:
            torch.log_softmax(x, 1, out=values)
            torch.neg(values.gather(1, label[at])[:, 0], out=losses[at])
            torch.add(x.gather(1, label[at])[:, 0], losses[at], out=stats[1, at])
        if gradient is not None:
            values = values if losses is None else values.exp_()
            gradient[at] = values.scatter_add_(1, label[at], less[at]).mul_(factor[at, None])
    if losses is not None:
        stats[0], stats[2] = 0.0, share
    # Ignored rows are zeroed afterwards: most batches have none.
    if not live.all():
        for each in (losses, gradient):
            if each is not None:
                each[~live] = 0.0


def _run_rows(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    stats: Tensor, losses: Tensor | None, shares: Tensor | None, factor: Tensor, gradient: Tensor | None,
    target_gradient: Tensor | None,
) -> None:  # fmt: skip
    """Compute any case on some rows, by the kernel's formulas. ``factor``: of each row's gradient."""
    # Overwritten on the way.
    x = logits.to(torch.float32, copy=True)
    columns = x.shape[1]
    soft = target.is_floating_point()
    weights = x.new_ones(()) if weight is None else weight.float()
    keep, spread = 1.0 - label_smoothing, label_smoothing / columns
    # The target's weight of each class, without the one-hot part.
    given: Tensor | None = None
    live, label, hit = None, None, None
    if soft:
        given = (target.float() * keep + spread) * weights
    else:
        live = target != ignore_index
        label = torch.where(live, target, 0).long()[:, None]
        share = (weights.expand(columns)[label[:, 0]] * live).float()
        hit = share * keep
        if label_smoothing > 0:
            given = (spread * weights).expand_as(x) * live[:, None]
        if shares is not None:
            shares.copy_(share)
    if losses is not None:
        # Of a row of -inf alone, -inf - -inf would be NaN.
        largest = x.amax(1)
        shift = torch.where(largest == -math.inf, 0.0, largest)
        mass = x.new_zeros(len(x)) if given is None else given.sum(1)
        log_sum = (x - shift[:, None]).exp_().sum(1).log_()
        stats.copy_(torch.stack((largest, log_sum, mass if hit is None else hit + mass)))
    largest, log_sum, mass = stats
    lse = largest + log_sum
    # log softmax in place, by two subtractions: largest + log_sum would round away digits far from zero.
    place = x.sub_(largest[:, None]).sub_(log_sum[:, None]) if gradient is not None or given is not None else None
    if losses is not None:
        loss = z_loss * lse * lse
        if label is not None and hit is not None:
            own = place if place is not None else x
            picked = own.gather(1, label)[:, 0]
            loss = loss - hit * (picked if place is not None else picked - largest - log_sum)
        if given is not None and place is not None:
            loss = loss - (given * place).sum(1)
        losses.copy_(loss if live is None else torch.where(live, loss, 0.0))
    if gradient is None or place is None:
        return
    if target_gradient is not None:
        target_gradient.copy_(-keep * weights * place * factor[:, None])
    value = place.exp_().mul_((mass + 2.0 * z_loss * lse)[:, None])
    if given is not None:
        value -= given
    if label is not None and hit is not None and live is not None:
        value.scatter_add_(1, label, -hit[:, None])
        value = torch.where(live[:, None], value.mul_(factor[:, None]), 0.0)
    else:
        value *= factor[:, None]
    gradient.copy_(value)
