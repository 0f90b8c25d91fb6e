"""What the CPU of this machine can do, as the system and torch tell."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final, Literal, TypeAlias

import torch

#: How a CPU multiplies bfloat16: by AMX's tiles, by other units, not at all.
BFloat16Units: TypeAlias = Literal["amx", "other", "none"]

#: What /proc/cpuinfo and torch call the instructions: of x86, of Arm.
_AMX: Final = "amx_bf16"
_BFLOAT16_UNITS: Final = frozenset({"avx512_bf16", "avx10_2", "bf16", "svebf16", "sve_bf16"})


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets of the CPU; empty where nobody tells."""
    told = getattr(torch.cpu, "get_capabilities", dict)()
    named = (cpuinfo("flags") or cpuinfo("Features")).split()
    return frozenset(named).union(name for name, there in told.items() if there is True)


def bfloat16_units() -> BFloat16Units:
    """How the CPU multiplies bfloat16; where it has nothing for it torch converts, and loses."""
    if _AMX in cpu_flags():
        return "amx"
    return "none" if _BFLOAT16_UNITS.isdisjoint(cpu_flags()) else "other"


def cpuinfo(key: str) -> str:
    """The first line of /proc/cpuinfo that begins so, without its beginning; "" where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # no Linux
        return ""
    line = next((line for line in text.splitlines() if line.startswith(key)), "")
    return line.partition(":")[2].strip()
