"""Lowers torch's reductions, softmaxes and norms to row programs; see ``lowering`` for the other ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from fxprec.kernels.rows.program.terms import Declined, RowTerm, TermBuilder


def _sum(c: TermBuilder, input: RowTerm, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RowTerm:
    return c.reduce("sum", input, dim, keepdim)


def _mean(c: TermBuilder, input: RowTerm, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> RowTerm:
    return c.reduce("mean", input, dim, keepdim)


def _extreme(op: str) -> Callable[..., RowTerm]:
    return lambda c, input, dim=(), keepdim=False: c.reduce(op, input, dim, keepdim)


def _centred(c: TermBuilder, x: RowTerm, dim: Any) -> tuple[RowTerm, RowTerm]:
    """Return x - mean and the variance of each row: two passes over registers, without cancellation."""
    centred = c("sub", x, c.reduce("mean", x, dim, True))
    return centred, c.reduce("mean", c("mul", centred, centred), dim, True)


def _var(
    c: TermBuilder,
    input: RowTerm,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> RowTerm:
    correction = (1 if unbiased in (None, True) else 0) if correction is None else correction
    count = math.prod(input.shape[len(input.shape) - c.reduced :])
    if count <= correction:
        raise Declined("the variance of fewer columns than its correction takes away")
    _, square = _centred(c, input, dim)
    square = c("mul", square, count / (count - correction))
    return square if keepdim else c.drop(square)


def _layer_norm(
    c: TermBuilder, input: RowTerm, normalized_shape: Any, weight: RowTerm | None = None, bias: RowTerm | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> RowTerm:  # fmt: skip
    centred, square = _centred(c, input, [*range(-len(normalized_shape), 0)])
    result = c("mul", centred, c("rsqrt", c("add", square, eps)))
    result = result if weight is None else c("mul", result, weight)
    return result if bias is None else c("add", result, bias)


def _rms_norm(
    c: TermBuilder, input: RowTerm, normalized_shape: Any, weight: RowTerm | None = None, eps: float | None = None
) -> RowTerm:
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    square = c.reduce("mean", c("mul", input, input), [*range(-len(normalized_shape), 0)], True)
    result = c("mul", input, c("rsqrt", c("add", square, eps)))
    return result if weight is None else c("mul", result, weight)


def _exponentials(c: TermBuilder, x: RowTerm, dim: Any) -> tuple[RowTerm, RowTerm, RowTerm]:
    """Return x - max, its exponential, and the sum of the exponentials."""
    c.last(x, dim)
    # A softmax does not depend on the maximum, whose gradient is therefore left out.
    shifted = c("sub", x, c.stop(c.reduce("max", x, dim, True)))
    exponential = c("exp", shifted)
    return shifted, exponential, c.reduce("sum", exponential, dim, True)


def _softmax(c: TermBuilder, input: RowTerm, dim: Any = None, *_unused: Any, **_options: Any) -> RowTerm:
    _, exponential, total = _exponentials(c, input, dim)
    return c("div", exponential, total)


def _log_softmax(c: TermBuilder, input: RowTerm, dim: Any = None, *_unused: Any, **_options: Any) -> RowTerm:
    shifted, _, total = _exponentials(c, input, dim)
    return c("sub", shifted, c("log", total))


def _logsumexp(c: TermBuilder, input: RowTerm, dim: Any, keepdim: bool = False) -> RowTerm:
    c.last(input, dim)
    top = c.stop(c.reduce("max", input, dim, True))
    top = c("where", c("eq", c("abs", top), math.inf), 0.0, top)  # rows of -inf give -inf, not NaN
    total = c.reduce("sum", c("exp", c("sub", input, top)), dim, True)
    result = c("add", c("log", total), top)
    return result if keepdim else c.drop(result)


def _normalize(
    c: TermBuilder, input: RowTerm, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None
) -> RowTerm:
    if p != 2.0:
        raise Declined(f"a norm of order {p}")
    total = c.reduce("sum", c("mul", input, input), dim, True)
    # The root has no derivative at a row of zeros, and torch takes 0.
    zero = c("eq", total, 0.0)
    norm = c("where", zero, 0.0, c("sqrt", c("where", zero, 1.0, total)))
    return c("div", input, c("where", c("lt", norm, eps), eps, norm))


#: Ops that reduce over columns -> position of the argument that names dimensions; None: ``normalized_shape`` does.
ROW_REDUCTIONS: Final[Mapping[str, int | None]] = MappingProxyType(
    {
        "sum": 1, "mean": 1, "amax": 1, "amin": 1, "var": 1, "softmax": 1, "log_softmax": 1, "logsumexp": 1,
        "normalize": 2, "layer_norm": None, "rms_norm": None,
    }
)  # fmt: skip

REDUCING: Final[Mapping[str, Callable[..., RowTerm]]] = MappingProxyType(
    {
        "sum": _sum, "mean": _mean, "amax": _extreme("max"), "amin": _extreme("min"), "var": _var,
        "softmax": _softmax, "log_softmax": _log_softmax, "logsumexp": _logsumexp, "normalize": _normalize,
        "layer_norm": _layer_norm, "rms_norm": _rms_norm,
    }
)  # fmt: skip
