"""The net below the graphs: torch.autocast in the conversion's dtype, for whatever runs outside of them.

As ``with torch.autocast(device, dtype=low, cache_enabled=False)``, at a fifth of its cost a call, and it knows its own:
a converted module that runs inside the net of another one (nested, or calling itself) is under no autocast of the user.

Without the cache of casts, since its lock is taken around casts that call into Python where tensors are fake: a thread
that captures and one that leaves an autocast region would wait for each other for good.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

import torch

#: Begins the reason of what runs outside of the graphs without autocast.
RUNS_FP32: Final = "it runs in FP32, since"
#: The reason of what runs outside of the graphs within the user's own autocast region.
RUNS_AS_TOLD: Final = "it runs as the user's own torch.autocast says"


class _Nets(threading.local):
    def __init__(self) -> None:
        self.open: list[Net] = []


_nets = _Nets()


def inside_net() -> bool:
    """Return whether the autocast that is on in this thread is a conversion's fallback."""
    return bool(_nets.open)


def under_others() -> bool:
    """Return whether autocast is not as the innermost net set it: the user's own region is around."""
    return bool(_nets.open) and not _nets.open[-1].is_on()


def turn_off() -> None:
    """Have autocast off for the rest of the innermost net."""
    if _nets.open:
        net = _nets.open[-1]
        net.enabled = False
        net.set(False, *net.before[1:])


@contextlib.contextmanager
def without_net() -> Iterator[None]:
    """Have autocast off within the block, and its settings as they were before the first net of each device."""
    first: dict[str, Net] = {}
    for net in _nets.open:
        first.setdefault(net._device, net)
    now = [(net, net.state()) for net in first.values()]
    # The outermost last: all devices share one setting of the cache of casts, and only the outermost net knows how that
    # was before any net.
    for net in reversed(first.values()):
        net.set(False, *net.before[1:])
    try:
        yield
    finally:
        for net, state in now:
            net.set(*state)


class Net:
    """A context in which autocast is on; a new object for each ``with``, since it keeps what was before."""

    __slots__ = ("_device", "_dtype", "before", "enabled")

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def __enter__(self) -> None:
        # As it was before, whoever had set it: nets nest, and a user's region may be around.
        self.before, self.enabled = self.state(), True
        self.set(True, self._dtype, False)
        _nets.open.append(self)

    def __exit__(self, *_error: object) -> None:
        _nets.open.pop()
        self.set(*self.before)

    def state(self) -> tuple[bool, torch.dtype, bool]:
        """Return whether autocast is on, its dtype, and whether it caches casts."""
        device = self._device
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return enabled, dtype, torch.is_autocast_cache_enabled()

    def is_on(self) -> bool:
        """Return whether autocast is as this net set it."""
        if not self.enabled:
            return not torch.is_autocast_enabled(self._device)
        return torch.is_autocast_enabled(self._device) and torch.get_autocast_dtype(self._device) is self._dtype

    def set(self, enabled: bool, dtype: torch.dtype, cached: bool) -> None:
        torch.set_autocast_enabled(self._device, enabled)
        torch.set_autocast_dtype(self._device, dtype)
        torch.set_autocast_cache_enabled(cached)
