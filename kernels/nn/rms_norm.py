"""RMS norm, by itself or with the residual add and the dropout before it, in one pass.

    s = residual + dropout(x)
    y = s / sqrt(mean(s * s) + eps) * (weight + offset)

Llama's blocks run this as residual add, cast to FP32, square, mean, rsqrt, product, cast and product with the weight,
each a pass over memory in eager mode. Here x and the residual are read once, s and y written once, and y is rounded
once. s is rounded to the dtype it is stored in and normalised as stored. The backward reads dy, ds and s once, and
computes the mask again. ``offset=1`` is Gemma's ``1 + weight``.

Bytes an element, all in bfloat16: forward 4, with residual 8; backward 6, with residual 8, and 10 where dropout (or an
FP32 stream) makes dx another tensor than the residual's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.nn.norm_ops import NormOps, check_arguments

_OPS: Final = NormOps("rms_norm", center=False)
#: torch computes low precision in FP32 and takes FP32's machine epsilon for it, too.
_EPS: Final = torch.finfo(torch.float32).eps


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    output_dtype: torch.dtype | None = None,
    offset: float = 0.0,
) -> Any:
    """``F.rms_norm(x)``; with a residual ``(F.rms_norm(s), s)`` of ``s = residual + F.dropout(x)``.

    Computes in FP32 and rounds at the store. On a CPU, and where Triton is missing, it runs as plain torch.

    Args:
        x, normalized_shape, weight, residual, dropout_p, training, output_dtype: as of ``layer_norm``.
        eps: float32's machine epsilon if None, as torch has it for every one of these dtypes.
        offset: added to the weight.

    Returns:
        y, contiguous, of x's shape; with a residual (y, s).

    Raises:
        TypeError: another dtype (float64 is declined).
        ValueError: shapes or devices do not fit; dropout without residual; dropout_p outside of [0, 1); an offset
            without weight.
    """
    parameters = {"weight": weight}
    columns = check_arguments("rms_norm", x, normalized_shape, parameters, residual, dropout_p, output_dtype)
    if offset and weight is None:
        raise ValueError(f"rms_norm adds offset={offset} to the weight, but there is none: give weight, or offset=0.")
    p = dropout_p if training else 0.0
    eps = _EPS if eps is None else eps
    return _OPS(x, residual, weight, None, columns, eps, p, float(offset), output_dtype or x.dtype)
