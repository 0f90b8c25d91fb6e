"""What the CPU of this machine can do, as the system and torch tell."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final, Literal, TypeAlias

import torch

#: How a CPU multiplies bfloat16: by AMX's tiles, by other units, not at all.
BFloat16Units: TypeAlias = Literal["amx", "other", "none"]

#: What /proc/cpuinfo and torch call the instructions: of x86, of Arm.
_AMX: Final = "amx_bf16"
_BFLOAT16_UNITS: Final = frozenset({"avx512_bf16", "avx10_2", "bf16", "svebf16", "sve_bf16"})
#: What oneDNN, whose kernels multiply, calls instruction sets that it can be held to: without units for bfloat16, and
#: without tiles.
_WITHOUT_UNITS: Final = ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni")
_WITHOUT_TILES: Final = ("avx512_core_bf16", "avx512_core_fp16", "avx10_1_512", "avx10_2_512")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets of the CPU; empty where nobody tells."""
    told = getattr(torch.cpu, "get_capabilities", dict)()
    named = (cpuinfo("flags") or cpuinfo("Features")).split()
    return frozenset(named).union(name for name, there in told.items() if there is True)


def bfloat16_units() -> BFloat16Units:
    """How the CPU multiplies bfloat16; where it has nothing for it torch converts, and loses."""
    limit = instruction_limit()
    if limit in _WITHOUT_UNITS:
        return "none"
    if _AMX in cpu_flags() and limit not in _WITHOUT_TILES:
        return "amx"
    return "none" if _BFLOAT16_UNITS.isdisjoint(cpu_flags()) else "other"


def instruction_limit() -> str:
    """What oneDNN is held to, whose kernels multiply: ``ONEDNN_MAX_CPU_ISA`` of the environment; "": all that is there.

    Source: oneDNN's documentation, "CPU Dispatcher Control". A name that oneDNN does not know holds nothing.
    """
    named = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")).lower()
    return named if named in (*_WITHOUT_UNITS, *_WITHOUT_TILES) else ""


def cpuinfo(key: str) -> str:
    """The first line of /proc/cpuinfo that begins so, without its beginning; "" where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # no Linux
        return ""
    line = next((line for line in text.splitlines() if line.startswith(key)), "")
    return line.partition(":")[2].strip()
