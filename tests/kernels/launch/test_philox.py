"""Dropout without a mask: the words are Philox's, kernel and eager agree, and the seed obeys torch's generator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernel_tools
from fxprec.kernels.launch.philox import draw_seeds, drop_threshold, keep_mask, keep_tile
from fxprec.kernels.launch.triton_support import constexpr, jit, tl

every_device = pytest.mark.parametrize("device", kernel_tools.DEVICES)
_ONES = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 in Python's integers, from the paper."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _ONES, (low >> 32) ^ c3 ^ k1, low & _ONES
        k0, k1 = (k0 + 0x9E3779B9) & _ONES, (k1 + 0xBB67AE85) & _ONES
    return [c0, c1, c2, c3]


def words_of(seed: int, row: int, columns: int, start: int, count: int) -> list[int]:
    """The words of ``count`` elements of a row from ``start`` (a multiple of 4) on."""
    first = row * -(-columns // 4) + start // 4
    quads = range(first, first + -(-count // 4))
    words = [philox((q & _ONES, q >> 32 & _ONES, 0, 0), (seed & _ONES, seed >> 32 & _ONES)) for q in quads]
    return [word for quad in words for word in quad][:count]


@jit(do_not_specialize=["columns", "start", "first"])
def tile_kernel(seeds, columns, first, start, out, THRESHOLD: constexpr, ROWS: constexpr, BLOCK: constexpr):
    """seeds: int64 [1]. out: int8 [ROWS, BLOCK], written: what stays of rows from ``first`` on, columns from start."""
    rows = first.to(tl.int64) + tl.arange(0, ROWS)
    keep = keep_tile(tl.load(seeds), rows, columns, start, THRESHOLD, BLOCK)
    place = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + place, keep.to(tl.int8))


def tile(seed: Tensor, columns: int, first: int, start: int, p: float, rows: int = 4, block: int = 16) -> Tensor:
    out = torch.full((rows, block), 7, dtype=torch.int8, device=seed.device)
    tile_kernel[(1,)](seed, columns, first, start, out, THRESHOLD=drop_threshold(p), ROWS=rows, BLOCK=block)
    return out


def seed_of(value: int, device: str = "cpu") -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device=device)


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


def test_the_philox_of_this_file_gives_the_papers_known_answers() -> None:
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((_ONES, _ONES, _ONES, _ONES), (_ONES, _ONES)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox(pi, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
@pytest.mark.parametrize("columns", [4, 7])
def test_an_element_is_kept_from_its_word_on(seed: int, columns: int) -> None:
    """At a threshold of its word it stays, one above it goes: so the mask is of Philox's very words."""
    for row in range(3):
        for column, word in enumerate(words_of(seed, row, columns, 0, columns)):
            for threshold, stays in ((word, True), (word + 1, False)):
                p = threshold / 2**32
                assert drop_threshold(p) == threshold
                assert bool(keep_mask(seed_of(seed), 3, columns, p)[row, column]) is stays


@every_device
@pytest.mark.parametrize("p", [1e-12, 0.1, 0.5, 0.7, 1 - 2**-33])
@pytest.mark.parametrize("columns", [1, 3, 4, 5, 17, 64])
def test_a_tile_is_the_mask(device: str, columns: int, p: float) -> None:
    seed = draw_seeds(1, torch.device(device))
    mask = keep_mask(seed, 11, columns, p)
    for first in (0, 5):
        for start in (0, 4, 12, 48):
            width = min(16, columns - start)
            if width > 0:
                part = tile(seed, columns, first, start, p)[:, :width].bool()
                assert torch.equal(part, mask[first : first + 4, start : start + width])


@every_device
@pytest.mark.parametrize(("columns", "first"), [(5, 2**31 - 2), (4096, 2**22 - 2), (131072, 2**17 + 3), (7, 2**40 + 1)])
def test_counters_have_64_bits(device: str, columns: int, first: int) -> None:
    """Elements and quads beyond 2**31 and 2**32 have words of their own."""
    seed, start = seed_of(-0x0123456789ABCDEF, device), (columns - 1) // 4 * 4
    width = columns - start
    found = tile(seed, columns, first, start, 0.5)[:, :width].bool().tolist()
    words = [words_of(-0x0123456789ABCDEF, first + row, columns, start, width) for row in range(4)]
    assert found == [[word >= 2**31 for word in row] for row in words]
    assert (first + 3) * columns + start > 2**31


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1), rows=st.integers(1, 9), columns=st.integers(1, 21))
def test_the_mask_is_philoxs_for_any_seed_and_shape(seed: int, rows: int, columns: int) -> None:
    words = [words_of(seed, row, columns, 0, columns) for row in range(rows)]
    mask = keep_mask(seed_of(seed), rows, columns, 0.3)
    assert mask.dtype == torch.bool and mask.shape == (rows, columns)
    assert mask.tolist() == [[word >= drop_threshold(0.3) for word in row] for row in words]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9, 0.99])
def test_the_rate_is_p(p: float) -> None:
    """Within five standard deviations, overall and in each of the four words of a counter."""
    mask = keep_mask(draw_seeds(1, torch.device("cpu")), 512, 256, p).double()
    for part in (mask, *(mask[:, word::4] for word in range(4))):
        deviation = (p * (1 - p) / part.numel()) ** 0.5
        assert abs(part.mean().item() - (1 - p)) < 5 * deviation


def test_p_near_0_and_near_1() -> None:
    assert drop_threshold(0.0) == 0 and drop_threshold(1e-12) == 1
    assert drop_threshold(1 - 2**-53) == _ONES and drop_threshold(0.5) == 2**31
    seed = draw_seeds(1, torch.device("cpu"))
    assert keep_mask(seed, 64, 64, 0.0).all() and keep_mask(seed, 64, 64, 1e-12).all()
    assert not keep_mask(seed, 64, 64, 1 - 2**-53).any()
    assert 0 < keep_mask(seed, 256, 256, 0.999).sum().item() < 256 * 256 * 0.003


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_a_rate_outside_of_0_to_1_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match=r"dropout takes p in \[0, 1\), got"):
        drop_threshold(p)


@pytest.mark.parametrize("distance", [1, 2**32, 2**63 - 1])
def test_two_seeds_are_independent(distance: int) -> None:
    """Neighbouring seeds, in either half, agree in half of the elements, like two coins."""
    first, second = (keep_mask(seed_of(seed), 256, 256, 0.5) for seed in (0, distance))
    agree = (first == second).double().mean().item()
    assert abs(agree - 0.5) < 5 * 0.5 / 256


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (0, 4), (0, 2)])
def test_neighbours_are_independent(shift: tuple[int, int]) -> None:
    mask = keep_mask(seed_of(42), 256, 256, 0.5)
    agree = (mask == mask.roll(shift, (0, 1))).double().mean().item()
    assert abs(agree - 0.5) < 5 * 0.5 / 256


def test_seeds_follow_manual_seed() -> None:
    cpu = torch.device("cpu")
    torch.manual_seed(5)
    first, second = draw_seeds(3, cpu), draw_seeds(3, cpu)
    torch.manual_seed(5)
    assert torch.equal(draw_seeds(3, cpu), first) and torch.equal(draw_seeds(3, cpu), second)
    assert first.dtype == torch.int64 and first.shape == (3,)
    assert len({*first.tolist(), *second.tolist()}) == 6
    many = draw_seeds(2000, cpu)
    assert (many < 0).any() and (many > 2**62).any() and (many & _ONES).unique().numel() == 2000, "all 64 bits"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_draws_the_same_seeds_again(use_reentrant: bool) -> None:
    drawn: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        drawn.append(draw_seeds(1, x.device))
        return torch.where(keep_mask(drawn[-1], 4, 8, 0.5), x, 0.0).square()

    x = torch.randn(4, 8, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=use_reentrant)
    assert isinstance(y, Tensor)
    draw_seeds(1, x.device)  # the generator moves on between forward and backward
    y.sum().backward()
    assert len(drawn) == 2 and torch.equal(drawn[0], drawn[1])
    assert x.grad is not None and torch.equal(x.grad != 0, y != 0)


@kernel_tools.compiles
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1 - 2**-40])
@pytest.mark.parametrize("architecture", kernel_tools.ARCHITECTURES)
def test_a_threshold_is_compared_without_a_sign(architecture: int, p: float) -> None:
    """Words are unsigned: a signed comparison would drop those above 2**31, and 64-bit ones would cost twice."""
    pointers = {"seeds": "*i64", "columns": "i32", "first": "i64", "start": "i32", "out": "*i8"}
    constants = {"THRESHOLD": drop_threshold(p), "ROWS": 4, "BLOCK": 128}
    kernel = kernel_tools.compiled(tile_kernel, architecture, 4, pointers, constants)
    assert kernel.spills == 0
    compared = {line.split()[0] for line in kernel.ttir.splitlines() if "arith.cmpi" in line}
    assert compared and "arith.cmpi uge" in kernel.ttir and "arith.cmpi sge" not in kernel.ttir
