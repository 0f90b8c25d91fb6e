"""Which parameters and buffers are one tensor: a forward may ask (``is``, ``parameters()``), and a graph holds the
answer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

#: What holds tensors, or modules: a dict of a module, and the prefix of the names in it.
Slots = Sequence[tuple[str, Mapping[str, Any]]]


def slots_of(model: nn.Module) -> Callable[[], Slots]:
    """All of a model, which is not kept alive."""
    own = weakref.ref(model)

    def collect() -> Slots:
        modules = () if (now := own()) is None else now.named_modules()
        return [
            (f"{path}." if path else "", held)
            for path, module in modules
            for held in (module._parameters, module._buffers, module._modules)
            if held
        ]

    return collect


class Ties:
    """The ties among some slots, and whether they are as they were.

    Args:
        collect: gives the slots as they are now.
    """

    def __init__(self, collect: Callable[[], Slots]) -> None:
        self._collect = collect
        slots = collect()
        self._first = _first_of_each(slots)
        self._look_at(slots)

    def _look_at(self, slots: Slots) -> None:
        self._held = [held for _, held in slots]
        self._ids = self._ids_now()

    def _ids_now(self) -> list[int]:
        return [*map(id, chain.from_iterable([held.values() for held in self._held]))]

    def hold(self) -> bool:
        """Return whether the ties are the same. As long as the things in the slots are, nothing else is asked."""
        if self._ids_now() == self._ids:
            return True
        slots = self._collect()
        if _first_of_each(slots) != self._first:
            return False
        self._look_at(slots)
        return True

    def change(self) -> str | None:
        """Return what was tied or untied, or None."""
        now = _first_of_each(self._collect())
        for label in {**self._first, **now}:
            before, after = self._first.get(label), now.get(label)
            if before == after:
                continue
            if before is None or after is None:
                return f"{label} was {'added' if before is None else 'deleted'}"
            if before == label:
                return f"{label} and {after} became one"
            return f"{label} and {before} are no longer one"
        return None


def _first_of_each(slots: Slots) -> dict[str, str]:
    """Return for each slot the first one that holds the same thing; a slot that holds None is alone."""
    first: dict[int, str] = {}
    return {
        f"{prefix}{name}": f"{prefix}{name}" if each is None else first.setdefault(id(each), f"{prefix}{name}")
        for prefix, held in slots
        for name, each in held.items()
    }
