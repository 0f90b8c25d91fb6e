"""Defines terms, values of a row program with the shapes of torch, and the builder that broadcasts them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fxprec.kernels.rows.program.values import Builder, Operand, Value


class Declined(Exception):
    """Refusal of a region, a shape or a layout that row programs do not support; its message goes into the report."""


@dataclass(frozen=True, slots=True)
class RowTerm:
    """Value with the shape that torch gives it.

    ``dropped``: a reduction without ``keepdim`` removed the columns' dimensions, so that the shape is that of the rows.
    """

    value: Operand
    shape: tuple[int, ...]
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class TermBuilder:
    """Builder of terms for the lowerings of ops: applies primitives with broadcasting, and reduces over columns."""

    b: Builder
    reduced: int

    def __call__(self, op: str, *args: Any) -> RowTerm:
        terms = [a for a in args if isinstance(a, RowTerm)]
        shapes = [a.shape for a in terms]
        shape = shapes[0] if all(s == shapes[0] for s in shapes) else tuple(torch.broadcast_shapes(*shapes))
        dropped = any(a.dropped and a.shape for a in terms)
        # Its last dimensions are rows, and would be broadcast against another tensor's columns.
        if dropped and not all(a.dropped or not a.shape for a in terms):
            raise Declined("a reduction without its dimensions meets another tensor")
        values = [a.value if isinstance(a, RowTerm) else float(a) for a in args]
        return RowTerm(self.b(op, *values), shape, dropped)

    def reduce(self, op: str, x: RowTerm, dim: Any, keepdim: bool = False) -> RowTerm:
        """Return the sum, mean, maximum or minimum over the columns."""
        rank, dims = len(x.shape), self._dims(x, dim)
        if len(dims) != self.reduced or rank < len(dims) or x.dropped:
            raise Declined(f"a reduction over other dimensions than the last {self.reduced}")
        value = x.value
        if math.prod(x.shape[rank - self.reduced :]) != 1:
            value = self.b.mean(value) if op == "mean" else self.b.reduce(op, value)
        kept = x.shape[: rank - self.reduced]
        return RowTerm(value, kept + (1,) * self.reduced) if keepdim else RowTerm(value, kept, dropped=True)

    def drop(self, x: RowTerm) -> RowTerm:
        """Return the term without the reduced dimensions, which have size 1."""
        return RowTerm(x.value, x.shape[: len(x.shape) - self.reduced], dropped=True)

    def last(self, x: RowTerm, dim: Any) -> None:
        """Raise ``Declined`` unless ``dim`` is the dimension of the columns."""
        if len(self._dims(x, dim)) != self.reduced:
            raise Declined("an operation along another dimension than the last")

    def _dims(self, x: RowTerm, dim: Any) -> list[int]:
        rank = len(x.shape)
        # Counted from the end: tensors of a region differ in rank.
        dims = [*range(-rank, 0)] if dim is None else [dim] if isinstance(dim, int) else [*dim]
        dims = sorted(d - rank if d >= 0 else d for d in dims)
        if not dims or dims != [*range(-len(dims), 0)]:
            raise Declined(f"a reduction over dimensions {dim} of {rank}: not the last ones")
        return dims

    def stop(self, x: RowTerm) -> RowTerm:
        """Return the term as a constant to the gradient, as ``detach`` does."""
        return RowTerm(self.b.stop(x.value) if isinstance(x.value, Value) else x.value, x.shape, x.dropped)
