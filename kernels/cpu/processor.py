"""Describes this machine: what its CPU can do, by the system and by torch, and the folder for what is cached on it."""

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

#: Names of the instructions in /proc/cpuinfo and torch, of x86 and of Arm.
_AMX: Final = "amx_bf16"
#: Required by oneDNN's converting kernels. Source: oneDNN's documentation, "Data Types": bfloat16 from AVX-512 on.
_AVX512: Final = frozenset({"avx512f", "avx512_f"})
_BFLOAT16_UNITS: Final = frozenset({"avx512_bf16", "avx10_2", "bf16", "svebf16", "sve_bf16"})
#: Names of the instruction sets that oneDNN can be limited to: without AVX-512, without units for bfloat16, and with
#: them but without tiles.
_WITHOUT_AVX512: Final = ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2")
_WITHOUT_UNITS: Final = (*_WITHOUT_AVX512, "avx512_core", "avx512_core_vnni")
_WITHOUT_TILES: Final = ("avx512_core_bf16", "avx512_core_fp16", "avx10_1_512", "avx10_2_512")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of the CPU; empty if neither the system nor torch tells."""
    told = getattr(torch.cpu, "get_capabilities", dict)()
    named = (cpuinfo("flags") or cpuinfo("Features")).split()
    return frozenset(named).union(name for name, there in told.items() if there is True)


def bfloat16_units() -> BFloat16Units:
    """Return how the CPU multiplies bfloat16, within oneDNN's limit on instructions."""
    flags, limit = cpu_flags(), instruction_limit()
    if limit in _WITHOUT_UNITS or _BFLOAT16_UNITS.union({_AMX}).isdisjoint(flags):
        return "none" if limit in _WITHOUT_AVX512 or _AVX512.isdisjoint(flags) else "converted"
    return "amx" if _AMX in flags and limit not in _WITHOUT_TILES else "other"


def has_bfloat16_units() -> bool:
    """Return whether the CPU has instructions that multiply bfloat16; without them FP32 is faster."""
    return bfloat16_units() in ("amx", "other")


def instruction_limit() -> str:
    """Return the instruction set that ``ONEDNN_MAX_CPU_ISA`` limits oneDNN's products to, or "" without a limit.

    Source: oneDNN's documentation, "CPU Dispatcher Control". A name that oneDNN does not know is no limit.
    """
    named = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")).lower()
    return named if named in (*_WITHOUT_UNITS, *_WITHOUT_TILES) else ""


def cache_folder() -> Path:
    """Return the folder of measured costs and compiled C++: ``$FXPREC_CACHE_DIR``, else ``fxprec`` in the user's cache.

    The user's cache is ``$XDG_CACHE_HOME``, else ``~/.cache``.
    """
    own, general = os.environ.get("FXPREC_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(general or Path.home() / ".cache") / "fxprec"


def cpuinfo(key: str) -> str:
    """Return the value of the first line of /proc/cpuinfo that begins with ``key``, or ""."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # no Linux
        return ""
    line = next((line for line in text.splitlines() if line.startswith(key)), "")
    return line.partition(":")[2].strip()
