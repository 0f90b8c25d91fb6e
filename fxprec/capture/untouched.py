"""Put a model and the random number generators back as they were before a trace, and say what had moved.

Tracing runs the user's forward once, with proxies for tensors. What it writes (a step counter, a cached mask, a list
of statistics, which would hold proxies) must not stay; and a graph that leaves the write out would be wrong.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
from torch import nn

from fxprec.capture.containers import Contents
from fxprec.capture.guard_values import is_container, is_plain
from fxprec.capture.lookups import PARTS


class ModelState(Contents):
    """A shallow copy of every module's attributes, and of the containers in them, however deep."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        named = [*root.named_modules()]
        for path, module in named:
            self.add(module.__dict__, partial(_different, path))
        for path, module in named:
            for name, value in module.__dict__.items():
                if is_container(value) and not (value and is_plain(value)):
                    of_parts = name in PARTS
                    self.add_nested(value, partial(_different, path) if of_parts else partial(_contents_of, path, name))


def _contents_of(path: str, name: str, _now: Any, _saved: Any) -> str:
    return f"the contents of {_joined(path, name)}"


def _different(path: str, now: dict[str, Any], saved: dict[str, Any]) -> str:
    """The first attribute, or part, that is another."""
    names = (name for name in {**saved, **now} if name not in now or name not in saved or now[name] is not saved[name])
    return _joined(path, next(names))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class RandomState:
    """The global random number generators: torch's (every initialized CUDA device too), Python's, numpy's if imported.

    Only numbers that are drawn while tracing move them: these would be constants in the graph. A traced dropout is not
    run, and moves nothing. Nothing waits for a device.

    Args:
        only_torch: no others than torch's, whose state is had a hundred times as fast.
    """

    def __init__(self, only_torch: bool = False) -> None:
        generators: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
            ("torch", torch.get_rng_state, torch.set_rng_state)
        ]
        if torch.cuda.is_initialized():
            generators.append(("torch.cuda", torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
        if not only_torch:
            generators.append(("random", random.getstate, random.setstate))
            if (numpy := sys.modules.get("numpy")) is not None:
                generators.append(("numpy.random", numpy.random.get_state, numpy.random.set_state))
        self._states = [(name, get(), get, put) for name, get, put in generators]

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
