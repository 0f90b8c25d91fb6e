"""Intervals of all integers in a kernel's Triton IR, from its grid and arguments: whether one leaves its type.

Numbers from memory, and what Philox makes of indices (after ``trunci``), have none, nor has what follows from them, but
for a remainder.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

__all__ = ["Integers", "Interval", "integers"]

Interval: TypeAlias = tuple[int, int]

_LINE: Final = re.compile(r"^\s*(%[\w:#]+) = ([\w.]+) (.*)$")
_LOOP: Final = re.compile(r"\s*(?:%[\w:]+ = )?scf\.for (%\w+) = (%\w+) to (%\w+) step (%\w+)")
_TYPE: Final = re.compile(r"i(\d+)>?$")
_SAME: Final = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "arith.extsi")
_AXES: Final = "xyz"


def _divided(x: int, y: int) -> int:
    return 0 if y == 0 else int(x / y) if abs(x) < 2**52 else x // y


_MONOTONE: Final[Mapping[str, Callable[[int, int], int]]] = {
    "arith.addi": lambda x, y: x + y, "arith.subi": lambda x, y: x - y, "arith.muli": lambda x, y: x * y,
    "arith.divsi": _divided, "arith.minsi": min, "arith.maxsi": max,
}  # fmt: skip


@dataclass(frozen=True)
class Integers:
    """What is known of a kernel's integers.

    Attributes:
        known: name of a value -> its interval.
        wrong: lines whose result may leave its type.
        unknown: offsets that are added to pointers, of 32 bits, of which nothing is known.
        largest: of the offsets that are added to pointers, of which something is known.
    """

    known: dict[str, Interval] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    largest: int = 0


def integers(
    ttir: str, arguments: Mapping[str, int], grid: Sequence[int], facts: Mapping[str, Interval] | None = None
) -> Integers:
    """Of a kernel that is launched with these numbers on a grid of so many programs.

    Args:
        facts: name of a variable of the kernel -> what is known of it, where it comes from memory.
    """
    known: dict[str, Interval] = {f"%{name}": (value, value) for name, value in arguments.items()}
    wrong: list[str] = []
    unknown: list[str] = []
    largest = 0
    for line in ttir.splitlines():
        line = re.sub(r"\s*loc\(.*\)$", "", line)
        if loop := _LOOP.match(line):
            variable, first, last, step = loop.groups()
            known.pop(variable, None)
            if first in known and last in known:
                known[variable] = (known[first][0], max(known[first][0], known[last][1] - 1))
                bits = int(re.findall(r": i(\d+) ", line)[-1])
                if step in known and known[last][1] + known[step][1] >= 2 ** (
                    bits - 1
                ):  # the last step leaves the loop
                    wrong.append(line)
            continue
        if not (match := _LINE.match(line)):
            continue
        name, op, rest = match.groups()
        used = re.findall(r"%[\w#]+", rest)
        if op == "tt.addptr":
            if used[1] in known:
                largest = max(largest, known[used[1]][1])
            elif rest.split(",")[-1].strip().rstrip(">").endswith("i32"):
                unknown.append(line.strip())
        found = (facts or {}).get(re.sub(r"_\d+$", "", name[1:]))
        if found is None:
            found = _interval(op, rest, [known.get(each) for each in used], grid)
        known.pop(name, None)
        if found is None:
            continue
        known[name] = found
        bits = _TYPE.search(rest.replace(" ", ""))
        if bits and not -(2 ** (int(bits[1]) - 1)) <= found[0] <= found[1] < 2 ** (int(bits[1]) - 1):
            wrong.append(line.strip())
    return Integers(known, wrong, unknown, largest)


def _interval(op: str, rest: str, given: list[Interval | None], grid: Sequence[int]) -> Interval | None:
    if op == "tt.get_program_id":
        return 0, grid[_AXES.index(rest[0])] - 1
    if op == "tt.get_num_programs":
        return grid[_AXES.index(rest[0])], grid[_AXES.index(rest[0])]
    if op == "arith.constant":
        number = re.match(r"(?:dense<)?(-?\d+)>? : (?:tensor<[\dx]+x?)?i\d+", rest)
        return (int(number[1]), int(number[1])) if number else None
    if op == "tt.make_range":
        end, start = (int(re.search(rf"{word} = (\d+)", rest)[1]) for word in ("end", "start"))  # type: ignore[index]
        return start, end - 1
    if op in _SAME:
        return given[0]
    if op == "arith.select":
        return _union(given[-2:])
    if len(given) != 2:
        return None
    a, b = given
    if op == "arith.remsi" and b is not None:
        most = max(map(abs, b)) - 1
        return (0 if a is not None and a[0] >= 0 else -most), most if a is None else min(most, max(map(abs, a)))
    if op not in _MONOTONE or a is None or b is None:
        return None
    ends = [_MONOTONE[op](x, y) for x, y in itertools.product(a, b)]
    return min(ends), max(ends)


def _union(given: Sequence[Interval | None]) -> Interval | None:
    there = [each for each in given if each is not None]
    return (min(low for low, _ in there), max(high for _, high in there)) if len(there) == len(given) else None
