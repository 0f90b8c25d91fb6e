"""What a launch adds to a kernel's code, from its Triton IR: how often loops run, which tensors are read and written.

::

    trips(ttir, {"rows": 16384}, grid=(528, 1, 1))     # [31.0]: a mean over programs, loops in their order
    touched(ttir)                                      # {"x_ptr": (1, 0), "y_ptr": (0, 1)}: loads, stores
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

__all__ = ["touched", "trips"]

_LOOP: Final = re.compile(r"\s*(?:%[\w:]+ = )?scf\.for (%\w+) = (%[\w#]+) to (%[\w#]+) step (%[\w#]+)")
_IF: Final = re.compile(r"\s*(?:%[\w:]+ = )?scf\.if (%[\w#]+)")
_VALUE: Final = re.compile(r"^\s*(%\w+)(?::\d+)? = ([\w.]+) (.*)$")
_POINTER: Final = re.compile(r"(%\w+): !tt\.ptr")
_USED: Final = re.compile(r"%\w+")
_CARRIED: Final = re.compile(r"(%\w+) = (%\w+)")
_NUMBER: Final = re.compile(r"(?:dense<)?(-?\d+|true|false)")
_AXES: Final = "xyz"
#: Programs that are asked, where there are more.
_ASKED: Final = 24


def _quotient(a: int, b: int) -> int:
    return int(a / b) if b and abs(a) < 2**52 else a // (b or 1)


_COMPARED: Final[Mapping[str, Callable[[int, int], bool]]] = MappingProxyType(
    {
        "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "slt": lambda a, b: a < b, "sle": lambda a, b: a <= b,
        "sgt": lambda a, b: a > b, "sge": lambda a, b: a >= b, "ult": lambda a, b: a < b, "ule": lambda a, b: a <= b,
        "ugt": lambda a, b: a > b, "uge": lambda a, b: a >= b,
    }
)  # fmt: skip
_COMPUTED: Final[Mapping[str, Callable[[int, int], int]]] = MappingProxyType(
    {
        "arith.addi": lambda a, b: a + b, "arith.subi": lambda a, b: a - b, "arith.muli": lambda a, b: a * b,
        "arith.divsi": _quotient, "arith.remsi": lambda a, b: a - b * _quotient(a, b), "arith.minsi": min,
        "arith.maxsi": max, "arith.andi": lambda a, b: a & b, "arith.ori": lambda a, b: a | b,
        "arith.xori": lambda a, b: a ^ b, "arith.divui": _quotient, "arith.remui": lambda a, b: a % (b or 1),
    }
)  # fmt: skip
_SAME: Final = ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast")


def trips(
    ttir: str, arguments: Mapping[str, int], grid: Sequence[int], unknown: float | None = None
) -> tuple[float, ...]:
    """How often each loop runs each time that one comes to it, a mean over programs; loops in the order of the text.

    Args:
        arguments: the kernel's whole numbers. Addresses count as 0.
        unknown: what a loop counts whose ends come from memory.

    Raises:
        ValueError: there is such a loop, and ``unknown`` is None.
    """
    lines = [line for line in ttir.splitlines() if " = " in line or "scf." in line or line.strip().startswith("}")]
    count = sum("scf.for " in line for line in lines)
    if not count:
        return ()
    total = grid[0] * grid[1] * grid[2]
    asked = sorted({round(n * (total - 1) / max(1, _ASKED - 1)) for n in range(_ASKED)}) if total > 1 else [0]
    runs: list[list[float]] = [[] for _ in range(count)]
    for number in asked:
        place = (number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1]))
        for loop, times in _of_program(lines, arguments, grid, place, unknown):
            runs[loop].append(times)
    return tuple(sum(each) / len(asked) for each in runs)


def _of_program(
    lines: Sequence[str], arguments: Mapping[str, int], grid: Sequence[int], place: Sequence[int], unknown: float | None
) -> Iterator[tuple[int, float]]:
    """(loop, how often it runs in one program); of a loop in a loop when the outer one runs for the first time."""
    known: dict[str, int | None] = {f"%{name}": value for name, value in arguments.items()}
    skips: list[bool] = []  # for each block that is open: whether it does not run
    loops = 0
    for line in lines:
        head = line.strip()
        if head.startswith("}"):
            if skips:
                closed = skips.pop()
                if "else" in head:
                    skips.append(not closed)
            continue
        if found := _LOOP.match(line):
            variable, first, last, step = found.groups()
            begin, end, by = (known.get(each) for each in (first, last, step))
            if any(skips):
                times = 0.0
            elif begin is not None and end is not None and by:
                times = max(0, -((begin - end) // by))
            elif unknown is not None:
                times = unknown
            else:
                raise ValueError(f"how often a loop runs comes from memory: {head}")
            yield loops, times
            known[variable] = begin
            loops += 1
            skips.append(False)
        elif found := _IF.match(line):
            condition = known.get(found[1])
            skips.append(condition == 0)
        elif found := _VALUE.match(line):
            name, op, rest = found.groups()
            known[name] = _value(op, rest, known, grid, place)
        elif head.endswith("{"):  # of a function, or of what a reduction computes
            skips.append(False)


def _value(
    op: str, rest: str, known: Mapping[str, int | None], grid: Sequence[int], place: Sequence[int]
) -> int | None:
    """A whole number; None: it is none, or comes from memory."""
    if op == "tt.get_program_id":
        return place[_AXES.index(rest[0])]
    if op == "tt.get_num_programs":
        return grid[_AXES.index(rest[0])]
    if op == "tt.ptr_to_int":
        return 0
    if op == "arith.constant":
        number = _NUMBER.match(rest)
        return None if number is None or "f" in rest.partition(":")[2].partition("loc")[0] else _number(number[1])
    used = [known.get(each) for each in re.findall(r"%[\w#]+", rest.partition(" loc(")[0])]
    if op in _SAME and used:
        return used[0]
    if op == "arith.select" and len(used) == 3 and used[0] is not None:
        return used[1] if used[0] else used[2]
    if len(used) != 2:
        return None
    a, b = used
    if a is None or b is None:
        return None
    if op == "arith.cmpi":
        return int(_COMPARED[rest.partition(",")[0]](a, b))
    return _COMPUTED[op](a, b) if op in _COMPUTED else None


def _number(text: str) -> int:
    return int(text == "true") if text in ("true", "false") else int(text)


def touched(ttir: str) -> dict[str, tuple[int, int]]:
    """Of each pointer among the arguments how many loads and stores in the text go through it."""
    origins: dict[str, set[str]] = {}
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for line in ttir.splitlines():
        if "tt.func" in line:
            origins.update((name, {name[1:]}) for name in _POINTER.findall(line))
            continue
        text = line.partition(" loc(")[0]
        kind = 1 if "tt.store " in text or "tt.atomic" in text else 0 if "tt.load " in text else None
        if kind is not None:
            address = _USED.search(text.partition("tt.")[2])
            for origin in origins.get(address[0], ()) if address else ():
                found[origin][kind] += 1
        elif "scf.for " in text:
            for inner, outer in _CARRIED.findall(text.partition("iter_args")[2]):
                origins[inner] = set(origins.get(outer, ()))
            if made := _VALUE.match(text):
                origins[made[1]] = set().union(*(origins.get(each, set()) for each in _USED.findall(made[3])))
        elif (made := _VALUE.match(text)) and "!tt.ptr" in text:
            origins[made[1]] = set().union(*(origins.get(each, set()) for each in _USED.findall(made[3])))
    return {name: (loads, stores) for name, (loads, stores) in found.items()}
