"""Containers, and namespaces of classes, as they were: what a trace wrote there is found, and undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

from fxprec.capture.guard_values import contents, is_container

#: What people call a container; or tells that from what it holds now and what it held.
_Label = str | Callable[[Any, Any], str]


class Contents:
    """Shallow copies of containers; of what is in them, too, once it is added."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Any, _Label]] = {}

    def add(self, container: Any, label: _Label = "") -> None:
        """Note what a list, dict, set or deque holds now, or a class; ``label`` names it, or what became of it."""
        if id(container) in self._kept or isinstance(container, tuple | frozenset):
            return
        if isinstance(container, type):
            self._kept[id(container)] = container, dict(vars(container)), label or container.__qualname__
        else:
            self._kept[id(container)] = container, container.copy(), label or f"a {type(container).__name__}"

    def add_nested(self, container: Any, label: _Label) -> None:
        """``add``, with every container in it."""
        if id(container) in self._kept:
            return
        self.add(container, label)
        for element in contents(container):
            if is_container(element):
                self.add_nested(element, label)

    def restore(self) -> str | None:
        """Undo what was written; the name of the first thing written, or None."""
        written: str | None = None
        for container, saved, label in self._kept.values():
            of_class = isinstance(container, type)
            now = dict(vars(container)) if of_class else container
            if not unchanged(now, saved):
                written = written or (label if isinstance(label, str) else label(now, saved))
                (_refill_class if of_class else refill)(container, saved)
        return written


def unchanged(now: Any, saved: Any) -> bool:
    """Return whether a container holds the very same things in the same order."""
    if len(now) != len(saved):
        return False
    if not saved:
        return True
    if isinstance(now, set):
        return now == saved
    if isinstance(now, dict | Mapping):
        return all(map(is_, now, saved)) and all(map(is_, now.values(), saved.values()))
    return all(map(is_, now, saved))


def refill(container: Any, saved: Any) -> None:
    """Make a container hold what it held."""
    container.clear()
    if isinstance(container, dict | set):
        container.update(saved)
    else:
        container.extend(saved)


def _refill_class(cls: type, saved: Mapping[str, Any]) -> None:
    for name in {**vars(cls)}:
        if name not in saved:
            delattr(cls, name)
    for name, value in saved.items():
        if name not in vars(cls) or vars(cls)[name] is not value:
            setattr(cls, name, value)
