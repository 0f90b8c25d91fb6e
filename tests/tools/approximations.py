"""What a GPU computes in FP32 is not all correctly rounded: how far what kernels use may be off, by whom it is said.

``gpu_arithmetic`` computes with these errors; so a kernel may use no approximation that this table does not have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Bound:
    """How far an FP32 result may be off.

    Attributes:
        ulps: from the correctly rounded result; or
        relative: of the exact one.
        flushes: whether numbers below FP32's normal ones count as 0, as arguments and as results.
        source: who says so.
    """

    source: str
    ulps: int = 0
    relative: float = 0.0
    flushes: bool = False


_PTX: Final = "PTX ISA 9.1, 9.7.3"
_CUDA: Final = "CUDA C++ Programming Guide, mathematical functions, single precision"
#: Instructions of PTX, and functions of libdevice that have none with an error of its own.
BOUNDS: Final = MappingProxyType(
    {
        "ex2.approx.f32": Bound(f"{_PTX}.21: 2 ulp from the correctly rounded result", ulps=2),
        "ex2.approx.ftz.f32": Bound(f"{_PTX}.21", ulps=2, flushes=True),
        "div.full.f32": Bound(f"{_PTX}.8: 2 ulp", ulps=2),
        "sqrt.approx.ftz.f32": Bound(f"{_PTX}.15: 2^-23", relative=2.0**-23, flushes=True),
        "rsqrt.approx.ftz.f32": Bound(f"{_PTX}.16: 2^-22.9", relative=2.0**-22.9, flushes=True),
        "logf": Bound(f"{_CUDA}: 1 ulp", ulps=1),
        "log2f": Bound(f"{_CUDA}: 1 ulp", ulps=1),
        "erff": Bound(f"{_CUDA}: 2 ulp", ulps=2),
    }
)


def approximations(ptx: str) -> set[str]:
    """The instructions in a kernel's PTX whose results are not the correctly rounded ones."""
    return set(re.findall(r"^\s+(?:@!?%p\d+ )?(\w+(?:\.\w+)*\.(?:approx|full)(?:\.\w+)*)", ptx, re.MULTILINE))


def check_approximations(ptx: str) -> None:
    """All that a kernel uses must be in the table."""
    unknown = approximations(ptx) - BOUNDS.keys()
    assert not unknown, f"{unknown} of unknown error: see tests/tools/approximations.py"
