"""Frames every capture: one at a time, with few garbage collections, and an exception where it cannot be done.

Python's garbage collector is held back while graphs are made. A graph is hundreds of thousands of small objects that
all stay. The collector, which starts whenever there are 700 new ones, and walks through older ones again each time that
it did so ten times, frees next to nothing: a third of the time of a conversion. Here a million start it, and those that
are there at the end are old at once: to walk through them once more, cold, takes a tenth.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final

#: Held while a forward is traced or compiled. Both reach into state of the whole process: tracing patches nn.Module,
#: compiling patches dynamo's configuration, and dynamo must see neither patch of the other.
CAPTURING: Final = threading.RLock()


class CaptureDeclined(Exception):
    """Refusal of static capture to take a model or a call; the model is as it was.

    Attributes:
        reason: one clause that says where.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


#: New objects that start a collection of them, and such collections that start one of older objects too.
_NEW: Final = 1_000_000
_OFTEN: Final = 1_000


class _Aging:
    """Makes every object one of the oldest generation, at no cost; not where the user froze some, which would thaw.

    To count the frozen ones takes as long as to walk through them: once tells that somebody freezes here.
    """

    def __init__(self) -> None:
        self._allowed = True

    def __call__(self) -> None:
        self._allowed = self._allowed and not gc.get_freeze_count()
        if self._allowed:
            gc.freeze()
            gc.unfreeze()


_age_all: Final = _Aging()


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Within the block the collector starts seldom, in every thread; one that is off, or starts seldomer, stays so."""
    before = gc.get_threshold()
    if 0 < before[0] < _NEW:
        gc.set_threshold(_NEW, _OFTEN, *before[2:])
    try:
        yield
    finally:
        if gc.get_threshold() != before:
            _age_all()
        gc.set_threshold(*before)
