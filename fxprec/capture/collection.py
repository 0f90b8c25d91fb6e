"""Python's garbage collector, held back while graphs are made.

A graph is hundreds of thousands of small objects that all stay. The collector, which starts whenever there are many new
ones, walks all objects of the process again and again and frees nothing: a third of the time of a conversion. It would
also walk all that is new as soon as it runs again, a twentieth: so what is young then counts as old.
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
        _grow_old()
        gc.enable()


def _grow_old() -> None:
    """Move every object into the oldest generation, without a look at it: freezing and thawing does that.

    Not where objects are frozen already, which would thaw: a program's own, or those of Python 3.12's start.
    """
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
