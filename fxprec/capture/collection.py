"""Python's garbage collector, held back while graphs are made.

A graph is hundreds of thousands of small objects that all stay. The collector, which starts whenever there are 700 new
ones, and walks through older ones again each time that it did so ten times, frees nothing: a third of the time of a
conversion. Ten thousand at a time are walked through once, while they still are in the processor's cache. To turn the
collector off costs a tenth more than that: it then walks through all that is new at the end, in memory.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

__all__ = ["fewer_collections"]

#: New objects that start a collection of them, and such collections that start one of older objects too.
_NEW: Final = 10_000
_OFTEN: Final = 1_000


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Within the block the collector starts seldom, in every thread; one that is off, or starts seldomer, stays so."""
    before = gc.get_threshold()
    if 0 < before[0] < _NEW:
        gc.set_threshold(_NEW, _OFTEN, *before[2:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
