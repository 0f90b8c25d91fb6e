"""Compares a value with what it was at capture: by type and value, and never by ``==`` alone."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, defaultdict, deque
from typing import Any, Final

import torch

#: Values that cannot change: what they are can be compared at any time.
PLAIN: Final = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        slice,
        type(...),
        type(NotImplemented),
        object,  # a sentinel
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
    }
)
_SEQUENCES: Final = frozenset({tuple, list, set, frozenset, deque})
_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict})
CONTAINERS: Final = _SEQUENCES | _MAPPINGS


def is_container(value: Any) -> bool:
    """Return whether a value is compared by what it holds: the built-in containers themselves, and named tuples.

    Not their other subclasses, which are compared by identity.
    """
    return type(value) in CONTAINERS or _is_named_tuple(value)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def is_plain(value: Any) -> bool:
    """Return whether a value is plain, or a tuple of plain values."""
    kind = type(value)
    if kind is tuple or _is_named_tuple(value):
        return all(map(is_plain, value))
    return kind in PLAIN or isinstance(value, enum.Enum)


def snapshot(value: Any) -> Any:
    """Return what a later value is compared with: the value, or a copy of a container and of those in it.

    The ``maxlen`` of a deque and the ``default_factory`` of a dict are left out: they matter for writes alone.
    """
    kind = type(value)
    if kind in _MAPPINGS:
        copied = value.copy()
        copied.update({key: snapshot(element) for key, element in value.items()})
        return copied
    if kind in _SEQUENCES and not is_plain(value):
        return kind(map(snapshot, value)) if kind not in (set, frozenset) else kind(value)
    if _is_named_tuple(value):
        return tuple.__new__(kind, map(snapshot, value))  # type: ignore[arg-type]  # past a constructor of its own
    return value


def same(now: Any, then: Any) -> bool:
    """Return whether ``now`` is what ``then``, a snapshot, was taken of, or no program can tell it from that.

    Numbers are compared with their types and the sign of a zero, containers with all that is in them; any other
    object must be the very same.
    """
    if now is then:
        # A container that may change is no snapshot of itself: nobody knows what it held.
        return type(now) is frozenset or not is_container(now) or is_plain(now)
    kind, was = type(now), type(then)
    if kind is was and kind in _MAPPINGS:
        return len(now) == len(then) and all(
            same(key, other) and same(value, expected)
            for (key, value), (other, expected) in zip(now.items(), then.items(), strict=True)
        )
    # A bool equals an int, and a float an int.
    if kind is not was:
        return False
    if kind is float:
        return (now == then and math.copysign(1, now) == math.copysign(1, then)) or (now != now and then != then)
    if kind is complex:
        return same(now.real, then.real) and same(now.imag, then.imag)
    # Range(0) == range(0, 0, 2), slice(0) == slice(0.0).
    if kind in (range, slice):
        return all(map(same, _bounds(now), _bounds(then)))
    # Equal elements may differ (True and 1): each is compared with the one that it equals, which the dict gives back.
    if kind in (set, frozenset):
        kept = {each: each for each in then}
        return len(now) == len(then) and all(each in kept and same(each, kept[each]) for each in now)
    if kind in (tuple, list, deque, torch.Size) or _is_named_tuple(now):
        return len(now) == len(then) and all(map(same, now, then))
    if kind.__module__ == "numpy" and hasattr(kind, "tobytes") and not hasattr(kind, "__setitem__"):  # a scalar
        return now.dtype == then.dtype and now.tobytes() == then.tobytes()
    return kind in PLAIN and kind is not object and now == then


def _bounds(value: Any) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def contents(container: Any) -> list[Any]:
    """Return keys and values, or elements."""
    return [*container, *container.values()] if type(container) in _MAPPINGS else [*container]
