"""Clocks for kernels: variants of one piece of work, run in turns, each run timed alone.

On a device a run is timed by CUDA events. Before each one the L2 cache is overwritten, so that inputs come from memory;
it is left full of what was written, as by the kernel before in a real step, since a run pays for that in the place of
its own last writes. Then the device is kept waiting for as long as the host takes to queue the run: otherwise short
kernels would be timed by the speed of Python. What the host takes is reported besides.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import torch

__all__ = ["Clock", "DeviceClock", "HostClock", "Series", "Work", "copy_work", "one_core"]

_WARM_SECONDS: Final = 0.05  # an idle device raises its clock first
_WARM_RUNS: Final = 5
_LEAST: Final = 20
_MOST: Final = 100
#: Of the device's waiting for the host, in microseconds, and how much longer than the host took so far.
_LONGEST_HOLD: Final = 3000.0
_MARGIN: Final = 1.5


@dataclass(frozen=True)
class Work:
    """What is timed: ``run(prepare())``, without ``prepare``."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Series:
    """Microseconds of one variant: of the device, and (``host``, median) until the host had queued it.

    Attributes:
        runs: how many.
        memory: bytes allocated by a run at most at one time, beyond what was there before; 0 on the host.
    """

    median: float
    p20: float
    p80: float
    host: float
    runs: int
    memory: int = 0

    @classmethod
    def of(cls, times: list[float], host: list[float], memory: int = 0) -> Series:
        ordered = sorted(times)
        last = len(ordered) - 1
        p20, p80 = ordered[round(0.2 * last)], ordered[round(0.8 * last)]
        return cls(statistics.median(ordered), p20, p80, statistics.median(host), len(ordered), memory)

    def as_dict(self) -> dict[str, float]:
        return {k: round(v, 3) for k, v in asdict(self).items()}


class Clock(Protocol):
    """Either of the two below."""

    def measure(self, works: Mapping[str, Work], seconds: float) -> dict[str, Series]:
        """Time variants in turns, for about so many seconds in all."""
        ...


class HostClock:
    """Runs each variant once, to see that it runs; the times mean nothing."""

    def measure(self, works: Mapping[str, Work], seconds: float) -> dict[str, Series]:
        found = {}
        for name, work in works.items():
            state = work.prepare()
            started = time.perf_counter()
            work.run(state)
            elapsed = 1e6 * (time.perf_counter() - started)
            found[name] = Series.of([elapsed], [elapsed])
        return found


class DeviceClock:
    """CUDA events on the current stream of the current device, which is ``device``."""

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(1 << 28, 4 * cache), dtype=torch.int8, device=device)
        self._cycles = self._cycles_each_microsecond()

    def measure(self, works: Mapping[str, Work], seconds: float) -> dict[str, Series]:
        memory, holds, each = {}, {}, 0.0
        for name, work in works.items():
            memory[name] = self._peak(work)
            host, wall = self._warmed(work)
            holds[name] = min(_LONGEST_HOLD, _MARGIN * host + 10.0)
            each += wall + 1e-6 * holds[name]
        rounds = max(_LEAST, min(_MOST, int(seconds / each)))
        runs: dict[str, list[tuple[Any, Any, float]]] = {name: [] for name in works}
        order = [*works]
        gc.collect()
        gc.disable()
        try:
            for number in range(rounds):
                turn = number % len(order)
                for name in order[turn:] + order[:turn]:
                    runs[name].append(self._run(works[name], holds[name]))
        finally:
            gc.enable()
        torch.cuda.synchronize()
        return {
            name: Series.of([1e3 * a.elapsed_time(b) for a, b, _ in timed], [h for _, _, h in timed], memory[name])
            for name, timed in runs.items()
        }

    def _run(self, work: Work, hold: float) -> tuple[Any, Any, float]:
        """Queue one run: (event before, event after, microseconds of the host)."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        state = work.prepare()
        self._flush.zero_()
        torch.cuda._sleep(int(hold * self._cycles))
        started = time.perf_counter()
        begin.record()
        result = work.run(state)
        end.record()
        host = 1e6 * (time.perf_counter() - started)
        del result
        return begin, end, host

    def _warmed(self, work: Work) -> tuple[float, float]:
        """(microseconds that the host takes for a run, seconds that a run takes with all around it)."""
        torch.cuda.synchronize()
        hosts: list[float] = []
        started = time.perf_counter()
        while len(hosts) < _WARM_RUNS or time.perf_counter() - started < _WARM_SECONDS:
            hosts.append(self._run(work, 0.0)[2])
            torch.cuda.synchronize()
        return statistics.median(hosts[1:]), (time.perf_counter() - started) / len(hosts)

    def _peak(self, work: Work) -> int:
        """Also the first run, in which kernels are compiled."""
        before = 0
        for _ in range(2):
            state = work.prepare()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = work.run(state)
            torch.cuda.synchronize()
            del state, result
        return torch.cuda.max_memory_allocated() - before

    def _cycles_each_microsecond(self) -> float:
        rates = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(20_000_000)
            end.record()
            end.synchronize()
            rates.append(20_000_000 / (1e3 * begin.elapsed_time(end)))
        return max(rates)


def copy_work(nbytes: int, device: torch.device) -> Work:
    """A copy on the device that moves so many bytes, half of them reads."""
    source = torch.randint(256, (max(16, nbytes // 2),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Work(lambda _: target.copy_(source))


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """One thread of torch's; as before afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
