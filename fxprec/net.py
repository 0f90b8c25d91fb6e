"""The net below the graphs: torch.autocast in the conversion's dtype, for whatever runs outside of them.

The same as ``with torch.autocast(device, dtype=low)``, at a fifth of its cost a call, and it knows its own: a converted
module that runs inside the net of another one (nested, or calling itself) is not under an autocast of the user.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["AutocastOff", "Net", "inside_net"]


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
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, self._dtype)
        torch.set_autocast_cache_enabled(torch._C._get_tracing_state() is None)  # a cached cast would enter the trace
        torch.autocast_increment_nesting()
        _depth.nets += 1

    def __exit__(self, *_error: object) -> None:
        device = self._device
        enabled, dtype, cached = self._before
        _depth.nets -= 1
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)


class AutocastOff:
    """A context in which autocast is off on one device, as our graphs want it: their casts are their own."""

    __slots__ = ("_before", "_device")

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before = torch.is_autocast_enabled(self._device)
        torch.set_autocast_enabled(self._device, False)

    def __exit__(self, *_error: object) -> None:
        torch.set_autocast_enabled(self._device, self._before)
