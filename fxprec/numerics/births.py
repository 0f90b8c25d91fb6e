"""Judge the results of one op: where what is not finite in them came to be, and which of it a mask means.

A value's birth is the op that made it of finite values, or what brought it along (``Source``). An op runs again in
float64 on what it read: finite there, it overflowed; not finite there either, the op has no such value.

A mask of -1e9, or of a dtype's lowest, is -inf in float16, or becomes that once a score is added, where the reference
has a finite value: that is meant, and no overflow (``Masks``). An element is one where

- a number in the model's code fills it (``masked_fill(mask, -1e9)``), or multiplies a 0 or a 1 (``(1 - mask) * -1e9``);
- it came in so with a buffer or an input: one negative number beside others that are small;
- it is the lowest number of a dtype;
- an op made it of one of these, and it still is as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from fxprec.tape.exact_ops import draws
from fxprec.tape.memory import Memory, TensorPlace
from fxprec.tape.operation import Operation, OpOrigin
from fxprec.torch_internals import storage_key, tree_leaves, tree_unflatten

Kind = Literal["overflow", "invalid", "underflow", "came in", "meant"]

#: Ops that do not read what stood where they write.
_OVERWRITES: Final = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})
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


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of a value that was there before the run: an input, a weight, a constant.

    Attributes:
        phase: "input", "weight" or "buffer"; "loss": the gradients that the backward began with.
        name: ``inputs[0]``, or a path in the model.
        master: of a low copy of a weight, the weight.
    """

    phase: Literal["input", "weight", "buffer", "loss"]
    name: str
    master: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Swallow:
    """An op that read inf or nan and gave finite values.

    Attributes:
        birth: of what it read.
        origin: whom the op belongs to.
        name: of its node; outside of the graphs its own, ``div``.
        example: what it gave beside what the reference gives; "" where nobody compared.
    """

    birth: Birth
    origin: OpOrigin
    name: str
    example: str = ""


@dataclass(frozen=True, slots=True)
class Birth:
    """Place where a value came to be that is not finite, or was flushed to 0.

    Attributes:
        number: how many ops ran before it.
        origin: whom the op belongs to.
        op: ``aten::div``; "" where it came in.
        kind: "overflow": in a wider dtype the op gives a finite value. "invalid": nor does that. "underflow": it gives
            0 where a wider dtype gives something. "came in": no op made it. "meant": a constant inf, as for a mask.
        dtype: of the value.
        magnitude: of the largest value in a wider dtype that is not one in the dtype.
        example: the op on the numbers of the first bad element: ``div(0, 0) = nan``.
        source: what brought it, where it came in.
        share: of the elements, those that are so.
        flushed: where an input lost its values to 0 before.
        index: of the first of those elements.
        masked: it is a row that a mask hides as a whole: -inf, all of it, before a softmax.
        remarks: what else is known, in sentences.
    """

    number: int
    origin: OpOrigin
    op: str
    kind: Kind
    dtype: torch.dtype
    magnitude: float
    example: str
    share: float
    source: Source | None = None
    flushed: Birth | None = None
    index: tuple[int, ...] = ()
    masked: bool = False
    remarks: tuple[str, ...] = ()


class OpCall:
    """Call of one op, with its arguments as they were before it.

    Args:
        leaves: of its arguments. given: the same, with copies of what it wrote to, as it was.
        written: ids of the leaves that it wrote to.
    """

    def __init__(
        self, function: Any, leaves: Sequence[Any], given: Sequence[Any], spec: Any, origin: OpOrigin, number: int,
        written: set[int], output: Any,
    ) -> None:  # fmt: skip
        self.function, self.given, self.spec, self.origin, self.number = function, given, spec, origin, number
        self.name: str = function.name().partition(".")[0]
        self.names_infinity = any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves)
        self.reads_a_mask = any(isinstance(leaf, Tensor) and leaf.dtype is torch.bool for leaf in leaves)
        self.storages = {storage_key(leaf) for leaf in leaves if is_float(leaf)}
        self._results = [result for result in tree_leaves(output) if isinstance(result, Tensor)]
        self._written = tuple(number for number, leaf in enumerate(leaves) if id(leaf) in written)
        self.leaves = leaves
        self._found: list[Any] | None = None

    def ends(self, read: Sequence[tuple[Tensor, Birth]], made: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
        """Tell whether something finite came of what is not: all of it, the indices of it, or some elements.

        Args:
            read: what it read that is not finite.
            made: of its float ``results`` those that are no views.
        """
        if not made and results:
            return False
        if any(not is_float(result) for result in self._results) or all(map(is_finite, results)):
            return True
        elements = [(value, result) for value, _ in read for result in made if value.shape == result.shape]
        if torch.Tag.pointwise not in self.function.tags:
            return False
        return any(bool((~value.isfinite() & result.isfinite()).any()) for value, result in elements)

    def overwrites(self, value: Tensor) -> bool:
        """Tell whether one of ``given`` stood where the op wrote without reading it."""
        # An op that overwrites has not read what stood there, whatever that was.
        written = (self.given[number] for number in self._written)
        unread = self.name in _OVERWRITES or self.function.name().endswith("out")
        return unread and any(value is each for each in written)

    def birth(self, result: Tensor, flushed: Mapping[int, Birth] | None, bad: Tensor | None = None) -> Birth:
        """Return the birth of what is not finite in the result; ``bad``: of these elements alone."""
        bad = ~result.isfinite() if bad is None else bad
        # Finite in float64 means that range is all that lacks; not even finite there means that the op has no such
        # value.
        wide = self.wide(result)
        grows = self.name.startswith(("aten::exp", "aten::sinh", "aten::cosh"))  # beyond float64, and has no pole
        beyond = None if wide is None else bad & (wide.isfinite() | (wide.isinf() & grows))
        overflows = wide is not None and beyond is not None and bool(beyond.any())
        magnitude = float(wide[beyond].abs().max()) if overflows else math.nan  # type: ignore[index]
        zeros = [] if overflows else [flushed[key] for key in self.storages if flushed and key in flushed]
        return Birth(
            self.number, self.origin, self.name, "overflow" if overflows else "invalid", result.dtype, magnitude,
            self._example(result, bad), share_of(bad), None, zeros[0] if zeros else None, first_of(bad),
        )  # fmt: skip

    def flush(self, result: Tensor) -> Birth | None:
        """Return where the op itself gives 0 for a value that is none in float64; None where it does not."""
        wide = self.wide(result)
        if wide is None:
            return None
        # An op that squares within flushes what is less than the root of the smallest number. A larger value became 0
        # as a difference of what was rounded (scores of a saturated softmax), which no scale cures.
        info = torch.finfo(result.dtype)
        lost = (result == 0) & (wide != 0) & (wide.abs() < math.sqrt(info.smallest_normal * info.eps))
        if not bool(lost.any()):
            return None
        magnitude = float(wide[lost].abs().max())
        return Birth(
            self.number, self.origin, self.name, "underflow", result.dtype, magnitude, self._example(result, lost),
            share_of(lost), index=first_of(lost),
        )  # fmt: skip

    def wide(self, result: Tensor) -> Tensor | None:
        """Return the result in float64, of the same inputs; None where it cannot be computed."""
        if self._found is None:
            self._found = self._run()
        for own, wide in zip([*self._results, *(self.leaves[n] for n in self._written)], self._found, strict=False):
            if own is result and isinstance(wide, Tensor) and wide.shape == result.shape:
                return wide
        return None

    def _run(self) -> list[Any]:
        # Another draw of random numbers would not be comparable.
        if draws(self.function, *tree_unflatten([*self.given], self.spec)):
            return []
        memory = Memory(torch.float64)
        places = tuple(memory.place(leaf) if _is_plain(leaf) else leaf for leaf in self.given)
        if any(isinstance(leaf, Tensor) for leaf in places):
            return []
        outputs = tuple(memory.place(result) for result in self._results if _is_plain(result))
        fresh = tuple(range(len(self._results)))
        operation = Operation(self.function, places, self.spec, fresh, self._written, outputs, (), self.origin)

        def read(place: TensorPlace, written: bool) -> Tensor:
            value = memory.low(place)
            return value.to(memory.exact(place).dtype, copy=True) if place.is_float else value.clone()

        try:
            with torch.no_grad():
                return operation.run(read, torch.float64, operation.drawn(memory.low))
        except Exception:  # no kernel for float64: nobody can say
            return []

    def _example(self, result: Tensor, bad: Tensor) -> str:
        """Show an elementwise op on the numbers of its first bad element: ``div(0, 0) = nan``; "" for other ops."""
        if torch.Tag.pointwise not in self.function.tags:
            return ""
        index = first_of(bad)
        shown = []
        for leaf in self.given:
            if isinstance(leaf, Tensor):
                try:
                    shown.append(f"{leaf.expand(result.shape)[index].item():.4g}")
                except RuntimeError:  # no elementwise op
                    return ""
            elif isinstance(leaf, bool) or not isinstance(leaf, int | float):
                continue
            else:
                shown.append(f"{leaf:.4g}")
        return f"{self.name.partition('::')[2].rstrip('_')}({', '.join(shown)}) = {result[index].item():.4g}"


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def is_float(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
        and value.numel() > 0
        and value.device.type != "meta"
    )


def dense(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that may be sparse."""
    return tensor if tensor.layout is torch.strided else tensor.coalesce().values()


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, also of a sparse tensor."""
    return bool(dense(tensor).isfinite().all())


def first_of(bad: Tensor) -> tuple[int, ...]:
    """Return the index of the first element that is set; () where none is."""
    places = bad.nonzero()
    return tuple(int(each) for each in places[0]) if len(places) else ()


def share_of(bad: Tensor) -> float:
    return int(bad.sum()) / bad.numel()


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
    # A mask is one number for all that it hides, beside values of the usual size.
    rest = values[~large]
    same = bool((values[large] == values[large][0]).all()) and bool((rest.abs() < _LEAST).all())
    return large if same and (constant or count > 1 or not bool(rest.any())) else _is_lowest(values)


def is_fault(low: Tensor, exact: Tensor, marks: Tensor | None) -> Tensor:
    """Return the elements that are not finite, where FP32 could have the reference's value, and no mask means it."""
    # What FP32 cannot hold either is no fault of a low dtype.
    largest = math.inf if not exact.dtype.is_floating_point else torch.finfo(torch.float32).max
    wrong = ~low.isfinite() & (exact.abs() <= largest) & exact.isfinite()
    return wrong if marks is None else wrong & ~marks
