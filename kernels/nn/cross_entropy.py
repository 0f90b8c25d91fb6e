"""Computes cross-entropy of low-precision logits in FP32, reading each logit once forward and once backward.

``torch.autocast`` casts logits to FP32 for the loss, since a low-precision sum over a vocabulary is too inexact; eager
mode then moves some 20 bytes a logit more. Here logits are loaded in their dtype and widened in registers. The forward
saves the logits themselves and 12 bytes a row; the backward writes the gradient in the logits' dtype.

With ``gradient_in_forward`` the forward writes the gradient while a row is at hand, and saves that instead. The
backward then multiplies it by the gradient of the loss, which moves nothing where that is 1. The formulas are those of
``cross_entropy_kernels``; the semantics are torch's, of ``torch.nn.functional.cross_entropy``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.launch.kernel_op import KernelOp, eager_gradients
from fxprec.kernels.launch.operands import check_looped, check_operands
from fxprec.kernels.nn.cross_entropy_kernels import launch
from fxprec.kernels.nn.cross_entropy_reference import LossPass, count_targets, reference
from fxprec.kernels.nn.scaled_gradient import scaled_gradient, wants_gradients_now


def _forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    compiled: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the statistics, a mean's denominator (if any) and the gradient (if asked for)."""
    soft, mean = target.is_floating_point(), reduction == "mean"
    loss, stats, denominator, result = _fake(logits, target, weight, ignore_index, reduction, gradient)
    # Shares and losses lie side by side: a mean sums both in one call.
    rows = logits.new_empty((2, len(logits)), dtype=torch.float32)
    losses = loss if reduction == "none" else rows[1]
    # The gradient needs the denominator before the kernel runs; otherwise the kernel's shares add up to it.
    if gradient and mean and not soft:
        denominator = count_targets(target, weight, ignore_index)
    late = _normalized_late(logits)
    rows_pass = LossPass(
        logits, target, weight, ignore_index, label_smoothing, z_loss, stats, losses,
        shares=rows[0] if mean and not soft and not gradient else None,
        denominator=denominator if gradient and mean and not soft and not late else None,
        scale=1.0 / max(len(logits), 1) if mean and soft else 1.0, gradient=result if gradient else None,
    )  # fmt: skip
    launch(rows_pass, compiled)
    if mean and soft:
        loss = losses.sum() / len(logits)
    elif mean and gradient:
        loss = losses.sum() / denominator
    elif mean:
        denominator, total = rows.sum(1).unbind()
        loss = total / denominator
    elif reduction == "sum":
        loss = losses.sum()
    return loss, stats, denominator, result


def _fake(
    logits: Tensor, target: Tensor, weight: Any, ignore_index: Any, reduction: str, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradient = rest[-1]

    def empty(*shape: Any) -> Tensor:
        return logits.new_empty(shape, dtype=torch.float32)

    rows, columns = logits.shape
    counted = reduction == "mean" and not target.is_floating_point()
    return (
        empty(rows) if reduction == "none" else empty(),
        empty(3, rows),
        empty() if counted else empty(0),
        logits.new_empty((rows, columns) if gradient else (0,)),
    )


def _normalized_late(logits: Tensor) -> bool:
    """Return whether the forward's gradient is that of the sum, which the backward divides by a mean's denominator.

    float16 cannot hold gradients of a mean before the loss scale has multiplied them, which only the backward knows.
    """
    return logits.dtype == torch.float16


def _backward(
    grad_output: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    denominator: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    compiled: bool,
    target_gradient: bool,
) -> tuple[Tensor, Tensor]:
    gradients = _backward_fake(grad_output, logits, target, target_gradient)
    mean, soft = reduction == "mean", target.is_floating_point()
    rows = LossPass(
        logits, target, weight, ignore_index, label_smoothing, z_loss, stats, grad_output=grad_output,
        denominator=denominator if mean and not soft else None,
        scale=1.0 / max(len(logits), 1) if mean and soft else 1.0, gradient=gradients[0],
        target_gradient=gradients[1] if target_gradient else None,
    )  # fmt: skip
    launch(rows, compiled)
    return gradients


def _backward_fake(grad_output: Any, logits: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape), target.new_empty(target.shape if rest[-1] else (0,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, weight, *ctx.settings, ctx.made = inputs
    _, stats, denominator, gradient = output
    ctx.set_materialize_grads(False)
    ctx.dtype, ctx.late = logits.dtype, _normalized_late(logits)
    if ctx.made:
        ctx.save_for_backward(denominator, gradient)
    else:
        ctx.save_for_backward(logits, target, weight, stats, denominator)


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    if ctx.made:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "cross_entropy(gradient_in_forward=True) cannot be differentiated twice: its forward keeps the "
                "gradient instead of the logits. Leave gradient_in_forward out where create_graph=True is used."
            )
        denominator, gradient = ctx.saved_tensors
        # The forward left the gradient undivided: now the loss scale has multiplied it.
        late = denominator if ctx.late and denominator.dim() == 0 else None
        return (scaled_gradient(gradient, grad, late, ctx.dtype),)
    logits, target, weight, stats, denominator = ctx.saved_tensors
    if torch.is_grad_enabled():
        return eager_gradients(reference, (logits, target, weight, *ctx.settings[:-1]), (grad,))
    soft = ctx.needs_input_grad[1]
    logits_gradient, target_gradient = _backward_op(
        grad, logits, target, weight, stats, denominator, *ctx.settings, soft
    )
    return logits_gradient, target_gradient if soft else None


_backward_op = KernelOp("cross_entropy_backward", _backward, _backward_fake)
_op = KernelOp("cross_entropy", _forward, _fake, backward=_gradients, setup_context=_setup_context)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    gradient_in_forward: bool = False,
    compiled: bool = False,
) -> Tensor:
    """Return ``torch.nn.functional.cross_entropy``, computed in FP32 from float32, float16 or bfloat16 logits.

    On a CUDA device a label that is no class gives a loss and a row of gradients of NaN (with TRITON_DEBUG=1 a failed
    assertion); elsewhere the function runs as plain torch, and raises as torch does. A row of ``ignore_index`` is not
    read: its gradient is zero, whatever its logits are.

    Args:
        logits: [C], [N, C] or [N, C, d1, ...]. Rows may be any distance apart; where classes are not next to each
            other in memory, or rows of several dimensions are not equally spaced, the logits are copied.
        target: class indices, int64 or uint8, [], [N] or [N, d1, ...]; or probabilities of the logits' shape,
            float32, float16 or bfloat16.
        weight: of each class, [C], float32, float16 or bfloat16. A mean is divided by the weights of its labels.
        label_smoothing: in [0, 1].
        z_loss: adds ``z_loss * logsumexp(logits)**2`` to the loss of each row that is not ignored, without class
            weights; a mean divides it by the same denominator. PaLM (arXiv 2204.02311) uses 1e-4.
        gradient_in_forward: make the gradient in the forward: it needs the memory early, and saves a pass over the
            logits. Only where the logits alone want a gradient, once (no ``create_graph``); elsewhere without effect.
            In float16 it is divided by a mean's denominator in the backward, lest it underflow.
        compiled: on a CPU with AVX-512 run as a C++ loop, which the first call compiles: bfloat16 or float32 logits
            with class indices, without class weights.

    Returns:
        float32: 0-dim, or with reduction "none" of the shape of the labels.

    Raises:
        TypeError: a dtype that is not listed above (float64 among them).
        ValueError: shapes that do not match, an unknown reduction, label_smoothing outside of [0, 1], or
            ignore_index >= 0 with probabilities; ``compiled`` of what that does not serve.
        CompilerError: nothing can be compiled here.
        RuntimeError: weights that want a gradient, with class indices.
    """
    soft = check_arguments(logits, target, weight, ignore_index, reduction, label_smoothing)
    if compiled:
        check_compiled(logits, target, weight)
    shape = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else target.shape[: 0 if soft else None]
    # Classes become the last dimension, along which rows lie.
    if logits.dim() > 2:
        logits, target = logits.movedim(1, -1), target.movedim(1, -1) if soft else target
    columns = logits.shape[-1]
    # uint8 has no -100, nor 300 classes.
    x, y = _rows(logits), _rows(target) if soft else target.reshape(-1).long()
    # The kernel has no gradient for class weights, and no row without classes.
    if columns == 0 or (weight is not None and weight.requires_grad):
        loss = reference(x, y, weight, ignore_index, reduction, label_smoothing, z_loss)
    else:
        # Only the logits' gradient can be made early: that of probabilities needs the backward.
        made = (
            gradient_in_forward
            and wants_gradients_now()
            and logits.requires_grad
            and not (soft and target.requires_grad)
        )
        numbers = float(label_smoothing), float(z_loss)
        loss = _op(x, y, weight, ignore_index, reduction, *numbers, compiled, made)[0]
    return loss.view(shape) if reduction == "none" else loss


def _rows(x: Tensor) -> Tensor:
    """Return x as [rows, C] with adjacent classes, a view if possible."""
    x = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(x.shape[:-1].numel(), 0)
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


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
    check_looped("cross_entropy", logits)
    if target.is_floating_point() or weight is not None:
        raise ValueError(
            f"cross_entropy(compiled=True) serves class indices without class weights, got a target of {target.dtype}"
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
