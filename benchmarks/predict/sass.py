"""SASS as a warp goes through it: its instructions, what they wait for, and its loops.

::

    path = path_of(disassembled(cubin))
    loops(path)                       # how many loops it has, which are numbered in the order of their heads
    flat(path, trips)                 # its instructions, each with how often it runs where loops run so often

Volta and what came after it have control bits in the 128 bits of an instruction (Jia et al., "Dissecting the NVIDIA
Volta GPU Architecture via Microbenchmarking", 2018, table 2.1): how many cycles until the warp's next one, which of six
barriers it sets and which it waits for. With these a warp's time follows without looking at registers.

Of branches forward, a path goes where more is done: into loops, past calls (the slow ways of divisions).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

__all__ = ["Instruction", "Loop", "Path", "SassError", "flat", "loops", "path_of"]


class SassError(Exception):
    """Code whose way is not found."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a warp.

    Attributes:
        op: its name, with what follows after dots: "LDG.E.128".
        unit: which part of a multiprocessor computes it; "" for branches and what only the issue takes.
        width: bytes that each thread moves, of an access to memory.
        stall: cycles until the warp's next instruction.
        sets: barriers (0 to 5) that are up until the result is there, and until operands are read; -1: none.
        waits: a bit for each barrier that must be down.
        groups: of ``DEPBAR``: how many groups of copies may be on their way; else -1.
    """

    op: str
    unit: str
    width: int
    stall: int
    sets: tuple[int, int]
    waits: int
    groups: int = -1

    @property
    def name(self) -> str:
        return self.op.partition(".")[0]


@dataclass(frozen=True)
class Loop:
    """``number``: of the loop, in the order of heads, outer ones first."""

    number: int
    body: Path


Path: TypeAlias = tuple["Instruction | Loop", ...]

#: Unit -> the instructions that it computes.
UNITS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fma": "FFMA FADD FMUL IMAD HFMA2 HADD2 HMUL2 IDP",
        "alu": (
            "IADD3 LOP3 SHF ISETP FSETP FMNMX IMNMX VIMNMX VIADD VIADDMNMX SEL FSEL MOV PRMT LEA IABS PLOP3 P2R R2P "
            "F2FP I2FP CS2R FCHK BMSK SGXT VOTE VOTEU HSETP2 HMNMX2 LOP SHL SHR FSET IADD MOV32I FSWZADD"
        ),
        "xu": "MUFU I2F F2I F2F FRND POPC FLO BREV",
        "shuffle": "SHFL",
        "shared": "LDS STS ATOMS LDSM",
        "load": "LDG LD",
        "copy": "LDGSTS",
        "store": "STG ST RED ATOM ATOMG REDG",
        "local": "LDL STL",
        "constant": "LDC ULDC S2R S2UR R2UR",
        "fp64": "DADD DMUL DFMA DSETP",
        "barrier": "BAR",
    }
)
_UNIT: Final = {name: unit for unit, names in UNITS.items() for name in names.split()}
_LINE: Final = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>[^;]*?)\s*;\s*/\* 0x(?P<low>[0-9a-f]{16}) \*/"
)
_HIGH: Final = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL: Final = re.compile(r"^(\.L_x_\d+):")
_TARGET: Final = re.compile(r"`\((\.L_x_\d+)\)")
_WIDTH: Final = re.compile(r"\.[US]?(8|16|32|64|128)\b")
_ACCESSES: Final = ("load", "copy", "store", "shared", "local")


@dataclass(frozen=True, slots=True)
class _Line:
    """An instruction with where it may go: ``target``, the number of a line; ``always``: no predicate."""

    instruction: Instruction
    always: bool
    target: int | None
    text: str


def path_of(sass: str) -> Path:
    """The way of a warp through a kernel.

    Raises:
        SassError: a branch leads where none is known to.
    """
    lines = _lines(sass)
    heads = sorted(
        {line.target for place, line in enumerate(lines) if line.target is not None and line.target <= place}
    )
    return _walk(lines, 0, len(lines), {head: number for number, head in enumerate(heads)}, None)


def _lines(sass: str) -> list[_Line]:
    """Of the kernel, without the functions that follow it."""
    texts: list[tuple[str, int]] = []
    labels: dict[str, int] = {}
    low = ""
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(texts)
        elif line.startswith("$") and line.rstrip().endswith(":") and texts:
            break  # a function of its own, which is called on slow ways
        elif found := _LINE.match(line):
            low = found["text"]
        elif low and (found := _HIGH.match(line)):
            texts.append((low, int(found[1], 16)))
            low = ""
    if not texts:
        raise SassError("no instructions")
    made = [_line(text, control, labels) for text, control in texts]
    own = [place for place, line in enumerate(made) if line.target == place]  # the end: a branch to itself
    return made[: own[0]] if own else made


def _line(text: str, control: int, labels: Mapping[str, int]) -> _Line:
    words = text.split()
    always = not words[0].startswith("@")
    op = words[0] if always else words[1]
    name = op.partition(".")[0]
    target = None
    if name == "BRA":
        found = _TARGET.search(text)
        target = labels.get(found[1]) if found else None
        if target is None:
            raise SassError(f"a branch to nowhere: {text}")
        always = always and "P" not in text.partition("`")[0].removeprefix(op)
    unit = _UNIT.get(name, "")
    width = 0
    if unit in _ACCESSES:
        bits = _WIDTH.search(op)
        width = int(bits[1]) // 8 if bits else 4
    groups = int(re.findall(r"0x([0-9a-f]+)", text)[-1], 16) if name == "DEPBAR" else -1
    fields = control >> 41
    sets = tuple(-1 if barrier == 7 else barrier for barrier in (fields >> 5 & 7, fields >> 8 & 7))
    instruction = Instruction(op, unit, width, fields & 15, (sets[0], sets[1]), fields >> 11 & 63, groups)
    return _Line(instruction, always, target, text)


def _walk(lines: Sequence[_Line], start: int, end: int, heads: Mapping[int, int], inside: int | None) -> Path:
    """From one line to another; ``inside``: the head of the loop whose body it is."""
    made: list[Instruction | Loop] = []
    place = start
    while place < end:
        if place in heads and place != inside:
            last = max(p for p, line in enumerate(lines) if line.target == place and p >= place)
            made.append(Loop(heads[place], _walk(lines, place, last + 1, heads, place)))
            place = last + 1
            continue
        line = lines[place]
        made.append(line.instruction)
        target = line.target
        if line.instruction.name in ("EXIT", "RET") and line.always:
            break
        if target is not None and target > place and (line.always or _skips(lines, place, target, heads)):
            place = target
        else:
            place += 1
    return tuple(made)


def _skips(lines: Sequence[_Line], place: int, target: int, heads: Mapping[int, int]) -> bool:
    """Whether a branch that may be taken forward is: what it would skip is a call, or all that does not loop."""
    if any(place < head < target for head in heads):
        return False
    skipped = lines[place + 1 : target]
    return any(
        line.instruction.name == "CALL"
        or (line.always and (line.instruction.name == "EXIT" or (line.target or 0) >= target))
        for line in skipped
    )


def loops(path: Path) -> int:
    """How many there are."""
    return sum(1 + loops(each.body) for each in path if isinstance(each, Loop))


def flat(path: Path, trips: Sequence[float], times: float = 1.0) -> Iterator[tuple[Instruction, float]]:
    """Each instruction with how often it is executed, where the loops run so often each time that one comes there."""
    for each in path:
        if isinstance(each, Loop):
            yield from flat(each.body, trips, times * trips[each.number])
        else:
            yield each, times
