"""Count values by their exponents, show a row for each value of a run, and advise a dtype and a loss scale by them.

Advice goes by what float16 would lose of values that FP32 can hold.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from fxprec.inspection.measured import Subject
from fxprec.inspection.text import Printed, RenderableType, as_json, layers_together, stacked, table, titled
from fxprec.passes.graph.text import dtype_name
from fxprec.scaling.scale import LARGEST_SCALE, SMALLEST_SCALE

#: Elements that are counted at a time: what that needs in memory is some bytes for each.
_AT_A_TIME: Final = 1 << 22
#: Not the dtypes that have several numbers in an element, or exponents alone.
_FLOATS: Final = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
_ZEROS, _NANS, _SATURATED, _OVERFLOWED, _FIRST = range(5)


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Counts of values of one dtype by their magnitudes.

    Attributes:
        exponents: e -> how many are at least 2**e and less than 2**(e + 1). Of float32 and bfloat16, -127 has all that
            are smaller than 2**-126; of float64, -1023 those smaller than 2**-1022.
        zeros, infinite, nans: how many are that, which have no exponent.
        saturated: how many are at the largest number of the dtype, or infinite.
        overflowed: how many are infinite although nothing infinite came into the op.
        smallest: magnitude of the smallest that is not 0; inf where there is none.
        largest: of the largest below the largest number of the dtype; 0 where there is none.
    """

    exponents: Mapping[int, int] = field(default_factory=dict)
    zeros: int = 0
    infinite: int = 0
    nans: int = 0
    saturated: int = 0
    overflowed: int = 0
    smallest: float = math.inf
    largest: float = 0.0

    @property
    def some(self) -> int:
        """Number of values that are neither 0 nor infinite nor nan."""
        return sum(self.exponents.values())

    @property
    def count(self) -> int:
        """Number of all values."""
        return self.some + self.zeros + self.infinite + self.nans

    def below(self, exponent: float) -> int:
        """Return how many are less than 2**exponent, and not 0; of a bucket that it divides none."""
        return sum(count for each, count in self.exponents.items() if each + 1 <= exponent)

    def __add__(self, other: Magnitudes) -> Magnitudes:
        exponents = Counter(self.exponents) + Counter(other.exponents)
        return Magnitudes(
            exponents=dict(sorted(exponents.items())),
            zeros=self.zeros + other.zeros,
            infinite=self.infinite + other.infinite,
            nans=self.nans + other.nans,
            saturated=self.saturated + other.saturated,
            overflowed=self.overflowed + other.overflowed,
            smallest=min(self.smallest, other.smallest),
            largest=max(self.largest, other.largest),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON: no smallest or largest is None."""
        return as_json(self) | {"largest": self.largest or None}


class _Layout(NamedTuple):
    """Bit layout of a float format: its integer dtype, fraction bits, number of exponents and their bias."""

    bits: torch.dtype
    fraction: int
    exponents: int
    bias: int


_FLOAT32: Final = _Layout(torch.int32, 23, 256, 127)
_FLOAT64: Final = _Layout(torch.int64, 52, 2048, 1023)


class Tally:
    """Running counts of values of one dtype on one device. Nothing waits for the device until ``read``."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._wide = torch.float64 if dtype is torch.float64 else torch.float32
        self._layout = _FLOAT64 if dtype is torch.float64 else _FLOAT32
        self._limit = torch.finfo(dtype).max
        self._counts = torch.zeros(_FIRST + self._layout.exponents, dtype=torch.int64, device=device)
        self._smallest = torch.full((), math.inf, dtype=self._wide, device=device)
        self._largest = torch.zeros((), dtype=self._wide, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    def add(self, values: Tensor, sound: Tensor | None = None) -> None:
        """Count values.

        Args:
            values: of any shape, in the dtype.
            sound: whether all that went into them was finite; None: it was not.
        """
        for part in values.detach().flatten().split(_AT_A_TIME):
            if len(part):
                self._add(part, sound)

    def _add(self, values: Tensor, sound: Tensor | None) -> None:
        # Exponents are read from the bits: log2 rounds near powers of two, and takes longer.
        size = values.to(self._wide).abs()
        exponents = (size.view(self._layout.bits) >> self._layout.fraction).to(torch.int64)
        # Not bincount, which waits for a GPU to learn the largest of them.
        self._counts.index_add_(0, exponents + _FIRST, self._one.expand(len(size)))
        self._counts[_ZEROS] += (size == 0).sum()
        self._counts[_NANS] += size.isnan().sum()
        self._counts[_SATURATED] += (size >= self._limit).sum()
        if sound is not None:
            self._counts[_OVERFLOWED] += size.isinf().sum() * sound.to(size.device)
        torch.minimum(self._smallest, torch.where(size > 0, size, math.inf).amin(), out=self._smallest)
        torch.maximum(self._largest, torch.where(size < self._limit, size, 0.0).amax(), out=self._largest)

    def merge(self, other: Tally) -> None:
        """Add what another one counted, on the same device."""
        self._counts += other._counts
        torch.minimum(self._smallest, other._smallest, out=self._smallest)
        torch.maximum(self._largest, other._largest, out=self._largest)

    @staticmethod
    def read(tallies: Sequence[Tally]) -> list[Magnitudes]:
        """Return what they counted, with one wait a device."""
        # One copy to the host for each device: a wait for every tally would take longer than the counting.
        by_device: dict[Any, list[int]] = defaultdict(list)
        for number, tally in enumerate(tallies):
            by_device[tally._counts.device, tally._wide].append(number)
        found: dict[int, Magnitudes] = {}
        for numbers in by_device.values():
            counts = torch.stack([tallies[number]._counts for number in numbers]).tolist()
            ends = torch.stack([e for n in numbers for e in (tallies[n]._smallest, tallies[n]._largest)]).tolist()
            for position, number in enumerate(numbers):
                smallest, largest = ends[2 * position : 2 * position + 2]
                zeros, nans, saturated, overflowed, *exponents = counts[position]
                infinite = exponents.pop() - nans  # the last value of the bits, which no number has
                # Zeros have the exponent of subnormal numbers, and are counted apart.
                exponents[0] -= zeros
                known = {each - tallies[number]._layout.bias: count for each, count in enumerate(exponents) if count}
                found[number] = Magnitudes(known, zeros, infinite, nans, saturated, overflowed, smallest, largest)
        return [found[number] for number in range(len(tallies))]


def can_count(value: object) -> bool:
    """Return whether a value is a dense tensor of floats, in a dtype that can be counted."""
    return (
        isinstance(value, Tensor)
        and (value.dtype in _FLOATS or value.is_complex())
        and value.layout is torch.strided
        and value.device.type != "meta"
    )


def as_floats(tensor: Tensor) -> Tensor:
    """Return a tensor as real numbers: of complex ones their parts."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all values are finite, as a flag on their device."""
    values = as_floats(tensor)
    return (values.float() if values.element_size() == 1 else values).abs().amax() < math.inf


#: Rows that are printed.
_SHOWN: Final = 10
#: The smallest values of a row may be so many of it, before ``Range.margin`` counts from them.
_FEW: Final = 0.01

_F16: Final = torch.finfo(torch.float16)
#: Bits that the largest safe scale leaves to the largest gradient.
_HEADROOM: Final = 2
#: Bits that the largest value of the forward must have left in float16: training moves it.
_ROOM: Final = 1
#: Of the gradients so many more may become 0 at a useful scale than at the largest safe one.
_MORE: Final = 0.001
#: Of all gradients so many may become 0 in float16.
_FLUSHED: Final = 0.01
#: Where this share of one value, or of one parameter's gradient, becomes 0, it is lost.
_LOST: Final = 0.5


@dataclass(frozen=True, slots=True)
class Range:
    """Magnitudes of the values of one place.

    Attributes:
        node: name of the node; path of the weight; name of an op that runs outside of the graphs.
        kind: "node", "weight" (forward: its low copy, backward: its gradient as the optimizer gets it) or "outside".
        graph: position of its graph among ``fxprec.graphs(model)``; -1 outside of them.
        phase: "forward": what the node gives. "backward": all that its backward computes, gradients of its inputs in
            the main; scaled, as they are.
        module: path of the module.
        op: canonical op; "shadow" or "gradient" of a weight.
        dtype: of the values, "float16".
        source: ``model.py:12``.
        region: the fused region whose kernel computes it otherwise, if not "": here its nodes ran op by op.
        values: the histogram.
        wide: that of the same place where the model runs in bfloat16, which has FP32's exponents: known of a float16
            model where the place has the same name there.
    """

    node: str
    kind: Literal["node", "weight", "outside"]
    graph: int
    phase: Literal["forward", "backward"]
    module: str
    op: str
    dtype: str
    source: str
    region: str
    values: Magnitudes
    wide: Magnitudes | None = None

    @property
    def zeros(self) -> float:
        """The share of exact zeros."""
        return self.values.zeros / self.values.count

    @property
    def subnormal(self) -> float:
        """The share of subnormal numbers, which have fewer bits the smaller they are."""
        return self.values.below(math.log2(self._info.smallest_normal)) / self.values.count

    @property
    def saturated(self) -> float:
        """The share at the dtype's largest number, or infinite. Masks are, and are meant to be."""
        return self.values.saturated / self.values.count

    @property
    def overflowed(self) -> float:
        """The share that is infinite although nothing infinite came into the op."""
        return self.values.overflowed / self.values.count

    @property
    def flushed(self) -> float | None:
        """The share that is 0 in this run and is none in bfloat16, of what is none there; None where nobody knows.

        It counts zeros here and there: a value that came out as 0 in bfloat16 alone hides one that did so here.
        """
        if self.wide is None or not (some := self.wide.count - self.wide.zeros):
            return None
        return max(0, self.values.zeros - self.wide.zeros) / some

    @property
    def headroom(self) -> float:
        """Bits between the largest value and the dtype's largest number; 0 where something overflowed, inf of zeros."""
        if self.values.overflowed:
            return 0.0
        return math.log2(self._info.max) - math.log2(self.values.largest) if self.values.largest else math.inf

    @property
    def footroom(self) -> float:
        """Bits between the smallest value that is not 0 and the dtype's smallest number; inf of zeros."""
        smallest = self._info.smallest_normal * self._info.eps
        return math.log2(self.values.smallest) - math.log2(smallest) if self.values.some else math.inf

    @property
    def span(self) -> float:
        """Bits between the smallest and the largest value; 0 of zeros. float16 has 40 of them."""
        return math.log2(self.values.largest) - math.log2(self.values.smallest) if self.values.largest else 0.0

    @property
    def margin(self) -> float:
        """Bits of the tighter end: the headroom, or the footroom without the smallest hundredth."""
        if not self.values.some:
            return self.headroom
        # A few tiny values are no loss: the footroom is measured where the smallest hundredth ends.
        left = _FEW * self.values.some
        lowest = next(each for each in sorted(self.values.exponents) if self.values.below(each + 1) > left)
        return min(self.headroom, lowest - math.log2(self._info.smallest_normal * self._info.eps))

    def flushed_in(self, dtype: torch.dtype, scale: float = 1.0) -> float:
        """Return the share that would be 0 in a dtype, of what is none, if all were ``scale`` times as large.

        Of a value that is in this dtype already and has no ``wide`` it is a lower bound: what became 0 is not seen.
        """
        seen = self.wide or self.values
        return seen.below(_flushes_below(dtype, scale)) / seen.some if seen.some else 0.0

    @property
    def _info(self) -> torch.finfo:
        return torch.finfo(getattr(torch, self.dtype))

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON: what is infinite or unknown is None."""
        shares = ("zeros", "subnormal", "saturated", "overflowed", "flushed")
        bits = ("headroom", "footroom", "span", "margin")
        return as_json(self, *shares, *bits) | {"flushed_in_float16": self.flushed_in(torch.float16)}


def _flushes_below(dtype: torch.dtype, scale: float) -> float:
    """Return log2 of what rounds to 0, before it is multiplied by the scale: half of the smallest number."""
    info = torch.finfo(dtype)
    return math.log2(info.smallest_normal * info.eps) - 1 - math.log2(scale)


def flushed_of(rows: Iterable[Range], dtype: torch.dtype, scale: float) -> float:
    """Return the share of all values of some rows that would be 0, as ``Range.flushed_in`` counts it."""
    seen = [row.wide or row.values for row in rows]
    some = sum(each.some for each in seen)
    return sum(each.below(_flushes_below(dtype, scale)) for each in seen) / some if some else 0.0


@dataclass(frozen=True, slots=True)
class Ranges(Printed):
    """Table of ranges, with advice on dtype and loss scale. ``print(ranges)``: a verdict and the ten tightest rows.

    Attributes:
        rows: tightest first.
        batches: how many were run.
        ran_in: the dtype that the model is converted to.
        ran_at: the loss scale of the run; 1.0 without a scaler.
        dtype: the one that fits the model, ``torch.float16`` or ``torch.bfloat16``; None: nothing of it is low.
        reasons: the figures that decide so.
        scale: the largest safe loss scale for float16, a power of two: the largest gradient keeps two bits to the
            largest number. None: see ``why_no_scale``.
        smallest_scale: the smallest useful one: below it more gradients become 0. 1.0: the loss needs no scale.
        why_no_scale: why there is none; "": there is one.
        warnings: what goes wrong in the training as it is.
        remarks: what could not be looked at.
        subject: what they are of, so that a page takes no other model's; None where rows are folded.
    """

    rows: tuple[Range, ...]
    batches: int
    ran_in: torch.dtype
    ran_at: float
    dtype: torch.dtype | None
    reasons: tuple[str, ...]
    scale: float | None
    smallest_scale: float | None
    why_no_scale: str = ""
    warnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    subject: Subject | None = field(default=None, repr=False)

    def folded(self) -> Ranges:
        """Return the table with repeated layers as one: ``blocks.0.mlp`` and ``blocks.1.mlp`` are ``blocks.*.mlp``."""
        rows = [_together(*each) for each in layers_together(self.rows, lambda row: (row.phase, row.dtype))]
        return replace(self, rows=tightest_first(rows), subject=None)

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return as_json(self, without=("subject",))

    @property
    def headline(self) -> str:
        """The verdict, in one line."""
        if self.dtype is None:
            return f"neither float16 nor bfloat16: {self.reasons[0]}"
        if self.scale is None or self.smallest_scale is None:
            return f"{dtype_name(self.dtype)} fits; there is no loss scale for float16: {self.why_no_scale}"
        least = f"the smallest useful one {power(self.smallest_scale)}" if self.smallest_scale > 1 else "none is needed"
        return f"{dtype_name(self.dtype)} fits; largest safe loss scale for float16: {power(self.scale)}, {least}"

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [f"  {reason}" for reason in self.reasons]
        parts += [f"Warning: {warning}" for warning in self.warnings]
        parts.append(table(_CELLS, self.rows[:_SHOWN]))
        if (more := len(self.rows) - _SHOWN) > 0:
            parts.append(f"and {more} more rows: ranges.rows, ranges.folded()")
        parts += [f"Note: {remark}" for remark in self.remarks]
        return titled(self.headline, stacked(parts))


def tightest_first(rows: Iterable[Range]) -> tuple[Range, ...]:
    """Return rows ordered by ``Range.margin``."""
    return tuple(sorted(rows, key=lambda row: row.margin))


_BACKWARD: Final = {"node": " (backward)", "outside": " (backward)", "weight": " (gradient)"}
#: Columns of the printed table.
_CELLS: Final[dict[str, Callable[[Range], str]]] = {
    "margin": lambda row: f"{row.margin:.1f}",
    "headroom": lambda row: f"{row.headroom:.1f}",
    "footroom": lambda row: f"{row.footroom:.1f}",
    "largest": lambda row: f"{row.values.largest:.2e}",
    "zeros": lambda row: percent(row.zeros),
    "flushed": lambda row: "-" if row.flushed is None else percent(row.flushed),
    "subnormal": lambda row: percent(row.subnormal),
    "saturated": lambda row: percent(row.saturated),
    "computes": lambda row: row.dtype,
    "node": lambda row: row.node + (_BACKWARD[row.kind] if row.phase == "backward" else ""),
    "module": lambda row: row.module,
    "source": lambda row: row.source,
}


def percent(share: float) -> str:
    """Write a share for people: a little is not 0."""
    return f"{share:.1%}" if share == 0 or share >= 0.0005 else "<0.1%"


def power(scale: float) -> str:
    """Write a power of two as code: ``4096``, ``2.0**41``."""
    return f"{scale:g}" if float(f"{scale:g}") == scale else f"2.0**{round(math.log2(scale))}"


def _together(name: str, module: str, rows: list[Range]) -> Range:
    wide = None if any(row.wide is None for row in rows) else sum((row.wide for row in rows if row.wide), Magnitudes())
    values = sum((row.values for row in rows), Magnitudes())
    return replace(rows[0], node=name, module=module, values=values, wide=wide)


class Advice(NamedTuple):
    """Advice on the dtype and loss scale of a model; attributes as of ``Ranges``."""

    dtype: torch.dtype | None
    reasons: tuple[str, ...]
    scale: float | None
    smallest_scale: float | None
    why_no_scale: str = ""


def advise(rows: Sequence[Range], low: torch.dtype, ran_at: float, fault: str = "") -> Advice:
    """Return the dtype and the loss scales that fit the values of a run, with the figures that decide so.

    Args:
        rows: of a run in bfloat16, whose exponents are FP32's; or in float16, where nothing else is known.
        low: the dtype that it ran in: what is in it would be in float16.
        ran_at: the loss scale of the run.
        fault: which batches were not finite, in words; "": none.
    """
    # Advice is about values that are low; what stays FP32 has room anyway.
    name = dtype_name(low)
    lowered = [row for row in rows if row.dtype == name]
    if not lowered:
        why = "no value of the run is in low precision"
        return Advice(None, (why,), None, None, why)
    # Forward values must fit as they are; gradients can be scaled.
    forward = [row for row in lowered if row.phase == "forward"]
    backward = [row for row in lowered if row.phase == "backward" and row.values.some + row.values.overflowed]
    scale = _largest_scale([row for row in rows if row.phase == "backward"], backward, low, ran_at)
    useful = None if scale is None else _smallest_scale(backward, scale, ran_at)
    # Anything that float16 would break decides for bfloat16: a fit is claimed only where nothing speaks against it.
    against = [*_too_large(forward), *_too_small(forward)]
    why = "" if scale is not None else _why_no_scale(fault or (backward and f"gradients are not finite in {name}"))
    if backward and why:
        against.append(why)
    if scale is not None:
        weights = {row.node for row in forward if row.kind == "weight"}
        gradients = [row for row in rows if row.phase == "backward" and row.kind == "weight" and row.node in weights]
        against += _lost_gradients(backward, gradients, scale, scale / ran_at)
    if against:
        return Advice(torch.bfloat16, tuple(against), scale, useful, why)
    reasons = [_fits(forward)] if forward else []
    if scale is not None:
        lost = percent(flushed_of(backward, torch.float16, scale / ran_at))
        reasons.append(f"{lost} of the gradients become 0 at a loss scale of {power(scale)}")
    reasons.append("float16 has three bits of precision more than bfloat16")
    return Advice(torch.float16, tuple(reasons), scale, useful, why)


def _largest_scale(rows: Sequence[Range], lowered: Sequence[Range], low: torch.dtype, ran_at: float) -> float | None:
    """Return the largest power of two that leaves all gradients their headroom, or None where no gradient is low.

    Gradients in low precision are held against float16's range, others against that of their own dtype.
    """
    if not lowered or any(row.values.overflowed or row.values.nans for row in rows):
        return None
    rooms = [
        math.log2(_F16.max if row.dtype == dtype_name(low) else torch.finfo(getattr(torch, row.dtype)).max)
        - math.log2(row.values.largest)
        for row in rows
        if row.values.largest
    ]
    scale = 2.0 ** math.floor(math.log2(ran_at) + min(rooms, default=math.inf) - _HEADROOM)
    return min(max(scale, SMALLEST_SCALE), 2.0 ** math.floor(math.log2(LARGEST_SCALE)))


def _why_no_scale(fault: object) -> str:
    return f"{fault}: fxprec.numerics.locate says where that begins" if fault else "no gradient is in low precision"


def _smallest_scale(backward: Sequence[Range], scale: float, ran_at: float) -> float:
    """Return the smallest scale, from 1.0 up, at which hardly more gradients become 0 than at the largest one."""
    most = flushed_of(backward, torch.float16, scale / ran_at) + _MORE
    while scale > 1 and flushed_of(backward, torch.float16, scale / 2 / ran_at) <= most:
        scale /= 2
    return scale


def _where(row: Range) -> str:
    return row.node + (f" of module {row.module}" if row.module else "") + (f" ({row.source})" if row.source else "")


def _too_large(forward: Sequence[Range]) -> list[str]:
    # Measured overflows come first: what is beyond float16's range in a run with FP32's exponents is only foreseen.
    over = [row for row in forward if row.values.overflowed]
    if over:
        return [f"{_where(over[0])} overflows" + _more(over)]
    beyond = [row for row in forward if row.values.largest > _F16.max / 2**_ROOM]
    if not beyond:
        return []
    worst = max(beyond, key=lambda row: row.values.largest)
    largest = worst.values.largest
    left = "beyond" if largest > _F16.max else f"less than {_ROOM} bit below"
    return [f"{_where(worst)} reaches {largest:.3g}, {left} float16's {_F16.max:g}" + _more(beyond)]


def _too_small(forward: Sequence[Range]) -> list[str]:
    lost = [row for row in forward if row.flushed_in(torch.float16) > _LOST]
    if not lost:
        return []
    return [f"{percent(lost[0].flushed_in(torch.float16))} of {_where(lost[0])} would be 0 in float16" + _more(lost)]


def _lost_gradients(backward: Sequence[Range], weights: Sequence[Range], scale: float, larger: float) -> list[str]:
    """Return which gradients float16 loses even at the largest safe scale, ``larger`` times as large as in the run."""
    found = []
    lost = [row for row in weights if row.flushed_in(torch.float16, larger) > _LOST]
    if lost:
        found.append(
            f"the gradient of {lost[0].node} would be 0 in float16 at a loss scale of {power(scale)}" + _more(lost)
        )
    share = flushed_of(backward, torch.float16, larger)
    if share > _FLUSHED:
        # Where even the best scale flushes too many, the distance from smallest to largest explains it better than a
        # name.
        seen = [row.values for row in backward if row.values.some]
        smallest, largest = min(each.smallest for each in seen), max(each.largest for each in seen)
        found.append(
            f"gradients span {math.log2(largest / smallest):.0f} binades, and float16 has 40: {percent(share)} of them "
            f"become 0 at the largest safe loss scale, {power(scale)}"
        )
    return found


def _more(rows: Sequence[Range]) -> str:
    return f", and {len(rows) - 1} more" if len(rows) > 1 else ""


def _fits(forward: Sequence[Range]) -> str:
    widest = max(forward, key=lambda row: row.values.largest)
    room = math.log2(_F16.max) - math.log2(widest.values.largest) if widest.values.largest else math.inf
    return f"the largest value of the forward, {widest.values.largest:.3g} in {_where(widest)}, leaves {room:.1f} bits"
