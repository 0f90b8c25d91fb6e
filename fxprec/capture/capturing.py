"""Frames every capture: one at a time, with few garbage collections, and an exception where it cannot be done.

Python's garbage collector is held back while graphs are made. A graph is hundreds of thousands of small objects that
all stay. The collector, which starts whenever there are 700 new ones, and walks through older ones again each time that
it did so ten times, frees next to nothing: a third of the time of a conversion. Here a million start it, and those that
are there at the end are old at once: to walk through them once more, cold, takes a tenth.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

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


@contextlib.contextmanager
def replaced(replacements: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of modules and classes, and take every one back on the way out, whatever is raised."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.callback(_restore, owner, name, vars(owner).get(name, _restore))
            setattr(owner, name, value)
        yield


def _restore(owner: ModuleType | type, name: str, value: Any) -> None:
    if value is not _restore:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


#: Owner, name, and what takes the place of the attribute of that name.
Replacement = tuple[Any, str, Any]


def instead_of(owner: Any, name: str, call: Callable[..., Any]) -> Replacement:
    """Return the replacement of a method by ``call(original, *arguments)``, of a static one by a static one."""
    original, is_static = getattr(owner, name), isinstance(inspect.getattr_static(owner, name), staticmethod)

    # dynamo names its guards after the methods that make them.
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    return owner, name, staticmethod(method) if is_static else method


def before(owner: Any, name: str, first: Callable[..., None]) -> Replacement:
    """Return the replacement of a method before which ``first`` is called, with the same arguments."""

    def both(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return original(*args, **kwargs)

    return instead_of(owner, name, both)
