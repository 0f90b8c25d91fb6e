"""Reverse-mode derivatives of row programs: each primitive's gradient, in the primitives themselves.

Every rule is linear in the gradient. So the sum over rows, which the gradient of a bias or of a norm's weight needs,
can wait until the very end, where it becomes a column partial; only sums over columns happen on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from fxprec.kernels.rows.program.values import Builder, Operand, Value, walk

Rule = Callable[[Builder, Value, Operand], tuple[Operand | None, ...]]


def gradients(
    b: Builder, outputs: Sequence[Operand], cotangents: Sequence[Operand | None], wanted: Sequence[Value]
) -> list[Operand | None]:
    """Return the gradients of the outputs with respect to the wanted values (loads); None where nothing depends on one.

    A gradient varies along the columns only if its value does. Along rows it may vary although its value does not.
    """
    roots = [output for output in outputs if isinstance(output, Value)]
    needed = _leading_to(roots, wanted)
    found: dict[Value, Operand] = {}

    def add(value: Operand, gradient: Operand | None, wide: bool) -> None:
        """Add to the gradient of a value; ``wide``: one gradient a column, even if all columns have the same."""
        if gradient is None or not isinstance(value, Value) or value not in needed:
            return
        # A value that is the same in all columns gets the sum of their gradients.
        if wide and not value.columns:
            gradient = b.reduce("sum", gradient)
        found[value] = b("add", found[value], gradient) if value in found else gradient

    for output, cotangent in zip(outputs, cotangents, strict=True):
        add(output, cotangent, isinstance(cotangent, Value) and cotangent.columns)
    # In reverse order of construction: all uses of a value have added to its gradient before it is passed on.
    for value in reversed(walk(roots)):
        if value in found and value.op in _RULES:
            for argument, gradient in zip(value.args, _RULES[value.op](b, value, found[value]), strict=True):
                add(argument, gradient, value.columns)
    return [found.get(value) for value in wanted]


def _leading_to(roots: list[Value], wanted: Sequence[Value]) -> set[Value]:
    """Return the values that gradients pass on their way from the roots to the wanted values."""
    leading = set(wanted)
    for value in walk(roots):
        if value.op in _RULES and any(argument in leading for argument in value.args if isinstance(argument, Value)):
            leading.add(value)
    return leading


def _ties(b: Builder, v: Value, g: Operand) -> tuple[Operand, Operand]:
    """Return the gradients of a maximum or minimum: as torch, equal operands take half each, NaN gives both all."""
    x, y = v.args
    loses = "lt" if v.op == "maximum" else "gt"
    shared = b("where", b("eq", x, y), b("mul", g, 0.5), g)
    return b("where", b(loses, x, y), 0.0, shared), b("where", b(loses, y, x), 0.0, shared)


def _extreme(b: Builder, v: Value, g: Operand) -> tuple[Operand]:
    """Return the gradient of a row's maximum or minimum, shared, as in torch's amax, by all columns that equal it."""
    hit = b("eq", v.args[0], v)
    return (b("where", hit, b("div", g, b.reduce("sum", b("float", hit))), 0.0),)


_RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "add": lambda b, v, g: (g, g),
        "sub": lambda b, v, g: (g, b("neg", g)),
        "mul": lambda b, v, g: (b("mul", g, v.args[1]), b("mul", g, v.args[0])),
        "div": lambda b, v, g: (b("div", g, v.args[1]), b("neg", b("div", b("mul", g, v), v.args[1]))),
        "neg": lambda b, v, g: (b("neg", g),),
        "abs": lambda b, v, g: (b("mul", g, b("sign", v.args[0])),),
        "exp": lambda b, v, g: (b("mul", g, v),),
        "exp2": lambda b, v, g: (b("mul", g, b("mul", v, math.log(2.0))),),
        "expm1": lambda b, v, g: (b("mul", g, b("add", v, 1.0)),),
        "log": lambda b, v, g: (b("div", g, v.args[0]),),
        "log2": lambda b, v, g: (b("div", g, b("mul", v.args[0], math.log(2.0))),),
        "log1p": lambda b, v, g: (b("div", g, b("add", v.args[0], 1.0)),),
        "sqrt": lambda b, v, g: (b("div", g, b("mul", v, 2.0)),),
        "rsqrt": lambda b, v, g: (b("mul", g, b("mul", b("mul", v, b("mul", v, v)), -0.5)),),
        "erf": lambda b, v, g: (
            b("mul", g, b("mul", b("exp", b("neg", b("mul", v.args[0], v.args[0]))), 2.0 / math.sqrt(math.pi))),
        ),
        "tanh": lambda b, v, g: (b("mul", g, b("sub", 1.0, b("mul", v, v))),),
        "sigmoid": lambda b, v, g: (b("mul", g, b("mul", v, b("sub", 1.0, v))),),
        "maximum": _ties,
        "minimum": _ties,
        "where": lambda b, v, g: (None, b("where", v.args[0], g, 0.0), b("where", v.args[0], 0.0, g)),
        "round": lambda b, v, g: (g,),
        "sum": lambda b, v, g: (g,),
        "max": _extreme,
        "min": _extreme,
    }
)
