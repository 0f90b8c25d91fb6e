"""Computes dropout without a mask in memory: the decision for an element is a function of (seed, row, column).

A forward draws one seed a dropout, an int64 on the device, from torch's generator of that device: so ``manual_seed``
rules it, ``torch.utils.checkpoint`` restores it, and a CUDA graph draws anew at each replay. The backward computes the
same words again, by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Elements are numbered row by row, with rows padded to a multiple of four; element e has word e % 4 of the counter
(e // 4 as 64 bits, 0, 0), so that one Philox serves four. It is kept where its word is at least ``p * 2**32``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.kernels.launch.triton_support import constexpr, jit, tl

_MASK = 0xFFFFFFFF


def draw_seeds(count: int, device: torch.device) -> Tensor:
    """Draw int64 [count] seeds from the device's default generator, without a host sync."""
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=device)


def drop_threshold(p: float) -> int:
    """Return the word below which elements are dropped: ``p * 2**32``, and at least 1 for p > 0.

    Raises:
        ValueError: p is not in [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout takes p in [0, 1), got {p}: p=1 is a tensor of zeros")
    return min(_MASK, max(round(p * 2**32), int(p > 0)))


@jit()
def keep_tile(seed, rows, columns, start, THRESHOLD: constexpr, BLOCK: constexpr):
    """Return the mask of kept elements of a tile: rows ``rows``, columns from ``start`` on.

    seed: int64 scalar. rows: int32 or int64 [R]. columns: int scalar, of the whole row. start: int scalar, a multiple
    of 4. THRESHOLD: ``drop_threshold(p)``. BLOCK: columns of the tile, a power of two, at least 4. Returns int1
    [R, BLOCK].
    """
    pitch = (columns + 3) // 4
    # 64 bits: a tensor may have more than 2**32 quads.
    quads = rows.to(tl.int64)[:, None] * pitch + (start // 4 + tl.arange(0, BLOCK // 4))[None, :]
    zero = (quads * 0).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, quads.to(tl.int32), (quads >> 32).to(tl.int32), zero, zero)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return words >= THRESHOLD


def keep_mask(seed: Tensor, rows: int, columns: int, p: float) -> Tensor:
    """Return the mask of kept elements in plain torch: bool [rows, columns], True where kept.

    Args:
        seed: one int64, on any device; the mask is there too.
    """
    pitch = (columns + 3) // 4
    quad = torch.arange(rows * pitch, dtype=torch.int64, device=seed.device)
    seed = seed.reshape(())
    c0, c1 = quad & _MASK, quad >> 32
    c2 = c3 = torch.zeros_like(quad)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    # Ten rounds of Philox4x32; sums and products modulo 2**32 are masked, since torch has no uint32 arithmetic.
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # the bits of the unsigned product, though int64 is signed
        c0, c2 = (high >> 32) & _MASK ^ c1 ^ k0, (low >> 32) & _MASK ^ c3 ^ k1
        c1, c3 = high & _MASK, low & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    words = torch.stack((c0, c1, c2, c3), dim=1)
    return (words >= drop_threshold(p)).view(rows, 4 * pitch)[:, :columns]
