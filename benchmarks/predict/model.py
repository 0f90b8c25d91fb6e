"""The time of a kernel from its instructions, its launch and the machine: a quarter of a multiprocessor is simulated.

A multiprocessor has four schedulers, each with a quarter of the warps, which issues an instruction a cycle. One of
them runs here. An instruction of a warp issues when its control bits allow it (``sass``), the scheduler is free and its
unit is, the first warp that is ready before others; results come after the unit's latency. Memory is a queue that
serves as many bytes a cycle as a large copy gets, and a latency behind it; stores stand in the queue too. When a
program is done and memory has what it stored, the next takes its place.

So a kernel is bound by bandwidth, by what is on its way (Little's law), by the issue or a unit, by what waits for what,
or by its last wave, without a formula for any of them. Of many equal waves and rounds of loops a few are simulated.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from benchmarks.predict.machines import Machine
from benchmarks.predict.sass import Instruction, Loop, Path, flat

__all__ = ["LAUNCH", "Kernel", "Prediction", "held", "predict"]

#: Cycles until a result is there, of what sets a barrier. Shared memory: 29 (Luo et al. 2024, table IV); shuffles,
#: special functions and constants: Jia et al. 2018, tables 4.1 and 3.5. A store's operands are read soon.
LATENCY: Final[Mapping[str, int]] = MappingProxyType(
    {"shared": 29, "shuffle": 24, "xu": 23, "constant": 40, "store": 30, "local": 35, "fp64": 16, "": 20}
)
#: Cycles of a barrier, from the last warp that comes. An assumption.
_MEET: Final = 20
#: Multiprocessors of 8.0 and 9.0: warps, programs, registers, and bytes of shared memory that each program takes more.
_WARPS, _PROGRAMS, _REGISTERS, _OWN_SHARED = 64, 32, 65536, 1024
_SCHEDULERS: Final = 4
#: Cycles between the end of a program and the first instruction of the next in its place. An assumption.
_START: Final = 400
#: Seconds from kernel to kernel in a stream. An assumption.
LAUNCH: Final = 2e-6
#: Instructions that are simulated at most, or nearly so.
_BUDGET: Final = 120_000


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel and its launch.

    Attributes:
        path: a warp's way.
        trips: how often each loop runs.
        registers: of a thread.
        shared: bytes of a program.
        warps: of a program.
        programs: of the launch.
        loaded, stored: bytes from and to memory.
    """

    path: Path
    trips: tuple[float, ...]
    registers: int
    shared: int
    warps: int
    programs: int
    loaded: float
    stored: float

    @property
    def moved(self) -> float:
        return self.loaded + self.stored

    def counts(self) -> Mapping[str, float]:
        """Warp instructions of a program by unit; of accesses to memory, 128 bytes each."""
        found: defaultdict[str, float] = defaultdict(float)
        for each, times in flat(self.path, self.trips):
            found["issue"] += times * self.warps
            found["lsu" if each.width else each.unit] += times * self.warps * max(1, each.width // 4)
        return found


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a kernel.

    Attributes:
        seconds: that it takes.
        bound: seconds that its bytes take, at the rate of a large copy.
        held: programs that a multiprocessor holds.
        busy: what is used -> for which share of the time.
    """

    seconds: float
    bound: float
    held: int
    busy: Mapping[str, float]

    @property
    def limit(self) -> str:
        """What is used most, or "latency" where nothing is for most of the time."""
        most = max(self.busy, key=lambda name: self.busy[name])
        return most if self.busy[most] > 0.7 else "latency"


def held(kernel: Kernel, machine: Machine) -> int:
    """Programs that a multiprocessor holds at once (CUDA C++ Programming Guide, "Technical Specifications")."""
    registers = math.ceil(kernel.registers / 8) * 8 * 32  # of a warp; each scheduler has its own
    warps = min(_WARPS, _SCHEDULERS * (_REGISTERS // _SCHEDULERS // registers))
    return max(1, min(_PROGRAMS, warps // kernel.warps, machine.shared // (kernel.shared + _OWN_SHARED)))


@dataclass(frozen=True)
class _Quarter:
    """What one scheduler has to do: ``slots`` programs at a time of ``warps`` warps, ``programs`` in all.

    ``share``: bytes of memory a cycle; ``memory``: cycles until it answers.
    """

    slots: int
    warps: int
    programs: float
    share: float
    memory: int


def _quarter(kernel: Kernel, machine: Machine) -> _Quarter:
    each = kernel.programs / machine.processors
    there = min(held(kernel, machine), math.ceil(each))
    warps = max(1, kernel.warps // _SCHEDULERS)
    part = min(1.0, kernel.warps / _SCHEDULERS)  # of a program's warps, that are the quarter's
    slots = max(1, round(there * part))
    rate = machine.achieved / machine.clock / min(machine.processors, kernel.programs / there)  # of a multiprocessor
    share = rate / _SCHEDULERS * slots / (there * part)
    return _Quarter(slots, warps, slots if each <= there else each / there * slots, share, machine.memory)


class _Step:
    """An instruction as it is simulated."""

    __slots__ = ("bytes", "commits", "cost", "groups", "latency", "read", "set", "stall", "unit", "waits", "what")

    def __init__(self, each: Instruction, machine: Machine, loads: float, stores: float) -> None:
        unit = each.unit
        self.stall = max(1, each.stall)
        self.waits = tuple(barrier for barrier in range(6) if each.waits >> barrier & 1)
        self.set, self.read = each.sets
        self.groups, self.commits = each.groups, each.name == "LDGDEPBAR"
        self.latency = LATENCY.get(unit, LATENCY[""])
        self.what = unit
        self.bytes = 0.0
        if unit in ("load", "copy"):
            self.bytes = each.width * 32 * loads
            self.latency = machine.l2 + loads * (machine.memory - machine.l2)
        elif unit == "store":
            self.bytes = each.width * 32 * stores
        #: What it occupies besides the issue, and for how many cycles of this quarter.
        self.unit = "lsu" if each.width else unit if unit in machine.rates else ""
        self.cost = 4 * max(1.0, each.width / 4) if each.width else 4 / machine.rates[unit] if self.unit else 0.0


def _trace(path: Path, trips: Sequence[float], steps: Mapping[Instruction, _Step]) -> Iterator[_Step]:
    for each in path:
        if isinstance(each, Loop):
            for _ in range(round(trips[each.number])):
                yield from _trace(each.body, trips, steps)
        else:
            yield steps[each]


def _cycles(trace: Sequence[_Step], quarter: _Quarter, programs: int) -> float:
    """Until so many programs are done."""
    count = quarter.warps
    free = memory = 0.0  # when the scheduler is, and memory
    units: dict[str, float] = {}
    slots = min(quarter.slots, programs)
    places = [0] * (slots * count)
    barriers = [[0.0] * 6 for _ in places]
    copied = [0.0] * len(places)
    stored = [0.0] * len(places)
    groups: list[list[float]] = [[] for _ in places]
    left = programs - slots
    arrived: list[list[int]] = [[] for _ in range(slots)]
    running = [count] * slots
    heap = [(float(_START), n, n) for n in range(len(places))]
    order = len(places)
    end, length = 0.0, len(trace)
    while heap:
        now, _, warp = heapq.heappop(heap)
        place = places[warp]
        slot = warp // count
        if place == length:
            if stored[warp] > now:  # a program is there until memory has taken what it stored
                heapq.heappush(heap, (stored[warp], order, warp))
                order += 1
                continue
            running[slot] -= 1
            end = max(end, now)
            if not running[slot] and left:
                left -= 1
                running[slot] = count
                for each in range(slot * count, slot * count + count):
                    places[each], barriers[each], groups[each] = 0, [0.0] * 6, []
                    heapq.heappush(heap, (now + _START, order, each))
                    order += 1
            continue
        step = trace[place]
        ready = now
        own = barriers[warp]
        for barrier in step.waits:
            if own[barrier] > ready:
                ready = own[barrier]
        if step.groups >= 0 and len(groups[warp]) > step.groups:
            ready = max(ready, groups[warp][-1 - step.groups])
        if ready > now:
            heapq.heappush(heap, (ready, order, warp))
            order += 1
            continue
        start = free if free > now else now
        free = start + 1
        if step.unit:
            busy = units.get(step.unit, 0.0)
            if busy > start:
                start = busy
            units[step.unit] = start + step.cost
        done = start + step.cost + step.latency
        if step.bytes:
            memory = max(memory, start) + step.bytes / quarter.share
            if step.what == "store":
                stored[warp] = memory + quarter.memory
            else:
                done = memory + step.latency
                if step.what == "copy":
                    copied[warp] = max(copied[warp], done)
        if step.commits:
            groups[warp].append(copied[warp])
        if step.set >= 0:
            own[step.set] = max(own[step.set], done)
        if step.read >= 0:
            own[step.read] = max(own[step.read], start + step.cost + LATENCY["store"])
        places[warp] = place + 1
        after = start + step.stall
        if step.what == "barrier":
            waiting = arrived[slot]
            waiting.append(warp)
            if len(waiting) < count:
                continue
            for each in waiting:
                heapq.heappush(heap, (after + _MEET, order, each))
                order += 1
            waiting.clear()
            continue
        heapq.heappush(heap, (after, order, warp))
        order += 1
    return max(end, memory)


def _total(kernel: Kernel, quarter: _Quarter, machine: Machine) -> float:
    """Cycles of a launch: of all that is alike a part is simulated, and a longer part, to see what more takes."""
    requested: defaultdict[str, float] = defaultdict(float)
    for each, times in flat(kernel.path, kernel.trips):
        requested[each.unit] += times * each.width * 32 * kernel.warps
    loaded, stored = requested["load"] + requested["copy"], requested["store"]
    loads = min(1.0, kernel.loaded / kernel.programs / loaded) if loaded else 0.0
    stores = min(1.0, kernel.stored / kernel.programs / stored) if stored else 0.0
    steps = {each: _Step(each, machine, loads, stores) for each, _ in flat(kernel.path, kernel.trips)}
    length = sum(times for _, times in flat(kernel.path, kernel.trips))
    wave = quarter.slots * quarter.warps * length  # instructions of all that run at a time
    waves = quarter.programs / quarter.slots
    some = 4 if waves > 4 else waves
    rounds = [round(each) if each >= 1 else round(each + 0.49) for each in kernel.trips]
    most = max(rounds, default=1)
    fitting = max(6, int(most * _BUDGET / (wave * some))) if wave * some > _BUDGET else most
    if waves > 4:
        trace = [*_trace(kernel.path, [min(each, fitting) for each in rounds], steps)]
        scale = length / len(trace)
        short, long = (_cycles(trace, quarter, n * quarter.slots) for n in (2, 4))
        return scale * (long + (quarter.programs / quarter.slots - 4) * (long - short) / 2)
    programs = max(1, round(quarter.programs))
    if fitting >= most:
        return _cycles([*_trace(kernel.path, rounds, steps)], quarter, programs)
    long, short = ([*_trace(kernel.path, [min(each, n) for each in rounds], steps)] for n in (fitting, fitting // 2))
    first, second = _cycles(short, quarter, programs), _cycles(long, quarter, programs)
    return second + (length - len(long)) / (len(long) - len(short)) * (second - first)


def predict(kernel: Kernel, machine: Machine) -> Prediction:
    """The time of a kernel on a machine."""
    quarter = _quarter(kernel, machine)
    cycles = _total(kernel, quarter, machine)
    seconds = cycles / machine.clock + LAUNCH
    counts = kernel.counts()
    per = kernel.programs / machine.processors / (seconds * machine.clock)
    rates = {"issue": 4.0, "lsu": 1.0, **machine.rates}
    busy = {name: per * counts[name] / rate for name, rate in rates.items() if counts[name]}
    bound = kernel.moved / machine.achieved
    return Prediction(seconds, bound, held(kernel, machine), {"memory": bound / seconds, **busy})
