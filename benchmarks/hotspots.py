"""Where the time of a training step goes: its kernels by name, the device's busy time and the host's own.

    python -m benchmarks hotspots [--size gpu] [--only gpt resnet50] [--variants autocast o1-own] [--top 12]

Each variant of a model is built, warmed up and timed by itself, not in turns with the others: what is faster by a few
percent is a question for ``benchmarks.step``. Then two steps are profiled, and the device's time is summed up by the
kernels' names. Columns:

- ``ms``: a step, by CUDA events; without a GPU by the clock of the host.
- ``host ms``: until the host had queued a step, of many in a row; where the queue is full it waits for the device.
- ``device busy ms``: the sum over all kernels. What a step takes beyond that, the device waits for the host.
- ``kernels``: launched in a step, with copies and fills. Without a GPU these are operators, each without what it calls.

A variant that fails is a row that says so; the status is 1 then, and where time runs out. The figures of each model
are written to ``benchmarks/results/DEVICE/hotspots-SIZE-DTYPE-MODEL.json`` (tiny ones where ``--output`` says so), from
which ``python -m benchmarks tables`` makes a table. ``--check`` runs all at tiny sizes.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

import fxprec
from benchmarks.measure.interleaved import free_variants
from benchmarks.measure.results import save
from benchmarks.measure.training_step import Setup, Step, tf32
from benchmarks.measure.variants import BASELINE, VARIANTS, Variant, variants
from benchmarks.reports.hotspots import Profiled, kernels_table, steps_table
from benchmarks.workloads.training import SIZES, Workload, workloads

__all__ = ["main", "profiled"]

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_VARIANTS: Final = (BASELINE, "o1-own", "o1-whole")
_WARM_UP: Final = 6
_PROFILED: Final = 2
#: Steps that are timed, at least and at most.
_STEPS: Final = (3, 50)


def profiled(variant: Variant, workload: Workload, setup: Setup, seconds: float) -> Profiled:
    """Build a variant, time it for about so many seconds, and profile it. One that fails says why."""
    why = variant.unserved(setup)
    if why:
        return Profiled(variant.name, variant.what, f"not here: {why}")
    try:
        step = variant.build(workload, setup)
        for _ in range(_WARM_UP):
            step()
        _, warm = _timed(step, 2, setup.device)
        count = min(max(_STEPS[0], int(1e3 * seconds / warm)), _STEPS[1])
        host, ms = _timed(step, count, setup.device)
        times, counts = _by_name(step, setup.device)
    except Exception as error:  # one variant that fails is no reason to lose the others' figures
        documented = isinstance(error, variant.refuses)
        if not documented:
            traceback.print_exc()
        said = (
            f"{'refused' if documented else 'failed'}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        )
        return Profiled(variant.name, variant.what, said)
    kernels = {name: (us, counts[name] / _PROFILED) for name, us in times.most_common()}
    launches = round(counts.total() / _PROFILED)
    return Profiled(variant.name, variant.what, "", ms, host, times.total() / 1e3, launches, kernels)


def _timed(step: Step, count: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a step: (until the host had queued it, until it was done)."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(count):
            step()
        each = 1e3 * (time.perf_counter() - started) / count
        return each, each
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started = time.perf_counter()
    begin.record()
    for _ in range(count):
        step()
    end.record()
    host = 1e3 * (time.perf_counter() - started) / count
    end.synchronize()
    return host, begin.elapsed_time(end) / count


def _by_name(step: Step, device: torch.device) -> tuple[Counter[str], Counter[str]]:
    """By name: microseconds of a step, and how often in all profiled ones."""
    on_device = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]) as profiler:
        for _ in range(_PROFILED):
            step()
        if on_device:
            torch.cuda.synchronize()
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    events: Any = profiler.events() or ()
    for event in events:
        if (event.device_type.name == "CUDA") == on_device:
            times[event.name] += (event.device_time if on_device else event.self_cpu_time_total) / _PROFILED
            counts[event.name] += 1
    return times, counts


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks hotspots", description="Say which kernels a training step spends its time in"
    )
    parser.add_argument("--size", choices=SIZES, help="of the models; by default that of the device")
    parser.add_argument("--only", nargs="+", default=(), metavar="MODEL", help="only these models")
    parser.add_argument(
        "--variants", nargs="+", default=_VARIANTS, metavar="NAME", help=f"besides {BASELINE}; of {', '.join(VARIANTS)}"
    )
    parser.add_argument("--dtype", choices=[*_DTYPES], default="bfloat16")
    parser.add_argument("--top", type=int, default=12, metavar="N", help="kernels of each variant (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for a variant (%(default)s)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no further variant after so long")
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="by default benchmarks/results")
    parser.add_argument("--check", action="store_true", help="run all at tiny sizes")
    options = parser.parse_args(arguments)
    options.size = "tiny" if options.check else options.size or ("gpu" if device.type == "cuda" else "cpu")
    try:
        options.setup = Setup(device, _DTYPES[options.dtype], 1.0 if options.dtype == "float16" else None)
        options.workloads = workloads(options.size, options.only)
        options.chosen = variants(options.variants)
        if not options.workloads:
            raise ValueError(f"no {', '.join(options.only)} of size {options.size}")
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    options = _options(arguments)
    deadline = time.monotonic() + (options.budget or float("inf"))
    console = Console(width=None if sys.stdout.isatty() else 160)
    failed, left_out = 0, []
    with warnings.catch_warnings(), tf32(False):
        warnings.simplefilter("ignore")  # the profiler's, and torch.compile's
        for workload in options.workloads:
            found: list[Profiled] = []
            for variant in options.chosen:
                if time.monotonic() > deadline:
                    left_out.append(f"{workload.name} {variant.name}")
                    continue
                found.append(profiled(variant, workload, options.setup, 0.0 if options.check else options.seconds))
                free_variants()
            if found:
                failed += sum(each.failed for each in found)
                _tell(console, workload, options, found)
    late = f"; no time for {', '.join(left_out)}" if left_out else ""
    console.print(f"{failed} variants failed{late}", highlight=False)
    return int(bool(failed or left_out))


def _tell(console: Console, workload: Workload, options: argparse.Namespace, found: list[Profiled]) -> None:
    """Print and write what a model's variants gave."""
    base = next((each.ms for each in found if each.variant == BASELINE), None)
    console.print(steps_table(f"{workload.name}, {workload.shape}, {options.dtype}", found, base))
    for each in found:
        if each.ms is not None:
            console.print(kernels_table(each, options.top))
    if options.output or options.size != "tiny":
        data = {"model": workload.name, "size": workload.size, "shape": workload.shape, "dtype": options.dtype}
        data |= {"variants": {each.variant: each.as_dict(base) for each in found}}
        name = f"hotspots-{workload.size}-{options.dtype}-{workload.name}"
        save(name, data, options.output, options.setup.device)


if __name__ == "__main__":
    fxprec.keep_memory()
    sys.exit(main())
