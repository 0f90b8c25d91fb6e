"""Memory of the host between steps: what malloc gives back to the system is faulted in again by the next step."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import warnings
from typing import Final

from fxprec.errors import UnusedSettingWarning

#: Of malloc.h: M_TRIM_THRESHOLD, and M_MMAP_MAX (blocks that lie alone, and go when they are freed).
_KEPT: Final = ((-1, 2**31 - 1), (-4, 0))
#: Bytes of the largest block, nearly, by which glibc moves its thresholds.
_BLOCK: Final = 31 << 20


@functools.cache
def keep_some_memory() -> None:
    """Have glibc's malloc keep more of what is freed, as after any large tensor; once a process (cached).

    On top of its heap it keeps twice the largest block of at most 32 MB that was freed so far, and smaller blocks lie
    on the heap, unless the user set its thresholds. Such a block comes and goes here, of which nobody touches a page.
    ``convert`` does it on a CPU: steps of small models faulted the same pages in again and again, ours some more of
    them than autocast's. With another malloc nothing happens.

    Source: mallopt(3), "dynamic mmap threshold".
    """
    with contextlib.suppress(MemoryError):
        bytes(_BLOCK)  # zeros, which the system gives unasked: calloc


def keep_memory() -> bool:
    """Have the C library's malloc keep what is freed, in this process and from now on, for training on a CPU.

    Otherwise what lies free on top of the heap goes back to the system at the end of a step, and each page of it is
    cleared again in the next: of steps of some ten milliseconds that can be a third, whatever trains (``python -m
    benchmarks alone``). ``convert`` has 62 MB on top kept; of larger models' steps this keeps all. The process then
    holds as much as it ever held at once. jemalloc and tcmalloc, preloaded, keep memory by themselves.

    Returns:
        whether malloc was told so. Where it is not glibc's a warning says so, ``UnusedSettingWarning``.

    Source: mallopt(3); PyTorch's performance tuning guide, "Switch memory allocator".
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    told = mallopt is not None and all(mallopt(option, value) == 1 for option, value in _KEPT)
    if not told:
        warnings.warn(
            "keep_memory() changes nothing: malloc here is not glibc's. Preload jemalloc or tcmalloc, which keep freed "
            "memory by themselves",
            UnusedSettingWarning,
            stacklevel=2,
        )
    return told
