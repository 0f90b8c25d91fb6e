"""The net below the graphs: torch.autocast in the conversion's dtype, for whatever runs outside of them.

As ``with torch.autocast(device, dtype=low, cache_enabled=False)``, at a fifth of its cost a call, and it knows its own:
a converted module that runs inside the net of another one (nested, or calling itself) is under no autocast of the user.

Without the cache of casts, since its lock is taken around casts that call into Python where tensors are fake: a thread
that captures and one that leaves an autocast region would wait for each other for good.
"""

from __future__ import annotations

import threading

import torch


class _Depth(threading.local):
    nets = 0


_depth = _Depth()


def inside_net() -> bool:
    """Whether the autocast that is on in this thread is the net of a conversion."""
    return _depth.nets > 0


class Net:
    """A context in which autocast is on; one object an entry."""

    __slots__ = ("_before", "_device", "_dtype")

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def __enter__(self) -> None:
        device = self._device
        self._before = (
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )
        self._set(True, self._dtype, False)
        _depth.nets += 1

    def __exit__(self, *_error: object) -> None:
        _depth.nets -= 1
        self._set(*self._before)

    def _set(self, enabled: bool, dtype: torch.dtype, cached: bool) -> None:
        torch.set_autocast_enabled(self._device, enabled)
        torch.set_autocast_dtype(self._device, dtype)
        torch.set_autocast_cache_enabled(cached)
