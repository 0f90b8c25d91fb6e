"""Checks the arguments of cross-entropy and raises errors that say what to pass."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fxprec.kernels.launch.operands import check_operands

_REDUCTIONS: Final = ("none", "mean", "sum")


def check_arguments(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
) -> bool:
    """Raise for arguments that ``cross_entropy`` does not take; return whether the target is probabilities."""
    _check_settings("cross_entropy", reduction, label_smoothing)
    if logits.dim() == 0:
        raise ValueError("cross_entropy: logits must be [C], [N, C] or [N, C, d1, ...], got a 0-dim tensor.")
    columns = logits.shape[min(1, logits.dim() - 1)]
    # torch tells probabilities from labels by the shape alone.
    soft = logits.shape == target.shape
    if soft:
        if not target.is_floating_point():
            raise TypeError(
                f"cross_entropy: a target of the logits' shape {tuple(logits.shape)} is probabilities, which are "
                f"floating point, got {target.dtype}. Class indices have no dimension of classes."
            )
        if ignore_index >= 0:
            raise ValueError(f"cross_entropy: ignore_index ({ignore_index}) has no meaning for probabilities.")
    else:
        _check_labels("cross_entropy", target, logits.device)
        wanted = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else logits.shape[:0]
        # A single row [C] takes a label of shape [1], too.
        if target.shape != wanted and not (logits.dim() == 1 and target.shape == (1,)):
            raise ValueError(
                f"cross_entropy: logits {tuple(logits.shape)} take class indices {tuple(wanted)} or probabilities of "
                f"their own shape, got a target {tuple(target.shape)}."
            )
    check_operands("cross_entropy", logits=logits, target=target if soft else None, weight=weight)
    if weight is not None:
        if weight.shape != (columns,):
            raise ValueError(
                f"cross_entropy: weight must be one for each of {columns} classes, got {tuple(weight.shape)}."
            )
        if weight.requires_grad and not soft:
            raise RuntimeError(
                "cross_entropy: with class indices torch has no gradient for class weights; detach the weight."
            )
    return soft


def check_compiled(logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
    """Raise for arguments that the compiled loop of ``cross_entropy`` does not take."""
    if (
        logits.device.type != "cpu"
        or logits.dtype not in (torch.bfloat16, torch.float32)
        or target.is_floating_point()
        or weight is not None
    ):
        raise ValueError(
            "cross_entropy(compiled=True) serves bfloat16 and float32 logits on a CPU, with class indices and without "
            f"class weights; got {logits.dtype} on '{logits.device}', a target of {target.dtype}"
            f"{'' if weight is None else ' and class weights'}. Leave compiled out."
        )


def check_linear_arguments(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str, label_smoothing: float,
    chunk: int | None,
) -> None:  # fmt: skip
    """Raise for arguments that ``linear_cross_entropy`` does not take."""
    # Probabilities are as large as the logits that this function never holds: labels only.
    name = "linear_cross_entropy"
    _check_settings(name, reduction, label_smoothing)
    _check_labels(name, target, hidden.device)
    check_operands(name, hidden=hidden, weight=weight, bias=bias)
    for which, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in (hidden.dtype, torch.float32):
            raise TypeError(f"{name}: {which} must be {hidden.dtype}, as hidden, or float32, got {tensor.dtype}.")
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or len(weight) == 0:
        raise ValueError(
            f"{name}: hidden [..., D] and weight [V, D] do not fit: {tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{name}: hidden {tuple(hidden.shape)} takes class indices {tuple(hidden.shape[:-1])}, got "
            f"{tuple(target.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias must be [{len(weight)}], got {tuple(bias.shape)}.")
    if chunk is not None and chunk < 1:
        raise ValueError(f"{name}: chunk must be at least one row, got {chunk}.")


def _check_settings(name: str, reduction: str, label_smoothing: float) -> None:
    """Raise for an unknown reduction and a smoothing outside of [0, 1]; torch takes a negative one for none."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing must be between 0.0 and 1.0, got {label_smoothing}.")


def _check_labels(name: str, target: Tensor, device: torch.device) -> None:
    """Raise for class indices of a dtype that torch does not take, or on another device than the logits."""
    if target.dtype not in (torch.int64, torch.uint8):
        raise TypeError(f"{name}: class indices must be int64 or uint8, got {target.dtype}.")
    if target.device != device:
        raise ValueError(f"{name} takes tensors of one device, got a target on '{target.device}', not '{device}'.")
