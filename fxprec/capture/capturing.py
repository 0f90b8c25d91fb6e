"""Frames every capture: one at a time, with few garbage collections, and an exception where it cannot be done.

Python's garbage collector is held back while graphs are made. A graph is hundreds of thousands of small objects that
all stay. As it is, the collector starts whenever there are 700 new ones, and each tenth time walks through older ones,
too: that takes a third of the time of a conversion, and frees next to nothing. Here it starts at a million new objects.
At the end all objects are moved to the oldest generation: to walk through the new ones once more would take a tenth of
the time of the conversion.
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
    """Moves all objects to the oldest generation, by ``gc.freeze`` and ``gc.unfreeze``, which costs nothing.

    Not where the user froze some, which would thaw. To count frozen objects is to walk through them: once some were
    found, nobody counts again.
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
    threshold = gc.get_threshold()
    if 0 < threshold[0] < _NEW:
        gc.set_threshold(_NEW, _OFTEN, *threshold[2:])
    try:
        yield
    finally:
        if gc.get_threshold() != threshold:
            _age_all()
        gc.set_threshold(*threshold)


@contextlib.contextmanager
def replaced(replacements: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of modules and classes, and take every one back on the way out, whatever is raised."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.callback(_restore, owner, name, vars(owner).get(name, _ABSENT))
            setattr(owner, name, value)
        yield


_ABSENT: Final = object()


def _restore(owner: ModuleType | type, name: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


#: Owner, name, and what takes the place of the attribute of that name.
Replacement = tuple[Any, str, Any]


def instead_of(owner: Any, name: str, call: Callable[..., Any]) -> Replacement:
    """Return the replacement of a method by ``call(original, *arguments)``, of a static one by a static one."""
    original, is_static = getattr(owner, name), isinstance(inspect.getattr_static(owner, name), staticmethod)

    # ``wraps`` keeps the name: dynamo names its guards after the methods that make them.
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
