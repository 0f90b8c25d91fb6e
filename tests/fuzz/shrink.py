"""Smaller cases that still fail: statements and parts are left out as long as something stays wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.operations import FIRST
from tests.fuzz.source import Case

__all__ = ["shrunk"]


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The smallest case found."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(case):
            if fails(candidate):
                case, smaller = candidate, True
                break
    return case


def _candidates(case: Case) -> Iterator[Case]:
    script = case.script
    for size in (4, 1):
        for start in range(0, len(script), size):
            kept = script[:start] + script[start + size :]
            if any(statement.text == FIRST for statement in kept):
                yield replace(case, script=kept)
    for index, parts in enumerate(case.classes):
        for i in range(len(parts)):
            left = parts[:i] + parts[i + 1 :]
            yield _without_owners(case, (*case.classes[:index], left, *case.classes[index + 1 :]))


def _without_owners(case: Case, classes: tuple) -> Case:
    """The case with these classes, without those that none calls and without statements about parts that are gone."""
    called = next((i + 1 for i, parts in enumerate(classes) if all(part.feature for part in parts)), len(classes))
    classes = classes[:called]
    numbers = {0, *(part.number for parts in classes for part in parts)}
    return replace(case, classes=classes, script=tuple(s for s in case.script if s.owner in numbers))
