"""Lowers torch's functions to row programs: canonical op name -> a function over terms with the same arguments.

The formulas are torch's, with its corner cases: where a branch is not taken its gradient must not become 0 * inf, so
arguments of exponentials are selected first. Reductions have a file of their own, ``reductions``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from fxprec.kernels.rows.program.clamp import clamp
from fxprec.kernels.rows.program.reductions import REDUCING
from fxprec.kernels.rows.program.terms import Declined, RowTerm, TermBuilder
from fxprec.kernels.rows.program.values import Builder


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


def _add(c: TermBuilder, input: Any, other: Any, alpha: float = 1) -> RowTerm:
    return c("add", input, other if alpha == 1 else c("mul", other, alpha) if _is_term(other) else other * alpha)


def _sub(c: TermBuilder, input: Any, other: Any, alpha: float = 1) -> RowTerm:
    return c("sub", input, other if alpha == 1 else c("mul", other, alpha) if _is_term(other) else other * alpha)


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
    if _is_term(exponent) or not _is_term(input):
        raise Declined("a power whose exponent is a tensor")
    return power(c, input, float(exponent))


def power(c: TermBuilder, x: RowTerm, exponent: float) -> RowTerm:
    """Lower a power to products and roots, whose derivatives are exact; decline other exponents."""
    if exponent == int(exponent) and 1 <= abs(exponent) <= 4:
        result = x
        for _ in range(int(abs(exponent)) - 1):
            result = c("mul", result, x)
        return result if exponent > 0 else c("div", 1.0, result)
    if exponent in (0.5, -0.5):
        return c("sqrt" if exponent > 0 else "rsqrt", x)
    if exponent == 1.5:
        return c("mul", x, c("sqrt", x))
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


def _where(c: TermBuilder, condition: RowTerm, input: Any, other: Any) -> RowTerm:
    return c("where", condition, input, other)


def _masked_fill(c: TermBuilder, input: RowTerm, mask: RowTerm, value: Any) -> RowTerm:
    return c("where", mask, value, input)


def _addcmul(c: TermBuilder, input: RowTerm, tensor1: RowTerm, tensor2: RowTerm, value: float = 1) -> RowTerm:
    return c("add", input, c("mul", c("mul", tensor1, tensor2), value))


def _addcdiv(c: TermBuilder, input: RowTerm, tensor1: RowTerm, tensor2: RowTerm, value: float = 1) -> RowTerm:
    return c("add", input, c("mul", c("div", tensor1, tensor2), value))


def _lerp(c: TermBuilder, input: RowTerm, end: RowTerm, weight: Any) -> RowTerm:
    return c("add", input, c("mul", c("sub", end, input), weight))


def _same(c: TermBuilder, input: RowTerm, *_: Any, **__: Any) -> RowTerm:
    return input


def _is_term(x: Any) -> bool:
    return isinstance(x, RowTerm)


_COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY: Final = (
    "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "erf", "tanh",
    "sigmoid", "sign", "floor", "ceil", "trunc", "isnan",
)  # fmt: skip

LOWERINGS: Final[Mapping[str, Callable[..., RowTerm]]] = MappingProxyType(
    {
        **{name: _unary(name) for name in _UNARY},
        **{name: _binary(name) for name in (*_COMPARISONS, "mul", "maximum", "minimum")},
        "logical_and": _binary("and"), "logical_or": _binary("or"), "logical_not": _unary("not"),
        "add": _add, "sub": _sub, "rsub": lambda c, input, other, alpha=1: _sub(c, other, input, alpha),
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
        "where": _where, "masked_fill": _masked_fill, "addcmul": _addcmul, "addcdiv": _addcdiv, "lerp": _lerp,
        "clone": _same, "contiguous": _same, "positive": _same,
        **REDUCING,
    }
)  # fmt: skip
