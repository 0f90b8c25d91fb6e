"""Layer norm, by itself or with the residual add and the dropout before it, in one pass.

    s = residual + dropout(x)
    y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias

x -> dropout -> + residual -> to FP32 -> layer norm -> to low precision are five passes and a mask in memory in eager
mode. Here x and the residual are read once, s and y are written once; FP32 residual streams beside low x and y need no
cast of their own. s is rounded to the dtype it is stored in and normalised as stored, so that the backward, which reads
it, sees what the forward saw. The backward reads dy, ds and s once, and computes the mask again.

Bytes an element, all in bfloat16: forward 4, with residual 8; backward 6, with residual 8, and 10 where dropout (or an
FP32 stream) makes dx another tensor than the residual's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.nn.norm_ops import NormOps, check_arguments

_OPS: Final = NormOps("layer_norm", center=True)


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    output_dtype: torch.dtype | None = None,
) -> Any:
    """``F.layer_norm(x)``; with a residual ``(F.layer_norm(s), s)`` of ``s = residual + F.dropout(x)``.

    Computes in FP32 and rounds at the store. On a CPU, and where Triton is missing, it runs as plain torch.

    Args:
        x: float32, float16 or bfloat16 [*, *normalized_shape]. Rows at one distance from each other, contiguous in
            themselves, are read in place; else x is copied. Likewise the residual.
        normalized_shape: of the last dimensions, the norm is over.
        weight: float32, float16 or bfloat16 [*normalized_shape], or None; likewise the bias.
        residual: float32, float16 or bfloat16 of x's shape: the stream that x is added to. s has the dtype that
            torch promotes the two to.
        dropout_p: part of x that is dropped, [0, 1), by a seed from torch's generator of the device.
        training: drop; else dropout_p is of no effect.
        output_dtype: of y; x's without it.

    Returns:
        y, contiguous, of x's shape; with a residual (y, s).

    Raises:
        TypeError: another dtype (float64 is declined).
        ValueError: shapes or devices do not fit; dropout without residual; dropout_p outside of [0, 1).
    """
    parameters = {"weight": weight, "bias": bias}
    columns = check_arguments("layer_norm", x, normalized_shape, parameters, residual, dropout_p, output_dtype)
    p = dropout_p if training else 0.0
    return _OPS(x, residual, weight, bias, columns, eps, p, 0.0, output_dtype or x.dtype)
