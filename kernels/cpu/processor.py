"""What the CPU of this machine can do, as the system and torch tell."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final, Literal, TypeAlias

import torch

#: How a CPU multiplies bfloat16: "amx", by AMX's tiles; "other", by other instructions; "converted", by
#: oneDNN's kernels for AVX-512, which convert the operands to FP32; "none", by torch's own loops, slower still
#: (AVX2 alone, Arm without BF16).
BFloat16Units: TypeAlias = Literal["amx", "other", "converted", "none"]

#: What /proc/cpuinfo and torch call the instructions: of x86, of Arm.
_AMX: Final = "amx_bf16"
#: What oneDNN's converting kernels want. Source: oneDNN's documentation, "Data Types": bfloat16 from AVX-512 on.
_AVX512: Final = frozenset({"avx512f", "avx512_f"})
_BFLOAT16_UNITS: Final = frozenset({"avx512_bf16", "avx10_2", "bf16", "svebf16", "sve_bf16"})
#: What oneDNN, whose kernels multiply, calls instruction sets that it can be held to: without units for bfloat16, and
#: without tiles.
_WITHOUT_AVX512: Final = ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2")
_WITHOUT_UNITS: Final = (*_WITHOUT_AVX512, "avx512_core", "avx512_core_vnni")
_WITHOUT_TILES: Final = ("avx512_core_bf16", "avx512_core_fp16", "avx10_1_512", "avx10_2_512")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets of the CPU; empty where nobody tells."""
    told = getattr(torch.cpu, "get_capabilities", dict)()
    named = (cpuinfo("flags") or cpuinfo("Features")).split()
    return frozenset(named).union(name for name, there in told.items() if there is True)


def bfloat16_units() -> BFloat16Units:
    """Return how the CPU multiplies bfloat16, within what oneDNN is held to."""
    flags, limit = cpu_flags(), instruction_limit()
    if limit in _WITHOUT_UNITS or _BFLOAT16_UNITS.union({_AMX}).isdisjoint(flags):
        return "none" if limit in _WITHOUT_AVX512 or _AVX512.isdisjoint(flags) else "converted"
    return "amx" if _AMX in flags and limit not in _WITHOUT_TILES else "other"


def has_bfloat16_units() -> bool:
    """Return whether the CPU has instructions that multiply bfloat16; without them FP32 is faster."""
    return bfloat16_units() in ("amx", "other")


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
