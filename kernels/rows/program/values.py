"""Defines the values of a row program: FP32 numbers over rows x columns, computed from each other by primitives.

A value varies along rows, along columns, along both or neither; an operation on two values varies along whatever one of
them does (broadcasting), and a reduction removes the columns. Equal operations give the same object, so that common
subexpressions are shared. Values know nothing of memory: ``load`` names an operand by its number, and the shape of the
program (how many rows and columns, and where they lie) is the layout's business. A term is a value with the shape that
torch gives it: ops are lowered to operations on terms (``lowering``), which broadcast as torch does.

============================  =====================================================================================
``load``                      operand ``attribute``; a float in FP32, an integer or a bool as it is
``keep``                      dropout: True where an element stays; ``attribute`` is (seed number, p)
``round``                     to the dtype ``attribute`` and back to FP32
``float``                     an integer or bool as FP32
``sum``, ``max``, ``min``     over the columns of a row
``where``                     (condition, a, b)
``eq`` ... ``ge``, ``and``,   bool
``or``, ``not``, ``isnan``    (comparisons of integers are exact)
the rest                      arithmetic on floats, as named
============================  =====================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeGuard

import torch

Kind = Literal["float", "integer", "bool"]


REDUCTIONS: Final = frozenset({"sum", "max", "min"})
#: Operations whose result is true or false.
BOOLEAN: Final = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "isnan", "keep"})
COMPARISONS: Final = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
#: Operations that jump, or whose derivative does: the last bit of an operand may choose between two results.
DECIDING: Final = COMPARISONS | {"max", "min", "maximum", "minimum", "sign", "floor", "ceil", "trunc"}
_LOGICAL: Final = frozenset({"and", "or", "not"})


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Result of one primitive. ``number``: its position in the order of construction: arguments precede results."""

    op: str
    args: tuple[Value | float, ...]
    rows: bool
    columns: bool
    kind: Kind
    attribute: Any = None
    number: int = 0

    def __repr__(self) -> str:
        inner = ", ".join(f"%{arg.number}" if isinstance(arg, Value) else f"{arg:g}" for arg in self.args)
        return f"%{self.number} = {self.op}({inner})"


Operand: TypeAlias = Value | float


@dataclass(slots=True)
class Builder:
    """Builder that returns the same object for equal values.

    ``columns``: how many columns the program has. A mean divides by it, and the sum of a value that is the same in all
    columns multiplies by it.
    """

    columns: int
    _known: dict[Any, Value] = field(default_factory=dict)

    @property
    def made(self) -> int:
        """Number of values so far."""
        return len(self._known)

    def load(self, operand: int, dtype: torch.dtype, rows: bool, columns: bool) -> Value:
        """Return the value of a tensor operand that has ``dtype`` in memory."""
        kind: Kind = "bool" if dtype is torch.bool else "float" if dtype.is_floating_point else "integer"
        return self._make("load", (), operand, kind, (rows, columns))

    def keep(self, seed: int, p: float) -> Value:
        """Return the dropout mask of the seed with this number: True where an element is kept."""
        return self._make("keep", (), (seed, p), "bool", (True, True))

    def round(self, x: Value, dtype: torch.dtype) -> Value:
        """Round ``x`` to ``dtype`` and back to FP32, as if it were stored and loaded."""
        if dtype is torch.float32 or (x.op == "round" and x.attribute is dtype):
            return x
        return self._make("round", (self.float(x),), dtype, "float")

    def float(self, x: Operand) -> Operand:
        """Convert an integer or bool to FP32; return floats as they are."""
        return self._make("float", (x,), None, "float") if isinstance(x, Value) and x.kind != "float" else x

    def truth(self, x: Operand) -> Operand:
        """Return ``x != 0`` (True for NaN), or ``x`` itself if it is a bool."""
        return x if isinstance(x, Value) and x.kind == "bool" else self("ne", x, 0.0)

    def stop(self, x: Value) -> Value:
        """Return ``x`` as a constant to the gradient."""
        return self._make("stop", (x,), None, x.kind)

    def __call__(self, op: str, *args: Operand) -> Value:
        """Apply ``op`` to the arguments, numbers and values, after converting them to the kind that it takes."""
        # As torch does: bools take part in arithmetic as 0 and 1, numbers in logic as "is not 0".
        if op in _LOGICAL:
            args = tuple(map(self.truth, args))
        elif op == "where":
            args = (self.truth(args[0]), self.float(args[1]), self.float(args[2]))
        elif op not in COMPARISONS or not _integers(args):
            args = tuple(map(self.float, args))
        simpler = self._simpler(op, args)
        if simpler is not None:
            return simpler
        # 1 + tanh(u), as gelu's tanh form has it, is 2 * sigmoid(2 * u): with all its digits where tanh is near -1, and
        # half the instructions, also in the backward.
        if op == "add" and 1.0 in args and _is(other := args[1] if args[0] == 1.0 else args[0], "tanh"):
            return self("mul", self("sigmoid", self("mul", other.args[0], 2.0)), 2.0)
        return self._make(op, args, None, "bool" if op in BOOLEAN else "float")

    def reduce(self, op: str, x: Operand) -> Operand:
        """Return the sum, maximum or minimum of each row."""
        if isinstance(x, Value) and x.columns:
            return self._make(op, (self.float(x),), None, "float")
        return self("mul", x, float(self.columns)) if op == "sum" else x  # the same number in every column

    def mean(self, x: Operand) -> Operand:
        """Return the mean of each row.

        Multiplied by 1 / n only for powers of two: a rounded 1 / n would show where an FMA subtracts the mean from x.
        """
        if not (isinstance(x, Value) and x.columns):
            return x
        count = float(max(self.columns, 1))
        exact = math.frexp(count)[0] == 0.5
        return self("mul", self.reduce("sum", x), 1.0 / count) if exact else self("div", self.reduce("sum", x), count)

    def _simpler(self, op: str, args: tuple[Operand, ...]) -> Value | None:
        """Simplify where that is exact for every value, NaN and signed zeros included; else return None."""
        if op == "mul" and 1.0 in args:
            other = args[1] if args[0] == 1.0 else args[0]
            return other if isinstance(other, Value) else None
        if op == "div" and args[1] == 1.0:
            return args[0] if isinstance(args[0], Value) else None
        if op == "neg" and isinstance(args[0], Value) and args[0].op == "neg":
            return args[0].args[0]  # type: ignore[return-value]
        return None

    def _make(
        self, op: str, args: tuple[Operand, ...], attribute: Any, kind: Kind, extent: tuple[bool, bool] | None = None
    ) -> Value:
        # Numbers by their text, which tells -0.0 from 0.0, and one nan equals another.
        key = (op, tuple(id(a) if isinstance(a, Value) else ("number", repr(a)) for a in args), attribute)
        known = self._known.get(key)
        if known is None:
            # A result varies along whatever one of its operands does; a reduction no longer along the columns.
            if extent is None:
                values = [a for a in args if isinstance(a, Value)]
                extent = (any(v.rows for v in values), op not in REDUCTIONS and any(v.columns for v in values))
            known = self._known[key] = Value(op, args, *extent, kind, attribute, len(self._known))
        return known


def _is(operand: Operand, op: str) -> TypeGuard[Value]:
    return isinstance(operand, Value) and operand.op == op


def _integers(args: tuple[Operand, ...]) -> bool:
    """Return whether all are integers: numbers that 32 bits hold, or values of integer tensors."""
    return all(
        arg.kind == "integer" if isinstance(arg, Value) else float(arg).is_integer() and abs(arg) < 2**31
        for arg in args
    )


def walk(roots: Iterator[Value] | list[Value], stop: Callable[[Value], bool] = lambda _: False) -> list[Value]:
    """Return the roots and the values they are computed from, arguments first; nothing beneath a stopped value."""
    found: dict[Value, None] = {}
    pending = [*roots]
    while pending:
        value = pending.pop()
        if value not in found:
            found[value] = None
            if not stop(value):
                pending += [a for a in value.args if isinstance(a, Value)]
    return sorted(found, key=lambda value: value.number)


class Declined(Exception):
    """Refusal of a region, a shape or a layout that row programs do not support; its message goes into the report."""


@dataclass(frozen=True, slots=True)
class RowTerm:
    """Value with the shape that torch gives it.

    ``columns_dropped``: a reduction without ``keepdim`` removed the columns' dimensions: the shape is that of the rows.
    """

    value: Operand
    shape: tuple[int, ...]
    columns_dropped: bool = False


@dataclass(frozen=True, slots=True)
class TermBuilder:
    """Builder of terms for the lowerings of ops: applies primitives with broadcasting, and reduces over columns.

    ``reduced``: how many trailing dimensions are the columns.
    """

    b: Builder
    reduced: int

    def __call__(self, op: str, *args: Any) -> RowTerm:
        terms = [a for a in args if isinstance(a, RowTerm)]
        # Mostly all are equal: torch is asked only where they are not.
        shapes = [a.shape for a in terms]
        shape = shapes[0] if all(s == shapes[0] for s in shapes) else tuple(torch.broadcast_shapes(*shapes))
        dropped = any(a.columns_dropped and a.shape for a in terms)
        # The last dimensions of a term whose columns were dropped are rows: torch lines those up with another tensor's
        # columns, and a kernel would with its rows.
        if dropped and not all(a.columns_dropped or not a.shape for a in terms):
            raise Declined("a reduction without its dimensions meets another tensor")
        values = [a.value if isinstance(a, RowTerm) else float(a) for a in args]
        return RowTerm(self.b(op, *values), shape, dropped)

    def reduce(self, op: str, x: RowTerm, keepdim: bool = False) -> RowTerm:
        """Return the sum, mean, maximum or minimum over the columns.

        That these are the dimensions which the call names is known by then (``forward.reduced_dimensions``).
        """
        rank = len(x.shape)
        if rank < self.reduced or x.columns_dropped:
            raise Declined("a reduction of what has no columns any more")
        # Over one element a reduction is the value itself.
        value = x.value
        if math.prod(x.shape[rank - self.reduced :]) != 1:
            value = self.b.mean(value) if op == "mean" else self.b.reduce(op, value)
        kept = x.shape[: rank - self.reduced]
        return RowTerm(value, kept + (1,) * self.reduced) if keepdim else RowTerm(value, kept, columns_dropped=True)

    def drop(self, x: RowTerm) -> RowTerm:
        """Return the term without the reduced dimensions, which have size 1."""
        return RowTerm(x.value, x.shape[: len(x.shape) - self.reduced], columns_dropped=True)

    def stop(self, x: RowTerm) -> RowTerm:
        """Return the term as a constant to the gradient, as ``detach`` does."""
        return RowTerm(self.b.stop(x.value) if isinstance(x.value, Value) else x.value, x.shape, x.columns_dropped)
