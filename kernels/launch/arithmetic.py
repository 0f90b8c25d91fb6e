"""FP32 arithmetic that a kernel rounds once and eager torch twice, for references that must agree to the last bit."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor


def fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """``a * b + c`` of FP32 tensors, rounded once as ``fma.rn.f32`` does: the product of two FP32 is exact in FP64.

    The sum is rounded to FP64 first, which shows in the result about once in 2**29 times. A float is taken as FP32.
    """
    factor = b.double() if isinstance(b, Tensor) else float32(b)
    return (a.double() * factor + c.double()).float()


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded FP32 square root; ``torch.sqrt`` on a CPU may be 1 ulp off."""
    return x.double().sqrt().to(torch.float32)


def float32(value: float) -> float:
    """The FP32 value nearest to a double; infinite beyond FP32's range."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def split(value: float) -> tuple[float, float]:
    """A double as the sum of two FP32 values, 48 bits of it: kernels take scalars as FP32, and add these up in FP64.

    What FP32 cannot hold is (inf, 0).
    """
    high = float32(value)
    return high, float32(value - high) if math.isfinite(high) else 0.0
