"""Count values by their exponents, on the device that they are on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

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
        exponents = dict(self.exponents)
        for exponent, count in other.exponents.items():
            exponents[exponent] = exponents.get(exponent, 0) + count
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
        names = ("zeros", "infinite", "nans", "saturated", "overflowed")
        ends = {"smallest": self.smallest if self.some else None, "largest": self.largest or None}
        exponents = {str(exponent): count for exponent, count in self.exponents.items()}
        return {"exponents": exponents} | {name: getattr(self, name) for name in names} | ends


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
        by_device: dict[Any, list[int]] = defaultdict(list)
        for number, tally in enumerate(tallies):
            by_device[tally._counts.device, tally._wide].append(number)
        found: dict[int, Magnitudes] = {}
        for numbers in by_device.values():
            counts = torch.stack([tallies[number]._counts for number in numbers]).tolist()
            ends = torch.stack([e for n in numbers for e in (tallies[n]._smallest, tallies[n]._largest)]).tolist()
            for position, number in enumerate(numbers):
                smallest, largest = ends[2 * position : 2 * position + 2]
                found[number] = _magnitudes(counts[position], tallies[number]._layout, smallest, largest)
        return [found[number] for number in range(len(tallies))]


def _magnitudes(counts: list[int], layout: _Layout, smallest: float, largest: float) -> Magnitudes:
    exponents, zeros, nans = counts[_FIRST:], counts[_ZEROS], counts[_NANS]
    infinite = exponents.pop() - nans  # the last value of the bits, which no number has
    # Zeros have the exponent of subnormal numbers, and are counted apart.
    exponents[0] -= zeros
    found = {each - layout.bias: count for each, count in enumerate(exponents) if count}
    return Magnitudes(found, zeros, infinite, nans, counts[_SATURATED], counts[_OVERFLOWED], smallest, largest)


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
