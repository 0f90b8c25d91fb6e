"""Terms: values with the shapes that tensors have in a region's graph, and a calculator that broadcasts them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fxprec.kernels.rows.program.values import Builder, Operand, Value


class Declined(Exception):
    """A region, a shape or a layout that row programs do not serve; says why, for the report."""


@dataclass(frozen=True, slots=True)
class Term:
    """A value as torch sees it. ``dropped``: a reduction took its last dimensions away: it lines up with rows alone."""

    value: Operand
    shape: tuple[int, ...]
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """What a lowering may use: a calculator on terms, with broadcasting."""

    b: Builder
    reduced: int

    def __call__(self, op: str, *args: Any) -> Term:
        terms = [a for a in args if isinstance(a, Term)]
        shapes = [a.shape for a in terms]
        shape = shapes[0] if all(s == shapes[0] for s in shapes) else tuple(torch.broadcast_shapes(*shapes))
        dropped = any(a.dropped and a.shape for a in terms)
        if dropped and not all(a.dropped or not a.shape for a in terms):
            raise Declined("a reduction without its dimensions meets another tensor")
        values = [a.value if isinstance(a, Term) else float(a) for a in args]
        return Term(self.b(op, *values), shape, dropped)

    def reduce(self, op: str, x: Term, dim: Any, keepdim: bool = False) -> Term:
        """The sum, mean, maximum or minimum over the columns."""
        rank, dims = len(x.shape), self._dims(x, dim)
        if len(dims) != self.reduced or rank < len(dims) or x.dropped:
            raise Declined(f"a reduction over other dimensions than the last {self.reduced}")
        value = x.value
        if math.prod(x.shape[rank - self.reduced :]) != 1:
            value = self.b.mean(value) if op == "mean" else self.b.reduce(op, value)
        kept = x.shape[: rank - self.reduced]
        return Term(value, kept + (1,) * self.reduced) if keepdim else Term(value, kept, dropped=True)

    def drop(self, x: Term) -> Term:
        """Without the reduced dimensions, which have size 1."""
        return Term(x.value, x.shape[: len(x.shape) - self.reduced], dropped=True)

    def last(self, x: Term, dim: Any) -> None:
        """Decline unless ``dim`` is what the rows run along."""
        if len(self._dims(x, dim)) != self.reduced:
            raise Declined("an operation along another dimension than the last")

    def _dims(self, x: Term, dim: Any) -> list[int]:
        rank = len(x.shape)
        dims = [*range(-rank, 0)] if dim is None else [dim] if isinstance(dim, int) else [*dim]
        dims = sorted(d - rank if d >= 0 else d for d in dims)
        if not dims or dims != [*range(-len(dims), 0)]:
            raise Declined(f"a reduction over dimensions {dim} of {rank}: not the last ones")
        return dims

    def stop(self, x: Term) -> Term:
        return Term(self.b.stop(x.value) if isinstance(x.value, Value) else x.value, x.shape, x.dropped)
