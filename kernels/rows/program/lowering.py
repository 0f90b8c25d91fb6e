"""Lowers torch's functions to row programs: canonical op name -> a function over terms with the same arguments.

The formulas are torch's, with its corner cases: where a branch is not taken its gradient must not become 0 * inf, so
arguments of exponentials are selected first. In order: clamps, reductions with softmaxes and norms, the other ops, and
``LOWERINGS``, the table of all. The derivatives of the primitives are in ``backward``.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.fx import Node

from fxprec.kernels.rows.program.values import COMPARISONS, Builder, Declined, RowTerm, TermBuilder

# -- clamps ------------------------------------------------------------------------------------------------------------
#
# The value is the same in every torch: min(max(x, low), high). It is high where the bounds are crossed, and NaN where
# one of the three is. Who gets the gradient is not the same, since torch 2.14 changed it; "nobody": the value counts as
# a constant there. (Of a NaN, torch 2.13 gives it to high now and then.) The first line that holds decides:
#
#                             up to torch 2.13     from torch 2.14 on
#   bounds are numbers (``clamp``)
#     low < x < high          x                    x
#     x == low or x == high   x                    nobody
#     otherwise, or x is NaN  nobody               nobody
#   one bound, a tensor (``_clamp_by_one``)
#     x or the bound is NaN   nobody               both, all of it
#     x == bound              x                    both, half of it each
#     otherwise               the value's          the value's
#   two bounds, at least one a tensor (``_clamp_by_two``)
#     x is NaN                nobody               x
#     a bound is NaN          nobody               as minimum(maximum(x, low), high) has it
#     low > high              high                 high
#     x == low == high        x                    x
#     x < low == high         nobody               low
#     x == low or x == high   x                    x and that bound, half of it each
#     otherwise               the value's          the value's


def clamp(c: TermBuilder, input: RowTerm, min: Any = None, max: Any = None) -> RowTerm:  # torch's names
    """Lower ``torch.clamp``, by numbers or by tensors. Where ``min > max`` the result is ``max``."""
    if isinstance(min, RowTerm) or isinstance(max, RowTerm):
        two = min is not None and max is not None
        return _clamp_by_two(c, input, min, max) if two else _clamp_by_one(c, input, min, max)
    # The gradient passes through ``input``, chosen where it is inside. Elsewhere the value is a constant, ``held``.
    bounds = (("ge", min), ("le", max)) if _share_at_bound(False) == 1 else (("gt", min), ("lt", max))
    inside = [c(op, input, bound) for op, bound in bounds if bound is not None]
    held = c.stop(input)
    # max comes again, after min: where they are crossed the result is max.
    for op, bound in (("gt", max), ("lt", min), ("gt", max if min is not None else None)):
        if bound is not None:
            held = c("where", c(op, held, bound), bound, held)
    return c("where", inside[0] if len(inside) == 1 else c("and", *inside), input, held) if inside else input


def _clamp_by_one(c: TermBuilder, x: RowTerm, low: Any, high: Any) -> RowTerm:
    """Clamp by one bound, a tensor; the other one is None."""
    bound, op, within, beyond = (high, "minimum", "le", "gt") if low is None else (low, "maximum", "ge", "lt")
    value = c(op, x, bound)
    if _share_at_bound(True) != 1:
        return value
    # The plain minimum or maximum would halve the gradient at the bound. For NaN neither comparison holds.
    return c("where", c(within, x, bound), x, c("where", c(beyond, x, bound), bound, c.stop(value)))


def _clamp_by_two(c: TermBuilder, x: RowTerm, low: Any, high: Any) -> RowTerm:
    """Clamp by two bounds, of which one is a tensor."""
    value = c("minimum", c("maximum", x, low), high)
    if _share_at_bound(True) != 1:
        # Where the bounds are equal, ``value`` would halve the gradient twice.
        one_bound = c("where", c("lt", x, low), low, c("where", c("gt", x, high), high, x))
        ordered = c("where", c("gt", low, high), high, c("where", c("eq", low, high), one_bound, value))
        return c("where", c("isnan", x), x, ordered)
    # No comparison holds for NaN, so that a NaN among the three comes to the constant ``value``.
    inside = c("and", c("ge", x, low), c("le", x, high))
    below, crossed = c("and", c("lt", x, low), c("lt", low, high)), c("lt", high, low)
    above = c("or", c("and", c("gt", x, high), c("le", low, high)), c("and", crossed, c("not", c("isnan", x))))
    outside = c("where", above, high, c("where", below, low, c.stop(value)))
    return c("where", inside, x, outside)


@functools.cache
def _share_at_bound(tensors: bool) -> float:
    """Return the share of the gradient that torch's clamp gives an input equal to its bound.

    It is 1 up to torch 2.13. From 2.14 on it is 0 where bounds are numbers, and 0.5 where they are ``tensors``.
    """
    found: list[float] = []

    def ask() -> None:
        x = torch.zeros(1, device="cpu", requires_grad=True)
        bounds: Any = (torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")) if tensors else (0.0, 1.0)
        found.extend(torch.autograd.grad(x.clamp(*bounds).sum(), x)[0].tolist())

    # In a thread of its own, where the caller's dispatch modes, hooks and inference mode are not active.
    thread = threading.Thread(target=ask, name="fxprec asks torch")
    thread.start()
    thread.join()
    return found[0]


# -- reductions, softmaxes and norms -----------------------------------------------------------------------------------
#
# All reduce over the columns, whatever ``dim`` a call names: ``trailing_dimensions`` has looked at that before.


def _total(op: str) -> Callable[..., RowTerm]:
    """Return the lowering of a sum or mean. Terms have no dtype: ``forward`` reads the result's from its node."""
    return lambda c, input, dim=None, keepdim=False, dtype=None: c.reduce(op, input, keepdim)


def _row_extreme(op: str) -> Callable[..., RowTerm]:
    """Return the lowering of ``amax`` or ``amin``. An empty ``dim``, torch's default, is declined."""
    return lambda c, input, dim=(), keepdim=False: c.reduce(op, input, keepdim)


def _centred(c: TermBuilder, x: RowTerm) -> tuple[RowTerm, RowTerm]:
    """Return x - mean and the biased variance of each row.

    Squares are taken after the mean, which is a second level of reductions: mean(x * x) - mean * mean would cancel.
    """
    centred = c("sub", x, c.reduce("mean", x, keepdim=True))
    return centred, c.reduce("mean", c("mul", centred, centred), keepdim=True)


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
    _, square = _centred(c, input)
    square = c("mul", square, count / (count - correction))
    return square if keepdim else c.drop(square)


def _layer_norm(
    c: TermBuilder, input: RowTerm, normalized_shape: Any, weight: RowTerm | None = None, bias: RowTerm | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> RowTerm:  # fmt: skip
    centred, square = _centred(c, input)
    result = c("mul", centred, c("rsqrt", c("add", square, eps)))
    result = result if weight is None else c("mul", result, weight)
    return result if bias is None else c("add", result, bias)


def _rms_norm(
    c: TermBuilder, input: RowTerm, normalized_shape: Any, weight: RowTerm | None = None, eps: float | None = None
) -> RowTerm:
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    square = c.reduce("mean", c("mul", input, input), keepdim=True)
    result = c("mul", input, c("rsqrt", c("add", square, eps)))
    return result if weight is None else c("mul", result, weight)


def _exponentials(c: TermBuilder, x: RowTerm) -> tuple[RowTerm, RowTerm, RowTerm]:
    """Return x - max, its exponential, and the sum of the exponentials."""
    # A softmax does not depend on the maximum, whose gradient is therefore left out.
    shifted = c("sub", x, c.stop(c.reduce("max", x, keepdim=True)))
    exponential = c("exp", shifted)
    return shifted, exponential, c.reduce("sum", exponential, keepdim=True)


def _softmax(c: TermBuilder, input: RowTerm, dim: Any = None, *_unused: Any, **_options: Any) -> RowTerm:
    _, exponential, total = _exponentials(c, input)
    return c("div", exponential, total)


def _log_softmax(c: TermBuilder, input: RowTerm, dim: Any = None, *_unused: Any, **_options: Any) -> RowTerm:
    shifted, _, total = _exponentials(c, input)
    return c("sub", shifted, c("log", total))


def _logsumexp(c: TermBuilder, input: RowTerm, dim: Any, keepdim: bool = False) -> RowTerm:
    top = c.stop(c.reduce("max", input, keepdim=True))
    top = c("where", c("eq", c("abs", top), math.inf), 0.0, top)  # rows of -inf give -inf, not NaN
    total = c.reduce("sum", c("exp", c("sub", input, top)), keepdim=True)
    result = c("add", c("log", total), top)
    return result if keepdim else c.drop(result)


def _normalize(
    c: TermBuilder, input: RowTerm, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None
) -> RowTerm:
    if p != 2.0:
        raise Declined(f"a norm of order {p}")
    total = c.reduce("sum", c("mul", input, input), keepdim=True)
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


def trailing_dimensions(node: Node, name: str, rank: int | None) -> int:
    """Return over how many trailing dimensions a node reduces; -1 for other dimensions, or where nobody knows.

    Args:
        name: of its op, one of ``ROW_REDUCTIONS``.
        rank: of what it reduces; None: not known, so that only dimensions that are counted from the end tell.
    """
    position = ROW_REDUCTIONS[name]
    keyword, place = ("normalized_shape", 1) if position is None else ("dim", position)
    default = 1 if name == "normalize" else None
    given: Any = node.args[place] if len(node.args) > place else node.kwargs.get(keyword, default)
    if position is None:
        return len(given) if isinstance(given, tuple | list) else -1
    dims = [given] if isinstance(given, int) else [*given] if isinstance(given, tuple | list) else []
    if not dims or not all(isinstance(d, int) for d in dims):
        return -1
    # Counted from the end, as tensors of a region differ in rank; what cannot be counted so stays positive, and fails.
    dims = sorted(d - rank if rank is not None and d >= 0 else d for d in dims)
    return len(dims) if dims == [*range(-len(dims), 0)] else -1


# -- the other ops -----------------------------------------------------------------------------------------------------


def lower(b: Builder, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], reduced: int) -> RowTerm:
    """Lower one call. Terms stand for tensors; ``reduced``: how many trailing dimensions are the columns.

    Raises:
        Declined: an op, or arguments of it, that row programs do not know.
    """
    function = LOWERINGS.get(name)
    if function is None:
        raise Declined(f"{name} is no row operation")
    try:
        return function(TermBuilder(b, reduced), *args, **kwargs)
    # The signature of a lowering is the list of arguments that it supports.
    except TypeError as error:  # arguments that the lowering does not have
        raise Declined(f"{name}: {error}") from None


def _unary(op: str) -> Callable[..., RowTerm]:
    return lambda c, input: c(op, input)


def _binary(op: str) -> Callable[..., RowTerm]:
    return lambda c, input, other: c(op, input, other)


def _sum_with(op: str) -> Callable[..., RowTerm]:
    """Return the lowering of a sum or difference whose second operand is multiplied by ``alpha``."""

    def lowered(c: TermBuilder, input: Any, other: Any, alpha: float = 1) -> RowTerm:
        return c(op, input, other if alpha == 1 else c("mul", other, alpha) if _is_term(other) else other * alpha)

    return lowered


def _div(c: TermBuilder, input: Any, other: Any, rounding_mode: Any = None) -> RowTerm:
    if rounding_mode is not None:
        raise Declined("a division that rounds")
    if not _is_term(other) and other != 0:
        # The reciprocal of a power of two is exact, and a product is cheaper than a division.
        return c("mul", input, 1.0 / other) if math.frexp(other)[0] in (0.5, -0.5) else c("div", input, other)
    return c("div", input, other)


def _rdiv(c: TermBuilder, input: Any, other: Any) -> RowTerm:
    """Lower a number divided by a tensor: ``3 / x`` or ``x.__rtruediv__(3)``."""
    return c("div", other, input) if _is_term(input) else c("div", input, other)


def _pow(c: TermBuilder, input: Any, exponent: Any) -> RowTerm:
    """Lower a power to products and roots, whose derivatives are exact; decline other exponents."""
    if _is_term(exponent) or not _is_term(input):
        raise Declined("a power whose exponent is a tensor")
    if exponent == int(exponent) and 1 <= abs(exponent) <= 4:
        result = input
        for _ in range(int(abs(exponent)) - 1):
            result = c("mul", result, input)
        return result if exponent > 0 else c("div", 1.0, result)
    if exponent in (0.5, -0.5):
        return c("sqrt" if exponent > 0 else "rsqrt", input)
    if exponent == 1.5:
        return c("mul", input, c("sqrt", input))
    raise Declined(f"a power of {exponent}")


def _hardtanh(
    c: TermBuilder, input: RowTerm, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> RowTerm:
    x = input
    inside = c("and", c("gt", x, min_val), c("lt", x, max_val))
    # At the bounds, too, hardtanh has no gradient: x passes it only strictly inside.
    held = c.stop(x)
    held = c("where", c("gt", held, max_val), max_val, held)
    return c("where", inside, x, c("where", c("lt", held, min_val), min_val, held))


def _relu(c: TermBuilder, input: RowTerm, inplace: bool = False) -> RowTerm:
    # "le" is False for NaN, which must pass through.
    return c("where", c("le", input, 0.0), 0.0, input)


def _leaky_relu(c: TermBuilder, input: RowTerm, negative_slope: float = 0.01, inplace: bool = False) -> RowTerm:
    return c("where", c("gt", input, 0.0), input, c("mul", input, negative_slope))


def _elu(c: TermBuilder, input: RowTerm, alpha: float = 1.0, inplace: bool = False) -> RowTerm:
    # Positive inputs are 0 before expm1: an overflow in the branch that is not taken gives a gradient of NaN.
    low = c("where", c("gt", input, 0.0), 0.0, input)
    return c("where", c("gt", input, 0.0), input, c("mul", c("expm1", low), alpha))


def _softplus(c: TermBuilder, input: RowTerm, beta: float = 1.0, threshold: float = 20.0) -> RowTerm:
    scaled = c("mul", input, beta)
    large = c("gt", scaled, threshold)
    # Selected before exp: an overflow in the branch that is not taken would give its gradient 0 * inf.
    soft = c("log1p", c("exp", c("where", large, 0.0, scaled)))
    return c("where", large, input, soft if beta == 1 else c("div", soft, beta))


def _logsigmoid(c: TermBuilder, input: RowTerm) -> RowTerm:
    positive = c("gt", input, 0.0)
    low, high = c("where", positive, 0.0, input), c("where", positive, input, 0.0)
    return c(
        "where", positive, c("neg", c("log1p", c("exp", c("neg", high)))), c("sub", low, c("log1p", c("exp", low)))
    )


def _silu(c: TermBuilder, input: RowTerm, inplace: bool = False) -> RowTerm:
    return c("mul", input, c("sigmoid", input))


def _gelu(c: TermBuilder, input: RowTerm, approximate: str = "none") -> RowTerm:
    if approximate == "tanh":
        cubic = c("mul", c("mul", c("mul", input, input), input), 0.044715)
        inner = c("tanh", c("mul", c("add", input, cubic), math.sqrt(2.0 / math.pi)))
    else:
        inner = c("erf", c("mul", input, math.sqrt(0.5)))
    return c("mul", c("mul", input, 0.5), c("add", inner, 1.0))


def _mish(c: TermBuilder, input: RowTerm, inplace: bool = False) -> RowTerm:
    return c("mul", input, c("tanh", _softplus(c, input)))


def _hardsigmoid(c: TermBuilder, input: RowTerm, inplace: bool = False) -> RowTerm:
    return _hardtanh(c, c("add", c("mul", input, 1.0 / 6.0), 0.5), 0.0, 1.0)


def _hardswish(c: TermBuilder, input: RowTerm, inplace: bool = False) -> RowTerm:
    middle = c("mul", input, c("div", c("add", input, 3.0), 6.0))
    return c("where", c("le", input, -3.0), 0.0, c("where", c("ge", input, 3.0), input, middle))


def _add_scaled(op: str) -> Callable[..., RowTerm]:
    """Return the lowering of ``addcmul`` or ``addcdiv``, whose product or quotient ``value`` multiplies."""
    return lambda c, input, tensor1, tensor2, value=1: c("add", input, c("mul", c(op, tensor1, tensor2), value))


def _same(c: TermBuilder, input: RowTerm, *_: Any, **__: Any) -> RowTerm:
    return input


def _is_term(x: Any) -> bool:
    return isinstance(x, RowTerm)


_UNARY: Final = (
    "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "erf", "tanh",
    "sigmoid", "sign", "floor", "ceil", "trunc", "isnan",
)  # fmt: skip

LOWERINGS: Final[Mapping[str, Callable[..., RowTerm]]] = MappingProxyType(
    {
        **{name: _unary(name) for name in _UNARY},
        **{name: _binary(name) for name in (*sorted(COMPARISONS), "mul", "maximum", "minimum")},
        "logical_and": _binary("and"), "logical_or": _binary("or"), "logical_not": _unary("not"),
        "add": _sum_with("add"), "sub": _sum_with("sub"),
        "rsub": lambda c, input, other, alpha=1: _sum_with("sub")(c, other, input, alpha),
        "div": _div, "rdiv": _rdiv, "pow": _pow,
        "reciprocal": lambda c, input: c("div", 1.0, input), "square": lambda c, input: c("mul", input, input),
        "log10": lambda c, input: c("mul", c("log", input), 1.0 / math.log(10.0)),
        "clamp": clamp, "clamp_min": lambda c, input, min: clamp(c, input, min),
        "clamp_max": lambda c, input, max: clamp(c, input, None, max),
        "relu": _relu, "relu6": lambda c, input, inplace=False: _hardtanh(c, input, 0.0, 6.0), "hardtanh": _hardtanh,
        "leaky_relu": _leaky_relu, "elu": _elu, "softplus": _softplus, "logsigmoid": _logsigmoid, "silu": _silu,
        "gelu": _gelu, "mish": _mish, "hardsigmoid": _hardsigmoid, "hardswish": _hardswish,
        "tanhshrink": lambda c, input: c("sub", input, c("tanh", input)),
        "softsign": lambda c, input: c("div", input, c("add", c("abs", input), 1.0)),
        "where": lambda c, condition, input, other: c("where", condition, input, other),
        "masked_fill": lambda c, input, mask, value: c("where", mask, value, input),
        "addcmul": _add_scaled("mul"), "addcdiv": _add_scaled("div"),
        "lerp": lambda c, input, end, weight: c("add", input, c("mul", c("sub", end, input), weight)),
        "clone": _same, "contiguous": _same, "positive": _same,
        "sum": _total("sum"), "mean": _total("mean"), "amax": _row_extreme("max"), "amin": _row_extreme("min"),
        "var": _var,
        "softmax": _softmax, "log_softmax": _log_softmax, "logsumexp": _logsumexp, "normalize": _normalize,
        "layer_norm": _layer_norm, "rms_norm": _rms_norm,
    }
)  # fmt: skip
