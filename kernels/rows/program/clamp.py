"""Lowers clamps to row programs, with the gradient at the bounds that the installed torch gives.

At a bound torch 2.13 gives the input all of the gradient, as inside; from 2.14 on nothing where bounds are numbers, and
half where they are tensors, as ``maximum`` and ``minimum`` do. torch is asked, not its version.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from fxprec.kernels.rows.program.terms import RowTerm, TermBuilder


def clamp(c: TermBuilder, input: RowTerm, min: Any = None, max: Any = None) -> RowTerm:  # torch's names
    """Lower ``torch.clamp``, by numbers or by tensors. Where ``min > max`` the result is ``max``."""
    if isinstance(min, RowTerm) or isinstance(max, RowTerm):
        return _between(c, input, min, max) if min is not None and max is not None else _beyond(c, input, min, max)
    bounds = (("ge", min), ("le", max)) if _at_bound(False) == 1 else (("gt", min), ("lt", max))
    inside = [c(op, input, bound) for op, bound in bounds if bound is not None]
    held = c.stop(input)
    for op, bound in (("gt", max), ("lt", min), ("gt", max if min is not None else None)):
        if bound is not None:
            held = c("where", c(op, held, bound), bound, held)
    return c("where", inside[0] if len(inside) == 1 else c("and", *inside), input, held) if inside else input


def _beyond(c: TermBuilder, x: RowTerm, low: Any, high: Any) -> RowTerm:
    """Clamp by one bound that is a tensor."""
    bound, op, keeps, loses = (high, "minimum", "le", "gt") if low is None else (low, "maximum", "ge", "lt")
    either = c(op, x, bound)
    if _at_bound(True) != 1:
        return either
    # At the bound the input takes all of the gradient, which a plain minimum or maximum would halve.
    return c("where", c(keeps, x, bound), x, c("where", c(loses, x, bound), bound, c.stop(either)))


def _between(c: TermBuilder, x: RowTerm, low: Any, high: Any) -> RowTerm:
    """Clamp by two bounds, of which one is a tensor.

    NaN anywhere gives NaN. From torch 2.14 on a NaN input keeps its gradient.
    """
    either = c("minimum", c("maximum", x, low), high)
    if _at_bound(True) != 1:
        level = c("where", c("lt", x, low), low, c("where", c("gt", x, high), high, x))
        ordered = c("where", c("gt", low, high), high, c("where", c("eq", low, high), level, either))
        return c("where", c("isnan", x), x, ordered)
    inside = c("and", c("ge", x, low), c("le", x, high))
    below, crossed = c("and", c("lt", x, low), c("lt", low, high)), c("lt", high, low)
    above = c("or", c("gt", x, high), c("and", crossed, c("not", c("isnan", x))))
    outside = c("where", above, high, c("where", below, low, c.stop(either)))
    return c("where", inside, x, outside)


@functools.cache
def _at_bound(tensors: bool) -> float:
    """Return the share of the gradient (1, 0 or 0.5) that torch's clamp gives an input equal to its bound.

    A thread of its own asks torch: the caller's dispatch modes, hooks and inference mode are not active there.
    """
    found: list[float] = []

    def ask() -> None:
        x = torch.zeros(1, device="cpu", requires_grad=True)
        bounds: Any = (torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")) if tensors else (0.0, 1.0)
        found.extend(torch.autograd.grad(x.clamp(*bounds).sum(), x)[0].tolist())

    thread = threading.Thread(target=ask, name="fxprec asks torch")
    thread.start()
    thread.join()
    return found[0]
