"""Computes cross-entropy in plain torch: a reference that can be differentiated, and the kernel's formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

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


class LossPass(NamedTuple):
    """Pass over rows of logits: what it reads, and what it writes of their losses and gradients.

    Attributes:
        logits: [N, C], rows at any distance.
        target: labels, int64 [N], or probabilities [N, C].
        weight: of each class, [C].
        stats: FP32 [3, N], of each row: its largest logit, log sum exp(x - largest), sum of the target's weights.
            Written where losses are, else read.
        losses: FP32 [N], written; None: the pass writes gradients alone.
        shares: FP32 [N], written: what each row adds to a mean's denominator.
        grad_output: FP32 [N] or 0-dim. A row's gradient is times ``scale * grad_output / denominator``.
        denominator: FP32, 0-dim.
        gradient: of the logits, written, [N, C]; may lie where they do.
        target_gradient: of the probabilities, written.
    """

    logits: Tensor
    target: Tensor
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    stats: Tensor
    losses: Tensor | None = None
    shares: Tensor | None = None
    grad_output: Tensor | None = None
    denominator: Tensor | None = None
    scale: float = 1.0
    gradient: Tensor | None = None
    target_gradient: Tensor | None = None

    def factors(self) -> Tensor:
        """Return the factor of each row's gradient: FP32 [N]."""
        factor = self.stats.new_full(self.stats.shape[1:], self.scale)
        if self.grad_output is not None:
            factor *= self.grad_output
        if self.denominator is not None:
            factor /= self.denominator
        return factor

    def check_bounds(self) -> None:
        """Raise IndexError for a label outside of [0, C), as torch does on a CPU."""
        outside = (self.target != self.ignore_index) & ((self.target < 0) | (self.target >= self.logits.shape[1]))
        if outside.any():
            raise IndexError(f"Target {int(self.target[outside][0])} is out of bounds.")

    def slices(self) -> Iterator[slice]:
        """Cut the rows into runs whose logits fit into a cache in FP32."""
        count, columns = self.logits.shape
        rows = max(1, _AT_ONCE // max(columns, 1))
        return (slice(start, start + rows) for start in range(0, count, rows))

    def on(self, rows: slice) -> LossPass:
        """Return the pass over some of the rows, but for their factors."""
        written = self.losses, self.shares, self.gradient, self.target_gradient
        losses, shares, gradient, target_gradient = (None if each is None else each[rows] for each in written)
        return self._replace(
            logits=self.logits[rows], target=self.target[rows], stats=self.stats[:, rows], losses=losses,
            shares=shares, gradient=gradient, target_gradient=target_gradient,
        )  # fmt: skip


@torch.no_grad()
def launch_in_torch(whole: LossPass) -> None:
    """Run ``cross_entropy_kernels.launch`` in plain torch, on as many rows at a time as fit into a cache.

    Raises:
        IndexError: a target outside of [0, C), as torch on a CPU.
    """
    soft = whole.target.is_floating_point()
    if not soft:
        whole.check_bounds()
    factor = whole.factors()
    # Most losses are plain ones, for which torch's softmax kernels need fewest passes.
    if whole.weight is None and whole.label_smoothing == whole.z_loss == 0 and not soft:
        _run_plain(whole, factor)
    else:
        for rows in whole.slices():
            _run_rows(whole.on(rows), factor[rows])


def _run_plain(whole: LossPass, factor: Tensor) -> None:
    """Compute the usual case, labels alone, by torch's softmax kernels: a third of the passes of ``_run_rows``."""
    logits, target, stats = whole.logits, whole.target, whole.stats
    losses, gradient = whole.losses, whole.gradient
    live = target != whole.ignore_index
    label = torch.where(live, target, 0).long()[:, None]
    share = live.float()
    if whole.shares is not None:
        whole.shares.copy_(share)
    less = -share[:, None]
    # One for all slices: fresh memory costs more than what is computed in it.
    buffers: Tensor | None = None
    for at in whole.slices():
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


def _run_rows(some: LossPass, factor: Tensor) -> None:
    """Compute any case on some rows, by the kernel's formulas. ``factor``: of each row's gradient."""
    _, target, weight, ignore_index, label_smoothing, z_loss, stats, losses, *_ = some
    # Overwritten on the way.
    x = some.logits.to(torch.float32, copy=True)
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
        if some.shares is not None:
            some.shares.copy_(share)
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
    place = x.sub_(largest[:, None]).sub_(log_sum[:, None]) if some.gradient is not None or given is not None else None
    if losses is not None:
        loss = z_loss * lse * lse
        if label is not None and hit is not None:
            own = place if place is not None else x
            picked = own.gather(1, label)[:, 0]
            loss = loss - hit * (picked if place is not None else picked - largest - log_sum)
        if given is not None and place is not None:
            loss = loss - (given * place).sum(1)
        losses.copy_(loss if live is None else torch.where(live, loss, 0.0))
    if some.gradient is None or place is None:
        return
    if some.target_gradient is not None:
        some.target_gradient.copy_(-keep * weights * place * factor[:, None])
    value = place.exp_().mul_((mass + 2.0 * z_loss * lse)[:, None])
    if given is not None:
        value -= given
    if label is not None and hit is not None and live is not None:
        value.scatter_add_(1, label, -hit[:, None])
        value = torch.where(live[:, None], value.mul_(factor[:, None]), 0.0)
    else:
        value *= factor[:, None]
    some.gradient.copy_(value)
