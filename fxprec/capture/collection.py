"""Python's garbage collector, held back while graphs are made.

A graph is hundreds of thousands of small objects that all stay. The collector, which starts whenever there are many new
ones, walks all objects of the process again and again and frees nothing: a third of the time of a conversion.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["no_collection"]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Within the block nothing is collected, in no thread; afterwards the collector runs again, if it did before."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
