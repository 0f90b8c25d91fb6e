"""Put a model and the random number generators back as they were before a trace, and say what had moved.

Tracing runs the user's forward once, with stand-ins for tensors. What it writes (a step counter, a cached mask, a list
of statistics, which would hold stand-ins) must not stay; and a graph that leaves the write out would be wrong.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Container
from itertools import filterfalse
from typing import Any, Final

import torch
from torch import nn

from fxprec.capture.containers import Contents, refill, unchanged
from fxprec.capture.guard_values import is_container, is_plain
from fxprec.capture.lookups import PARTS

_STANDARD: Final = frozenset(vars(nn.Module()))
#: Of these, the containers, most of them empty.
_CONTAINERS: Final = tuple(name for name, value in vars(nn.Module()).items() if is_container(value))


class ModelState:
    """A shallow copy of every module's attributes, and of the containers in them, however deep."""

    def __init__(self, root: nn.Module) -> None:
        self._modules: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._filled: list[tuple[str, str, Any, Any]] = []
        self._empty: list[Any] = []
        self._nested = Contents()
        for path, module in root.named_modules():
            attributes = module.__dict__
            self._modules.append((path, attributes, attributes.copy()))
            for name in [name for name in attributes if name not in _STANDARD]:
                value = attributes[name]
                if is_container(value) and not is_plain(value):
                    self._nested.add_nested(value, f"the contents of {_joined(path, name)}")
            values = [*map(attributes.get, _CONTAINERS)]
            self._empty += filterfalse(None, values)
            for name, value in zip(_CONTAINERS, values, strict=True) if any(values) else ():
                if value and is_container(value):
                    self._filled.append((path, name, value, value.copy()))

    def restore(self) -> str | None:
        """Undo every write; the name of the first thing written, or None if nothing was."""
        written: list[str] = []
        for path, attributes, saved in self._modules:
            if not unchanged(attributes, saved):
                written.append(_joined(path, _first_difference(attributes, saved)))
                refill(attributes, saved)
        for path, name, value, saved in self._filled:
            if not unchanged(value, saved):
                written.append(_described(path, name, value, saved))
                refill(value, saved)
        if any(self._empty):
            ids = {*map(id, self._empty)}
            for path, _, saved in self._modules:
                for name, value in saved.items():
                    if id(value) in ids and value:
                        written.append(_described(path, name, value, {}))
                        value.clear()
        if (nested := self._nested.restore()) is not None:
            written.append(nested)
        return written[0] if written else None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _described(path: str, name: str, value: Any, saved: Any) -> str:
    if name in PARTS:
        return _joined(path, _first_difference(value, saved))
    return f"the contents of {_joined(path, name)}"


def _first_difference(now: dict[str, Any], saved: dict[str, Any]) -> str:
    return next(
        name for name in {**saved, **now} if name not in now or name not in saved or now[name] is not saved[name]
    )


class RandomState:
    """The global random number generators: torch's (every initialized CUDA device too), Python's, numpy's if imported.

    Only numbers that are drawn while tracing move them: these would be constants in the graph. A traced dropout is not
    run, and moves nothing. Nothing waits for a device.

    Args:
        only_torch: no others than torch's, whose state is had a hundred times as fast.
    """

    def __init__(self, only_torch: bool = False) -> None:
        self._states: list[tuple[str, Any, Callable[[], Any], Callable[[Any], Any]]] = []
        self._add("torch", torch.get_rng_state, torch.set_rng_state)
        if torch.cuda.is_initialized():
            self._add("torch.cuda", torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)
        if only_torch:
            return
        self._add("random", random.getstate, random.setstate)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._add("numpy.random", numpy.random.get_state, numpy.random.set_state)

    def _add(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._states.append((name, get(), get, put))

    def restore(self, expected: Container[str] = ()) -> str | None:
        """Put the generators back; the name of the first one that had moved and is not ``expected`` to, or None."""
        moved: list[str] = []
        for name, state, get, put in self._states:
            if not _equal(get(), state):
                put(state)
                moved.append(name)
        return next((name for name in moved if name not in expected), None)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b
