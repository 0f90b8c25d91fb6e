"""Tell which elements of a run are large because the model says so: masks of -1e9, or of a dtype's lowest.

In float16 such a mask is -inf, or becomes that once a score is added, where the reference has a finite value: that is
meant, and no overflow. An element is one where

- a number in the model's code fills it (``masked_fill(mask, -1e9)``), or multiplies a 0 or a 1 (``(1 - mask) * -1e9``);
- it came in so with a buffer or an input: one negative number beside others that are small;
- it is the lowest number of a dtype;
- an op made it of one of these, and it still is as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from fxprec.numerics.births import OpCall
from fxprec.torch_internals import storage_key

#: Smaller ones are no mask's: no sum of a few of them overflows in float16.
_LEAST: Final = 1e4
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Ops that write a number of the model's as it is.
_FILLS: Final = frozenset({
    "aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::full", "aten::full_like", "aten::new_full",
    "aten::fill", "aten::fill_", "aten::scalar_tensor", "aten::scatter", "aten::scatter_", "aten::index_fill",
    "aten::index_fill_", "aten::constant_pad_nd", "aten::clamp", "aten::clamp_", "aten::clamp_min", "aten::clamp_max",
})  # fmt: skip
_SCALINGS: Final = frozenset({"aten::mul", "aten::mul_", "aten::div", "aten::div_"})
#: Element by element, beside what torch marks as such.
_COPIES: Final = frozenset({"aten::_to_copy", "aten::clone", "aten::copy", "aten::copy_"})


class Masks:
    """Elements of a run that belong to masks, by storage.

    Args:
        is_constant: tells whether a tensor that no op made is the model's own, and no data: a buffer, say.
    """

    def __init__(self, is_constant: Callable[[Tensor], bool]) -> None:
        self._is_constant = is_constant
        self._known: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return which elements of a tensor belong to a mask; None where none does."""
        flat = self._known.get(storage_key(tensor))
        return None if flat is None else flat.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def note(self, call: OpCall, result: Tensor, exact: Tensor, read: Callable[[Tensor], Tensor]) -> None:
        """Mark what an op wrote.

        Args:
            call: that ran.
            result: a tensor that it wrote, in the run; ``exact``: in the reference.
            read: gives the reference's values of a tensor that the op read.
        """
        self._made.add(storage_key(result))
        large = exact.abs() >= _LEAST if exact.is_floating_point() else torch.zeros((), dtype=torch.bool)
        marked = torch.zeros_like(large)
        if not call.origin.backward and bool(large.any()):
            marked = large & self._marked(call, exact, read)
        known = self.of(result)
        if known is not None:
            known.copy_(marked)
        # Marks are kept a storage, not a tensor: views of a mask, made later, see them too.
        elif bool(marked.any()):
            size = result.untyped_storage().nbytes() // result.element_size()
            self._known[storage_key(result)] = torch.zeros(size, dtype=torch.bool, device=result.device)
            self.of(result).copy_(marked)  # type: ignore[union-attr]

    def _marked(self, call: OpCall, exact: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        found = _is_lowest(exact)
        numbers = [leaf for leaf in call.given if isinstance(leaf, float | int) and abs(leaf) >= _LEAST]
        for number in numbers if call.name in _FILLS else ():
            found = found | (exact == number)
        elementwise = torch.Tag.pointwise in call.function.tags or call.name in _COPIES
        for low in call.leaves:
            if not isinstance(low, Tensor) or low.layout is not torch.strided or low.is_complex():
                continue
            own = read(low)
            # ``(1 - mask) * -1e9``: a large number scales nothing but zeros and ones.
            if numbers and call.name in _SCALINGS and bool(((own == 0) | (own.abs() == 1)).all()):
                return torch.ones_like(found)
            marks = self.of(low)
            if marks is None and storage_key(low) not in self._made and own.is_floating_point():
                marks = _came_in(own, self._is_constant(low))
            if marks is None or not bool(marks.any()):
                # Elementwise ops keep a mark in its place; through other ops a mask may come out anywhere.
                continue
            try:
                found = found | (marks.expand(exact.shape) if elementwise else True)
            except RuntimeError:  # of another shape: any of it may be
                found = torch.ones_like(found)
        return found


def _is_lowest(exact: Tensor) -> Tensor:
    found = torch.zeros_like(exact, dtype=torch.bool)
    for dtype in _FLOATS:
        found |= exact == torch.finfo(dtype).min
    return found


def _came_in(values: Tensor, constant: bool) -> Tensor:
    """Return the elements of a mask that was there before the run: one negative number, and the rest is small.

    A single outlier among data is none: the rest is 0, or there are several.
    """
    large = values <= -_LEAST
    count = int(large.sum())
    if count == 0:
        return large
    rest = values[~large]
    same = bool((values[large] == values[large][0]).all()) and bool((rest.abs() < _LEAST).all())
    return large if same and (constant or count > 1 or not bool(rest.any())) else _is_lowest(values)


def is_fault(low: Tensor, exact: Tensor, marks: Tensor | None) -> Tensor:
    """Return the elements that are not finite, where FP32 could have the reference's value, and no mask means it."""
    largest = math.inf if not exact.dtype.is_floating_point else torch.finfo(torch.float32).max
    wrong = ~low.isfinite() & (exact.abs() <= largest) & exact.isfinite()
    return wrong if marks is None else wrong & ~marks
