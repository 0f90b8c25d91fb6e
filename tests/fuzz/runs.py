"""Many seeds: in several processes, a file of progress beside, so that a run may stop at any time and go on later."""

from __future__ import annotations

import faulthandler
import gc
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.fuzz.kinds import Kind

__all__ = ["run"]

#: Seeds of one task, and tasks of one process: dynamo's memory grows with what it compiled.
_CHUNK = {"programs": 200, "static": 50, "dynamo": 10, "auto": 10}
_TASKS = 10
#: Seconds after which a task counts as hung.
_PATIENCE = 900


def run(
    kind: Kind, seeds: range, jobs: int, progress: Path | None, minutes: float | None, say: Callable[[str], None]
) -> int:
    """Check every seed that the file of progress does not name yet.

    Returns:
        how many are wrong, those of the file included.
    """
    known = _read(progress, kind)
    wrong = sum(len(chunk["wrong"]) for chunk in known)
    for chunk in known:
        for text in chunk["wrong"]:
            say(text + "\n")
    covered = {seed for chunk in known for seed in range(chunk["from"], chunk["to"])}
    left = [seed for seed in seeds if seed not in covered]
    if known:
        seconds = sum(chunk["seconds"] for chunk in known)
        say(f"{len(seeds) - len(left)} of {len(seeds)} seeds done before, in {seconds:.0f} s of processes' time")
    start, done = time.monotonic(), 0
    for chunk in _results(kind, list(_chunks(left, kind)), jobs, minutes):
        done += chunk["to"] - chunk["from"]
        wrong += len(chunk["wrong"])
        if progress is not None:
            with progress.open("a") as file:
                file.write(json.dumps({"kind": asdict(kind), **chunk}) + "\n")
        for text in chunk["wrong"]:
            say(text + "\n")
        rate = done / (time.monotonic() - start)
        say(f"{chunk['from']}:{chunk['to']} done, {len(left) - done} left, {rate:.1f} a second, {wrong} wrong")
    return wrong


def _read(progress: Path | None, kind: Kind) -> list[dict]:
    if progress is None or not progress.exists():
        return []
    # through JSON and back: tuples are lists there
    same = json.loads(json.dumps(asdict(kind)))
    lines = [line for line in progress.read_text().splitlines() if line.endswith("}")]  # the last may be cut off
    return [chunk for chunk in map(json.loads, lines) if chunk["kind"] == same]


def _chunks(seeds: list[int], kind: Kind) -> Iterator[range]:
    size = _CHUNK["programs" if kind.what == "programs" else kind.capture]
    start = 0
    for i in range(1, len(seeds) + 1):
        if i == len(seeds) or seeds[i] != seeds[i - 1] + 1 or i - start == size:
            yield range(seeds[start], seeds[i - 1] + 1)
            start = i


def _results(kind: Kind, chunks: list[range], jobs: int, minutes: float | None) -> Iterator[dict]:
    deadline = None if minutes is None else time.monotonic() + minutes * 60
    if not jobs:
        for chunk in chunks:
            if deadline is None or time.monotonic() < deadline:
                yield _check(kind, chunk)
        return
    waiting = iter(chunks)
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=_TASKS) as pool:
        running: dict[Future[dict], range] = {}
        while True:
            while len(running) < jobs and (deadline is None or time.monotonic() < deadline):
                chunk = next(waiting, None)
                if chunk is None:
                    break
                running[pool.submit(_check_or_end, kind, chunk)] = chunk
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                chunk = running.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool:
                    raise SystemExit(
                        f"a process died, or hung and was ended, in one of the seeds {chunk.start}:{chunk.stop} or "
                        f"{[(r.start, r.stop) for r in running.values()]}: run these with --jobs 1"
                    ) from None


def _check(kind: Kind, seeds: range) -> dict:
    torch.set_num_threads(1)
    start = time.monotonic()
    wrong = [text for seed in seeds if (text := kind.wrong(seed)) is not None]
    torch._dynamo.reset()
    gc.collect()
    return {"from": seeds.start, "to": seeds.stop, "wrong": wrong, "seconds": round(time.monotonic() - start, 2)}


def _check_or_end(kind: Kind, seeds: range) -> dict:
    """As ``_check``; a process that hangs ends, with a stack trace."""
    faulthandler.dump_traceback_later(_PATIENCE, exit=True)
    try:
        return _check(kind, seeds)
    finally:
        faulthandler.cancel_dump_traceback_later()
