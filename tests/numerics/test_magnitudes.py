"""Counts of magnitudes are those that one gets by counting one value after another."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxprec.numerics import range_table
from fxprec.numerics.range_table import Magnitudes, Range, Tally, all_finite, as_floats, can_count

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CPU = torch.device("cpu")


def counted_by_hand(values: Tensor) -> Magnitudes:
    """In Python's floats, one by one."""
    dtype, numbers = values.dtype, values.double().flatten().tolist()
    finite = [abs(x) for x in numbers if math.isfinite(x) and x]
    lowest = {torch.float64: -1023}.get(dtype, -127)
    exponents: dict[int, int] = {}
    for x in finite:
        exponent = max(math.frexp(x)[1] - 1, lowest)
        exponents[exponent] = exponents.get(exponent, 0) + 1
    limit = torch.finfo(dtype).max
    return Magnitudes(
        exponents=dict(sorted(exponents.items())),
        zeros=sum(x == 0 for x in numbers),
        infinite=sum(math.isinf(x) for x in numbers),
        nans=sum(math.isnan(x) for x in numbers),
        saturated=sum(abs(x) >= limit for x in numbers),
        smallest=min(finite, default=math.inf),
        largest=max((x for x in finite if x < limit), default=0.0),
    )


def tallied(*parts: Tensor, sound: Tensor | None = None) -> Magnitudes:
    tally = Tally(parts[0].dtype, CPU)
    for part in parts:
        tally.add(part, sound)
    return Tally.read([tally])[0]


def awkward(dtype: torch.dtype) -> Tensor:
    """Of all magnitudes of the dtype, with zeros, subnormals, the largest number, infinities and nan among them."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    low, high = math.ceil(math.log2(smallest)), math.floor(math.log2(info.max))
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(low, high + 1, (3, 5, 7), generator=generator).double()
    values = (torch.randn(3, 5, 7, generator=generator).sign() * 2.0**exponents).to(dtype)
    special = [0.0, -0.0, smallest, -smallest, info.smallest_normal, info.max, -info.max, math.inf, -math.inf, math.nan]
    values.view(-1)[: len(special)] = torch.tensor(special, dtype=torch.float64).to(dtype)
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at_a_time", [1 << 22, 11])
def test_every_kind_of_value(dtype: torch.dtype, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_table, "_AT_A_TIME", at_a_time)
    values = awkward(dtype)
    assert tallied(values) == counted_by_hand(values)
    assert tallied(values.transpose(0, 2)[::2]) == counted_by_hand(values.transpose(0, 2)[::2])
    assert tallied(values[1, 1, 1]) == counted_by_hand(values[1, 1, 1]), "a scalar"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits(dtype: torch.dtype) -> None:
    values = (torch.randn(5, 3) * 100).to(dtype)
    assert can_count(values) and bool(all_finite(values))
    assert tallied(values) == counted_by_hand(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up(dtype: torch.dtype) -> None:
    values = awkward(dtype)
    expected = counted_by_hand(values)
    assert tallied(*values, values[:0]) == expected
    assert tallied(values[0]) + tallied(*values[1:]) == expected
    tallies = [Tally(dtype, CPU), Tally(torch.float64, CPU), Tally(dtype, CPU)]
    for tally, part in zip(tallies, (values[:2], torch.ones(2).double(), values[2:]), strict=True):
        tally.add(part)
    tallies[0].merge(tallies[2])
    merged, ones, rest = Tally.read(tallies)
    assert (merged, ones.exponents, rest) == (expected, {0: 2}, counted_by_hand(values[2:]))


def test_nothing_at_all() -> None:
    nothing = tallied(torch.empty(0, 3))
    assert nothing == Magnitudes() and nothing.count == 0 and nothing.to_dict()["smallest"] is None


@pytest.mark.parametrize("sound", [True, False, None])
def test_infinities_of_sound_values_are_overflows(sound: bool | None) -> None:
    values = torch.tensor([1.0, math.inf, -math.inf, math.nan, 0.0])
    found = tallied(values, sound=None if sound is None else torch.tensor(sound))
    assert (found.overflowed, found.infinite, found.nans) == (2 if sound else 0, 2, 1)


def test_what_can_be_counted() -> None:
    assert can_count(torch.zeros(2, dtype=torch.complex64))
    for other in (torch.zeros(2).int(), torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), 1.0, None):
        assert not can_count(other)
    pair = torch.tensor([3 + 0.25j]).conj()
    assert tallied(as_floats(pair)).exponents == {-2: 1, 1: 1}
    assert not bool(all_finite(torch.tensor([1.0, math.nan]))) and not bool(all_finite(torch.tensor([math.inf])))


def row(values: Tensor, wide: Tensor | None = None, sound: bool = True) -> Range:
    dtype = str(values.dtype).removeprefix("torch.")
    own = tallied(values, sound=torch.tensor(sound))
    seen = None if wide is None else tallied(wide)
    return Range("x", "node", 0, "forward", "m", "mul", dtype, "f.py:1", "", own, seen)


def test_the_figures_of_a_row() -> None:
    found = row(torch.tensor([0.0, 2.0**-24, 2.0**-20, 1.0, 1024.0, 65504.0], dtype=torch.float16))
    assert (found.zeros, found.subnormal, found.saturated) == (1 / 6, 2 / 6, 1 / 6)
    assert found.headroom == pytest.approx(math.log2(65504 / 1024)) and found.footroom == 0
    assert found.span == 34 and found.margin == 0 and found.overflowed == 0
    assert found.flushed is None and found.to_dict()["flushed"] is None


def test_the_smallest_hundredth_makes_no_row_tight() -> None:
    values = torch.ones(1000, dtype=torch.float16)
    values[:9] = 2.0**-24
    assert row(values).footroom == 0 and row(values).margin == pytest.approx(math.log2(65504))
    values[:11] = 2.0**-24
    assert row(values).margin == 0


def test_zeros_and_overflows() -> None:
    zeros = row(torch.zeros(3, dtype=torch.float16))
    assert (zeros.headroom, zeros.footroom, zeros.margin, zeros.span) == (math.inf, math.inf, math.inf, 0)
    assert zeros.to_dict()["headroom"] is None and zeros.flushed_in(torch.float16) == 0
    infinite = torch.tensor([math.inf, 1.0], dtype=torch.float16)
    over, mask = row(infinite), row(infinite, sound=False)
    assert (over.headroom, over.margin, over.overflowed, over.saturated) == (0, 0, 0.5, 0.5)
    assert mask.headroom == pytest.approx(16, abs=0.01) and (mask.overflowed, mask.saturated) == (0, 0.5)


@pytest.mark.parametrize("scale", [1.0, 8.0, 2.0**-3])
def test_what_another_dtype_would_flush(scale: float) -> None:
    """As the cast itself does it: it rounds to nearest, so that all above half of the smallest number stays."""
    values = (torch.randn(4000, dtype=torch.float64).exp2() * 2.0**-25).float()
    lost = (values * scale).half() == 0
    assert 0 < lost.sum() < 4000
    assert row(values).flushed_in(torch.float16, scale) == float(lost.double().mean())


def test_what_was_flushed() -> None:
    wide = torch.tensor([0.0, 1e-9, 1e-9, 1.0, 2.0])
    found = row(wide.half(), wide)
    assert found.flushed == 0.5 and found.flushed_in(torch.float16) == 0.5
    assert row(wide.half() * 0 + 1, wide).flushed == 0, "fewer zeros than there"
    assert row(wide.half(), wide * 0).flushed is None, "of nothing no share"
