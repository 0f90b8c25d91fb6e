"""Fuses the last linear layer and its cross-entropy, a chunk of rows at a time, so that logits are never all in memory.

For each chunk the logits ``hidden @ weight.T + bias`` are made in the low dtype, cross-entropy's kernel writes their
gradient over them, and two matmuls take it into those of hidden and weight, before the next chunk uses the same memory.
So the forward makes the gradients, and the backward multiplies them by the gradient of the loss. They are those of the
sum until then: a mean's denominator is divided out in the backward, in FP32, lest float16 underflow.

With reduction "none" each row's gradient of the loss is known in the backward only, which makes the logits again.

The gradient of the weight is summed in FP32 over the chunks. On CUDA a chunk's part of it comes from the matmul in
FP32; on a CPU it is rounded to the low dtype first. Matmuls have up to seven classes more, whose weights and gradients
are zeros; ``aligned_linear`` explains why.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.kernel_op import KernelOp, eager_gradients
from fxprec.kernels.launch.operands import FLOATS
from fxprec.kernels.nn import cross_entropy_reference
from fxprec.kernels.nn.aligned_linear import padded, pitch_of
from fxprec.kernels.nn.cross_entropy import check_linear_arguments
from fxprec.kernels.nn.cross_entropy_kernels import launch
from fxprec.kernels.nn.cross_entropy_reference import LossPass
from fxprec.kernels.nn.scaled_gradient import scaled_gradient, wants_gradients_now

_SMALLEST: Final = 128


def default_chunk(rows: int, features: int, classes: int) -> int:
    """Return the rows of a chunk: a power of two, with about twice as many logits as hidden states; at least 128."""
    wanted = max(_SMALLEST, 2 * rows * features // max(classes, 1))
    return 1 << (wanted.bit_length() - 1)


def reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Compute the loss in plain torch, with all logits in memory, from [N, D] and [V, D]; float64 too."""
    dtype = hidden.dtype
    logits = F.linear(hidden, weight.to(dtype), None if bias is None else bias.to(dtype))
    return cross_entropy_reference.reference(logits, target, None, ignore_index, reduction, label_smoothing, z_loss)


def _run_chunks(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, label_smoothing: float,
    z_loss: float, chunk: int, losses: Tensor, grad_output: Tensor | None, gradients: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    """Write the losses [N], and those gradients of hidden, weight and bias that are not None (the last two in FP32).

    Args:
        grad_output: of each loss, [N] at any distance; None for 1.
    """
    count, classes = len(hidden), len(weight)
    weight = padded(weight.to(hidden.dtype))
    bias, width = None if bias is None else padded(bias.to(hidden.dtype)), len(weight)
    of_hidden, of_weight, of_bias = gradients
    # The padded rows behind the weight's gradient take the products with padded classes, which are 0.
    total = None if of_weight is None else of_weight.as_strided((width, of_weight.shape[1]), of_weight.stride())
    chunk = min(count, chunk or default_chunk(count, hidden.shape[1], classes))
    # Every chunk uses the same memory: logits first, then their gradient.
    buffer = hidden.new_empty(chunk, width)
    stats = hidden.new_empty(3 * chunk, dtype=torch.float32)
    for sums in (total, of_bias):
        if sums is not None:
            sums.zero_()
    for start in range(0, count, max(chunk, 1)):
        rows = slice(start, min(start + chunk, count))
        x = hidden[rows]
        whole = buffer[: len(x)]
        # The padded classes behind them are zeros.
        logits = whole[:, :classes]
        if bias is None:
            torch.mm(x, weight.t(), out=whole)
        else:
            torch.addmm(bias, x, weight.t(), out=whole)
        chunk_pass = LossPass(
            logits, target[rows], None, ignore_index, label_smoothing, z_loss, stats[: 3 * len(x)].view(3, len(x)),
            losses[rows], grad_output=None if grad_output is None else grad_output[rows],
            gradient=None if gradients == (None, None, None) else logits,
        )  # fmt: skip
        launch(chunk_pass)
        # They are NaN in rows of hidden that are not finite.
        whole[:, classes:] = 0
        if of_hidden is not None:
            torch.mm(whole, weight, out=of_hidden[rows])
        if total is not None:
            _add_product(total, whole.t(), x)
        if of_bias is not None:
            of_bias += logits.sum(0, dtype=torch.float32)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to total, which is FP32."""
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, out=total)
    elif a.device.type != "cuda":
        total += torch.mm(a, b)
    elif _adds_in_float32(a.dtype, a.device):
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total += torch.ops.aten.mm.dtype(a, b, torch.float32)


@functools.cache
def _adds_in_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this torch can add a low-precision product to an FP32 matrix: some versions refuse."""
    # Tried once, not looked up by version.
    a = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, a, a, torch.float32, out=total)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    chunk: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, a mean's denominator (if any) and the wanted gradients of the sum (hidden, weight, bias)."""
    loss, denominator, *made = _fake(hidden, weight, target, bias, ignore_index, reduction, wanted)
    losses = loss if reduction == "none" else hidden.new_empty(len(hidden), dtype=torch.float32)
    gradients = tuple(g if w else None for g, w in zip(made, wanted, strict=True))
    _run_chunks(
        hidden, weight, target, bias, ignore_index, label_smoothing, z_loss, chunk, losses, None, gradients
    )  # fmt: skip
    if reduction == "mean":
        denominator = cross_entropy_reference.count_targets(target, None, ignore_index)
        loss = losses.sum() / denominator
    elif reduction == "sum":
        loss = losses.sum()
    return loss, denominator, made[0], made[1], made[2]


def _fake(
    hidden: Tensor, weight: Tensor, target: Any, bias: Any, ignore_index: Any, reduction: str, *rest: Any
) -> tuple[Tensor, ...]:
    loss = hidden.new_empty(len(hidden) if reduction == "none" else (), dtype=torch.float32)
    denominator = hidden.new_empty(() if reduction == "mean" else 0, dtype=torch.float32)
    return loss, denominator, *_empty_gradients(hidden, weight, rest[-1])


def _empty_gradients(hidden: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients of hidden, weight and bias, empty if not wanted; the weight's has room for padding."""
    of_hidden, of_weight, of_bias = wanted
    rows = (pitch_of(len(weight), hidden.itemsize), *weight.shape[1:]) if of_weight else (0,)
    return (
        hidden.new_empty(hidden.shape if of_hidden else (0,)),
        hidden.new_empty(rows, dtype=torch.float32)[: len(weight)],
        hidden.new_empty(len(weight) if of_bias else 0, dtype=torch.float32),
    )


def _backward(
    grad_output: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the wanted gradients for a gradient of each row's loss, [N]; the logits are computed again."""
    made = _empty_gradients(hidden, weight, wanted)
    losses = torch.empty_like(hidden[:, :1].reshape(-1), dtype=torch.float32)
    gradients = tuple(g if w else None for g, w in zip(made, wanted, strict=True))
    _run_chunks(
        hidden, weight, target, bias, ignore_index, label_smoothing, z_loss, chunk, losses, grad_output, gradients
    )  # fmt: skip
    return made


def _backward_fake(grad_output: Any, hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(hidden, weight, rest[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, bias, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    _, *made = output
    ctx.save_for_backward(hidden, weight, target, bias, *made)


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    hidden, weight, target, bias, denominator, *made = ctx.saved_tensors
    ignore_index, reduction, label_smoothing, z_loss, chunk, kept = ctx.settings
    if torch.is_grad_enabled():
        return eager_gradients(reference, (hidden, weight, target, bias, *ctx.settings[:4]), (grad,))
    wanted = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    # The forward made the gradients that are wanted: they need their factor alone.
    if all(k or not w for k, w in zip(kept, wanted, strict=True)):
        over = denominator if reduction == "mean" else None
        places = zip((hidden, weight, bias), made, wanted, strict=True)
        found = [scaled_gradient(g, grad, over, x.dtype) if w else None for x, g, w in places]
    else:
        if reduction == "mean":
            # Without any label the gradients are 0, not 0 / 0.
            grad = grad / torch.where(denominator == 0, 1.0, denominator)
        again = _backward_op(
            grad.expand(len(hidden)), hidden, weight, target, bias, ignore_index, label_smoothing, z_loss, chunk, wanted
        )  # fmt: skip
        places = zip((hidden, weight, bias), again, wanted, strict=True)
        found = [g.to(x.dtype) if w else None for x, g, w in places]
    return found[0], found[1], None, found[2]


_backward_op = KernelOp("linear_cross_entropy_backward", _backward, _backward_fake)
_op = KernelOp("linear_cross_entropy", _forward, _fake, backward=_gradients, setup_context=_setup_context)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Return ``cross_entropy(linear(hidden, weight, bias), target)`` without ever holding all logits.

    Peak memory beside the inputs is a chunk's logits and the gradients, that of the weight in FP32. Labels that are no
    class, rows of ``ignore_index``, ``label_smoothing`` and ``z_loss`` are as in ``cross_entropy``. Under
    ``torch.autocast`` hidden is cast to its dtype first, as by ``torch.nn.functional.linear``. Differentiating twice
    works, in plain torch with all logits in memory.

    Args:
        hidden: [..., D], float32, float16 or bfloat16: the dtype of the logits.
        weight: [V, D], of hidden's dtype or float32, which is cast once and whose gradient is float32.
        target: class indices, int64 or uint8, [...].
        bias: [V], as the weight, or None.
        chunk: rows at a time; None for ``default_chunk``. More rows make better matmuls and take more memory.

    Returns:
        float32: 0-dim, or with reduction "none" of the shape of target.

    Raises:
        TypeError: a dtype that is not listed above (float64 among them).
        ValueError: shapes that do not match, an unknown reduction, label_smoothing outside of [0, 1], chunk < 1.
    """
    device = hidden.device.type
    # As torch's linear does; the op itself is opaque to autocast.
    if torch.is_autocast_enabled(device) and hidden.dtype in FLOATS:
        hidden = hidden.to(torch.get_autocast_dtype(device))
        weight, bias = _in_dtype(weight, hidden.dtype), None if bias is None else _in_dtype(bias, hidden.dtype)
    check_linear_arguments(hidden, weight, target, bias, reduction, label_smoothing, chunk)
    # The kernels take rows at any distance, with adjacent features.
    x = hidden.reshape(target.numel(), hidden.shape[-1])
    x = x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
    # With "none" each row's factor is known in the backward only.
    now = reduction != "none" and wants_gradients_now()
    wanted = [bool(now and t is not None and t.requires_grad) for t in (hidden, weight, bias)]
    loss = _op(
        x, weight, target.reshape(-1), bias, ignore_index, reduction, float(label_smoothing), float(z_loss), chunk or 0,
        wanted,
    )[0]  # fmt: skip
    return loss.view(target.shape) if reduction == "none" else loss


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to the dtype unless x is float32, which the op casts itself to make its gradient in FP32."""
    return x if x.dtype == torch.float32 else x.to(dtype)
