"""Name repeated layers as one: ``blocks.0.mlp`` and ``blocks.1.mlp`` are ``blocks.*.mlp``, or ``blocks.0-1.mlp``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Final

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")

#: The numbers in a path: ``blocks.3.experts.0`` has (3, 0).
Numbers = tuple[int, ...]


def fold(path: str) -> str:
    """Return the path with ``*`` for each number."""
    return _NUMBER.sub("*", path)


def numbers_of(path: str) -> Numbers:
    """Return the numbers that ``fold`` leaves out of a path."""
    return tuple(map(int, _NUMBER.findall(path)))


def unfold(pattern: str, numbers: Iterable[Numbers]) -> Iterator[str]:
    """Yield few names that stand for these numbers in a folded path: ``blocks.0-4,6.mlp``; each path is in one."""
    texts = pattern.split("*")
    for ranges in _products(set(numbers)):
        yield "".join(itertools.chain(*zip(texts, [*ranges, ""], strict=True)))


def folded(paths: Iterable[str]) -> list[str]:
    """Return few names for paths, in the order in which they come first: ``["blocks.0-11.mlp", "head"]``."""
    alike: dict[str, list[Numbers]] = {}
    for path in paths:
        alike.setdefault(fold(path), []).append(numbers_of(path))
    return [name for pattern, numbers in alike.items() for name in unfold(pattern, numbers)]


def _products(numbers: set[Numbers]) -> list[list[str]]:
    """Return sets of numbers, as texts, whose products are these tuples."""
    if numbers == {()}:
        return [[]]
    # Tuples that agree behind the first number become one range of first numbers; what is left is split likewise.
    firsts: dict[Numbers, set[int]] = {}
    for first, *rest in numbers:
        firsts.setdefault(tuple(rest), set()).add(first)
    rests: dict[tuple[int, ...], set[Numbers]] = {}
    for rest, found in firsts.items():
        rests.setdefault(tuple(sorted(found)), set()).add(rest)
    return [[_ranges(found), *tail] for found in sorted(rests) for tail in _products(rests[found])]


def _ranges(numbers: tuple[int, ...]) -> str:
    """Write numbers as ranges: ``0-4,6``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
