"""Stochastic rounding: no bias, exact where bfloat16 is, the same for the same numbers, never infinite by chance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kernel_tools
from fxprec.kernels.launch.rounding import (
    random_words,
    round_block,
    round_with_bits,
    rounding_offset,
    stochastic_round,
)
from fxprec.kernels.launch.triton_support import constexpr, jit, tl

on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)
#: Values between two bfloat16 ones: 1 + f * 2**-7.
BETWEEN = [1 + f * 2.0**-7 for f in (0.125, 0.5, 0.75)] + [-(1 + 0.25 * 2.0**-7), 3 * 2.0**-135]
SPECIAL = [math.inf, -math.inf, 0.0, -0.0, 3.4028234e38, -3.4028234e38, 1e-45]

#: The bits of NaNs, of some of which only the lower half says so: cut off, they would be infinite.
NANS = [0x7FC00000, 0x7F800001, -0x7FFFFF, 0x7F80FFFF, -1, 0x7FFFFFFF]


@jit()
def words_kernel(seed, step, index, start, out, BLOCK: constexpr):
    tl.store(out + tl.arange(0, BLOCK), random_words(seed, step, index, start, BLOCK).to(tl.int64))


@jit()
def round_kernel(x, bits, out, BLOCK: constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, round_block(tl.load(x + lanes), tl.load(bits + lanes).to(tl.uint32)))


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 in Python's integers, from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [high >> 32 ^ c[1] ^ k[0], high & 0xFFFFFFFF, low >> 32 ^ c[3] ^ k[1], low & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


def test_the_philox_of_this_file_gives_the_papers_known_answers() -> None:
    ones = 0xFFFFFFFF
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((ones,) * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@on_devices
@pytest.mark.parametrize("start", [0, 8192, 1 << 34])
def test_every_element_has_a_word_of_its_own_counter(device: str, start: int) -> None:
    seed, step, index = (5 << 32) + 3, 9, 4
    out = torch.empty(64, dtype=torch.int64, device=device)
    words_kernel[(1,)](seed, step, index, start, out, BLOCK=64)
    expected = []
    for quad in range(start // 4, start // 4 + 16):
        expected += philox((quad & 0xFFFFFFFF, quad >> 32, index, step), (3, 5))
    assert out.tolist() == expected


@on_devices
def test_the_kernel_rounds_as_the_reference_does_with_the_same_bits(device: str) -> None:
    x = torch.cat([torch.randn(256 - len(BETWEEN + SPECIAL)), torch.tensor(BETWEEN + SPECIAL)])
    x[:6] = torch.tensor(NANS, dtype=torch.int32).view(torch.float32)
    bits = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)
    bits[3:6] = bits[-12:] = 0xFFFF
    out = torch.zeros(256, dtype=torch.bfloat16, device=device)
    round_kernel[(1,)](x.to(device), bits.to(device), out, BLOCK=256)
    assert kernel_tools.same_bits(out[6:].cpu(), round_with_bits(x, bits)[6:])
    assert out[:6].isnan().all()


@pytest.mark.parametrize("value", BETWEEN)
def test_a_value_rounds_up_as_often_as_it_is_near(value: float) -> None:
    n = 200_000
    rounded = stochastic_round(torch.full((n,), value), seed=1, offset=2).double()
    below, above = rounded.min().item(), rounded.max().item()
    assert below < value < above, "to both neighbours"
    assert torch.nextafter(torch.tensor(below).bfloat16(), torch.tensor(math.inf).bfloat16()).item() == above
    # The mean of n roundings has a standard deviation of at most (above - below) / 2 / sqrt(n).
    assert abs(rounded.mean().item() - value) < 5 * (above - below) / 2 / math.sqrt(n)


@pytest.mark.parametrize("bits", [0, 1, 0x7FFF, 0x8000, 0xFFFF])
def test_whatever_bfloat16_holds_stays(bits: int) -> None:
    everything = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    everything = everything[~everything.isnan()]
    rounded = round_with_bits(everything.float(), torch.full(everything.shape, bits, dtype=torch.int32))
    assert kernel_tools.same_bits(rounded, everything)


@pytest.mark.parametrize("bits", [0, 0xFFFF])
def test_finite_stays_finite_and_nan_stays_nan(bits: int) -> None:
    largest = torch.finfo(torch.bfloat16).max
    x = torch.tensor([3.4028234e38, -3.4028234e38, largest, math.inf, -math.inf])
    rounded = round_with_bits(x, torch.full(x.shape, bits, dtype=torch.int32))
    assert rounded.tolist() == [largest, -largest, largest, math.inf, -math.inf]
    nans = torch.tensor(NANS, dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    assert round_with_bits(nans, torch.full(nans.shape, bits, dtype=torch.int32)).isnan().all()


def test_the_bits_decide_and_only_they() -> None:
    x = torch.tensor([1 + 0.25 * 2.0**-7])  # the lower half is 0x4000
    up, down = torch.tensor([0xC000], dtype=torch.int32), torch.tensor([0xBFFF], dtype=torch.int32)
    assert round_with_bits(x, up).item() == 1 + 2.0**-7 and round_with_bits(x, down).item() == 1
    assert round_with_bits(-x, up).item() == -(1 + 2.0**-7), "away from zero, with either sign"


def test_seed_and_offset_decide_and_each_of_them_matters() -> None:
    x = torch.randn(1000)

    def rounded(seed: int, offset: int) -> Tensor:
        return stochastic_round(x, seed, offset)

    assert torch.equal(rounded(1, 2), rounded(1, 2))
    others = [rounded(1, 3), rounded(2, 2), rounded(2, 1), rounded(-1, 2), rounded(1 << 70, 2)]
    assert not any(torch.equal(rounded(1, 2), other) for other in others)


def test_near_seeds_and_offsets_round_independently() -> None:
    x = torch.full((4000,), 1 + 0.5 * 2.0**-7)  # up with probability 1/2
    ups = [stochastic_round(x, seed, offset).double() > 1 for seed in range(3) for offset in range(3)]
    for i, a in enumerate(ups):
        for b in ups[:i]:
            assert abs((a == b).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(4000)


def test_offsets_of_two_roundings_are_never_the_same() -> None:
    cases = [(s, i, k) for s in (1, 2, 1000, 1 << 24) for i in (0, 1, 300, (1 << 31) - 1) for k in (0, 1, 2, 3)]
    assert len({rounding_offset(*case) for case in cases}) == len(cases)


def test_torchs_own_generator_is_not_touched() -> None:
    state = torch.get_rng_state()
    stochastic_round(torch.randn(10, generator=torch.Generator()), 0, 0)
    assert torch.equal(state, torch.get_rng_state())


def test_strides_are_kept() -> None:
    x = torch.randn(4, 6).t()
    assert stochastic_round(x, 0, 0).stride() == x.stride()


@pytest.mark.parametrize("x", [torch.zeros(3).double(), torch.zeros(3).half()])
def test_another_dtype_is_refused(x: Tensor) -> None:
    with pytest.raises(TypeError, match=f"takes float32, got {x.dtype}"):
        stochastic_round(x, 0, 0)


def test_a_small_change_survives_on_average() -> None:
    """What it is for: exp_avg_sq at beta2 = 0.999 decays, where rounding to nearest would hold it for ever."""
    nearest = chance = torch.ones(512, dtype=torch.bfloat16)
    for step in range(1000):
        nearest = (nearest.float() * 0.999).bfloat16()
        chance = stochastic_round(chance.float() * 0.999, 0, step)
    assert (nearest > 0.99).all()
    assert chance.double().mean().item() == pytest.approx(0.999**1000, rel=0.02)
