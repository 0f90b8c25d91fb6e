"""Rounds FP32 to bfloat16 or float16 stochastically: the expectation of the result is the value itself.

bfloat16 is the upper half of FP32. So adding 16 random bits to the lower half and cutting it off rounds up as often as
the lower half says, and a value that bfloat16 holds stays. State of 8 significant bits needs this: rounded to nearest,
``exp_avg_sq`` at beta2 = 0.999 stops moving, since a change below half of 2**-8 is lost every time.

NaN stays NaN and infinities stay. A finite value stays finite: beyond bfloat16's largest it is cut, never infinite.

Random bits are a function of (seed, step, tensor, element): there is no generator that a skipped step could advance.
The kernel draws Philox4x32-10 words (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), one word
for each element; the eager form draws from a ``torch.Generator`` seeded with both numbers. Their bits differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.kernels.launch.triton_support import constexpr, jit, tl

_MASK = (1 << 64) - 1
#: Largest finite float16.
_LARGEST = 65504.0


@jit()
def random_words(seed, step, index, start, BLOCK: constexpr):
    """Return a random word for each of BLOCK consecutive elements of a tensor.

    seed: int64 scalar. step: int32 scalar. index: int64 scalar, what tells tensors apart, its lower half counts.
    start: int scalar, the number of the first element, a multiple of 4. Returns uint32 [BLOCK]: element e has word
    e % 4 of the Philox counter (e // 4 as 64 bits, index, step).
    """
    quads = (start // 4).to(tl.int64) + tl.arange(0, BLOCK // 4)  # shifted by 32, which 32 bits cannot be
    zero = tl.zeros((BLOCK // 4,), tl.int32)
    w0, w1, w2, w3 = tl.philox(
        seed, quads.to(tl.int32), (quads >> 32).to(tl.int32), zero + index.to(tl.int32), zero + step
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@jit()
def round_block(x, bits):
    """Round as ``round_with_bits``, in a kernel. x: fp32 [N]; bits: uint32 [N] below 2**16. Returns bf16 [N]."""
    word = x.to(tl.uint32, bitcast=True)
    cut = word & 0xFFFF0000
    up = (word + bits) & 0xFFFF0000
    # What would carry up to infinity is cut off, and so are infinities and NaN, which its quiet bit keeps NaN.
    rounded = tl.where((up & 0x7F800000) == 0x7F800000, cut, up)
    rounded = tl.where(x != x, cut | 0x00400000, rounded)
    return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


def round_with_bits(x: Tensor, bits: Tensor) -> Tensor:
    """Round FP32 to bfloat16 with the given random bits.

    Args:
        x: float32, any shape.
        bits: int32 of the same shape, uniform in [0, 2**16).

    Returns:
        bfloat16 of the same shape.
    """
    word = x.view(torch.int32)
    up = (word + bits) & -65536
    cut = word & -65536
    rounded = torch.where((up & 0x7F800000) == 0x7F800000, cut, up)
    rounded = torch.where(x.isnan(), cut | 0x00400000, rounded)
    return rounded.view(torch.float32).to(torch.bfloat16)  # exact: the lower half is zero


def round_to_float16(x: Tensor, bits: Tensor) -> Tensor:
    """Round FP32 to float16 with the given random bits; arguments as for ``round_with_bits``.

    float16 has 13 bits of mantissa less, and below 2**-14 multiples of 2**-24. As of bfloat16, NaN and infinities stay,
    and what is below 2**16 stays finite.
    """
    word = x.view(torch.int32)
    cut = (word & -8192).view(torch.float32)
    up = ((word + (bits & 8191)) & -8192).view(torch.float32)
    rounded = torch.where(up.abs() > _LARGEST, cut, up)
    # Subnormals of float16 are multiples of 2**-24 whatever their exponent, so they are rounded as integers.
    units = x * 2.0**24
    below = units.floor()
    small = (below + (bits * 2.0**-16 < units - below)) * 2.0**-24
    rounded = torch.where(x.abs() < 2.0**-14, small, rounded)
    return torch.where(x.isfinite(), rounded, x).to(torch.float16)  # exact


def stochastic_round(x: Tensor, seed: int, offset: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Round FP32 to bfloat16 or float16 by chance, without bias; the same (seed, offset) gives the same result.

    Args:
        x: float32, any shape, on any device that has generators.
        seed: any int, the run's.
        offset: any int, another one for every tensor that is rounded (``rounding_offset`` makes them).

        dtype: of the result, torch.bfloat16 or torch.float16.

    Returns:
        A tensor of the same shape and strides.

    Raises:
        TypeError: x is not float32.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"stochastic_round takes float32, got {x.dtype}.")
    generator = torch.Generator(x.device).manual_seed(_mixed(_mixed(seed) ^ offset))
    bits = torch.empty_like(x, dtype=torch.int32).random_(0, 1 << 16, generator=generator)
    return (round_to_float16 if dtype is torch.float16 else round_with_bits)(x, bits)


def rounding_offset(step: int, index: int, state: int) -> int:
    """Return the ``offset`` for rounding a state (0 to 3) of a tensor at a step; distinct while index < 2**31."""
    return (step << 33) | (index << 2) | state


def _mixed(number: int) -> int:
    """Spread a number over 64 bits (SplitMix64's finalizer): near seeds and offsets give unrelated generators."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
