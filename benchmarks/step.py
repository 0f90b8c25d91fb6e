"""A whole training step: fxprec beside FP32, torch.autocast, torch.compile and ``model.bfloat16()``.

From the checkout's root; on a machine with a CUDA device at the sizes of a GPU, otherwise at those of a CPU, and in
both cases at launch-bound ones::

    python -m benchmarks step --quick
    python -m benchmarks step
    python -m benchmarks step --only gpt resnet50 --variants o1-own o2-own --dtype float16 --clip 1.0

A step is zero_grad, forward, loss, backward, unscaling and clipping where asked, the optimizer's and the scaler's step.
All variants of a model run in turns in one process, from equal weights on equal data; two are built twice, and what
lies within the noise that those show is called "=" (see ``measure.interleaved``). On a CPU all are built three times
in another order, with a third of the rounds each: which pages a variant's tensors get can make it some percent faster
for as long as it lives. Columns of the table:

- ``ms``, ``p20-p80``: median and spread of all timed steps. ``x autocast``, ``x compile``, ``x fp32``: how many times
  as fast as eager autocast with the fused AdamW, as the same with torch.compile, and as FP32 without TF32. ``by
  fastest``: the first of these by the two fastest steps, which a busy machine disturbs least.
- ``first s``: converting, compiling and capturing, and the first step. torch.compile finds in its cache on disk what it
  compiled before; with TORCHINDUCTOR_CACHE_DIR set to an empty folder it compiles.
- ``loss``: after the last timed step; all have done the same number of steps.

What a variant declines, as its documentation says, is told below the table. The status is 1 where a variant failed,
and where time ran out. Results are written after each model, to ``benchmarks/results`` only by whole runs: with
``--variants``, ``--quick`` or ``--check`` where ``--output`` says. ``--check`` runs everything once at tiny sizes.
"""

from __future__ import annotations

import argparse
import importlib
import math
import pathlib
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

import fxprec
from benchmarks.measure import results
from benchmarks.measure.interleaved import (
    Clock,
    Schedule,
    device_times,
    free_variants,
    host_times,
    measure,
    order,
)
from benchmarks.measure.training_step import Setup, Step, tf32
from benchmarks.measure.variants import BASELINE, VARIANTS, Variant, variants
from benchmarks.reports.step import Comparison, Row, draw, found_before, twin_of
from benchmarks.workloads.training import SIZES, Workload, workloads
from fxprec.testing import count_casts

__all__ = ["Plan", "compare", "main"]

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: Built twice, for the noise.
_TWICE: Final = (BASELINE, "o1")
_SCHEDULE: Final = {
    "cuda": Schedule(warm_up=20, rounds=5, steps=50, settle=2),
    "cpu": Schedule(warm_up=3, rounds=40, steps=2, settle=1),
}
#: Of whole runs, by device: on a GPU building takes longer than timing.
_BUILDS: Final = {"cuda": 1, "cpu": 3}
#: On a CPU torch.compile takes a minute or two for each of the others.
_QUICK_TO_COMPILE: Final = ("mlp", "cnn", "gpt")
#: Seconds of timing for a model, by device; None: the schedule as it is.
_SECONDS: Final = {"cuda": None, "cpu": 120.0}
_QUICK_SECONDS: Final = {"cuda": 20.0, "cpu": 8.0}
_QUICK_MODELS: Final = ("mlp", "resnet50", "gpt")
_QUICK_VARIANTS: Final = ("fp32", BASELINE, "bfloat16", "o1", "o1-own", "o2-own", "o1-whole")


@dataclass(frozen=True)
class Plan:
    """How a comparison is timed.

    Attributes:
        seconds: of timing, at most; None: as long as the schedule says.
        twice: variants that are built twice.
        builds: how often all are built anew: where its tensors lie in memory makes one faster than another.
        compile_all: compile all models on a CPU, too.
    """

    schedule: Schedule
    clock: Clock
    seconds: float | None
    twice: tuple[str, ...] = _TWICE
    builds: int = 1
    compile_all: bool = True

    def unserved(self, variant: Variant, workload: Workload, setup: Setup) -> str:
        """Why a variant does not run; "": it does."""
        slow = setup.device.type == "cpu" and workload.name not in _QUICK_TO_COMPILE
        if variant.inductor and slow and not self.compile_all:
            return "compiling this model takes a CPU a minute or two; --compile-all does it"
        return variant.unserved(setup)


def compare(workload: Workload, chosen: Sequence[Variant], setup: Setup, plan: Plan) -> Comparison:
    """Build all variants, run them in turns, free them; as often as planned. One that fails is a row that says so."""
    found = Comparison(workload, setup, plan.schedule, results.device_name(setup.device), plan.builds)
    of_row: dict[str, Variant] = {}
    for variant in chosen:
        for name in (variant.name, twin_of(variant.name))[: 1 + (variant.name in plan.twice)]:
            why = plan.unserved(variant, workload, setup)
            found.rows.append(Row(name, variant.what, f"not here: {why}" if why else ""))
            of_row[name] = variant
    rows = {row.name: row for row in found.rows}
    for number in range(plan.builds):
        steps: dict[str, Step] = {}
        try:
            for name in order([*rows], number):  # what is built first gets other memory
                if not rows[name].trouble:
                    _start(of_row[name], rows[name], steps, workload, setup, plan.schedule.warm_up)
            if steps:
                _time(found, steps, plan, number)
            if number == 0:
                _count(found, steps)
        finally:
            steps.clear()
            free_variants()
    return found


def _start(variant: Variant, row: Row, steps: dict[str, Step], workload: Workload, setup: Setup, warm_up: int) -> None:
    """Build a variant and warm it up."""
    try:
        step = variant.build(workload, setup)
        step()
        _wait(setup)
        first = time.perf_counter() - step.ready
        for _ in range(warm_up - 1):
            step()
        loss = step.loss()
        if not math.isfinite(loss):
            row.samples, row.trouble = None, f"failed: the loss is {loss} after {warm_up} steps"
            return
    except Exception as error:  # one variant that fails is no reason to lose the others' figures
        documented = isinstance(error, variant.refuses)
        how, first_line = "refused" if documented else "failed", (str(error).splitlines() or [""])[0]
        row.samples, row.trouble = None, f"{how}: {type(error).__name__}: {first_line}"
        if not documented:
            traceback.print_exc()
        return
    if row.first is None:
        row.first, row.losses = first, [loss]
    _rest(step, setup)
    steps[row.name] = step


def _rest(step: Step, setup: Setup) -> None:
    """Free the gradients until its next turn: of all variants at once they are gigabytes of a CPU's memory."""
    if setup.device.type == "cpu":  # those of a CUDA graph lie in its memory
        step.optimizer.zero_grad(set_to_none=True)


def _time(found: Comparison, steps: dict[str, Step], plan: Plan, number: int) -> None:
    """One build's share of the rounds; of the first one the loss at the end."""
    if number == 0:
        if plan.seconds is not None:
            each = sum(min(plan.clock(step, 2)) for step in steps.values())
            found.schedule = plan.schedule.within(plan.seconds, 1e-3 * each)
        found.schedule = replace(found.schedule, rounds=plan.builds * math.ceil(found.schedule.rounds / plan.builds))
    share = replace(found.schedule, rounds=found.schedule.rounds // plan.builds)
    samples = measure(steps, share, plan.clock, lambda name: _rest(steps[name], found.setup))
    for row in found.rows:
        if row.name in steps:
            row.samples = samples[row.name] if row.samples is None else row.samples + samples[row.name]
            if number == 0:
                row.losses.append(steps[row.name].loss())


def _count(found: Comparison, steps: dict[str, Step]) -> None:
    """Casts and kernels of one more step."""
    for row in found.rows:
        if row.name not in steps or row.is_twin:
            continue
        if VARIANTS[row.name].counted:
            with count_casts() as casts:
                steps[row.name]()
            row.casts = casts.total
        if found.setup.device.type == "cuda":
            row.kernels = _kernels(steps[row.name])


def _kernels(step: Step) -> int:
    """Launched on the device, by the host or by a graph."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return sum(
        event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
        for event in profiler.events() or ()
    )


def _wait(setup: Setup) -> None:
    if setup.device.type == "cuda":
        torch.cuda.synchronize()


# -- the command ------------------------------------------------------------------------------------------------------


def _options(arguments: list[str] | None) -> argparse.Namespace:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks step",
        description="Time training steps: fxprec and its peers in turns",
        epilog="variants: " + "; ".join(f"{name}: {each.what}" for name, each in VARIANTS.items()),
    )
    parser.add_argument("--size", nargs="+", choices=SIZES, metavar="SIZE", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--only", nargs="+", default=(), metavar="MODEL", help="only these models")
    parser.add_argument("--variants", nargs="+", default=(), metavar="NAME", help=f"only these, and {BASELINE}")
    parser.add_argument("--dtype", nargs="+", choices=[*_DTYPES], default=["bfloat16"])
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip gradients; float16: 1.0 where not given")
    parser.add_argument("--quick", action="store_true", help="a few models and variants, in about 2 minutes")
    parser.add_argument("--compile-all", action="store_true", help="on a CPU compile the larger models, too")
    parser.add_argument("--seconds", type=float, metavar="S", help="of timing for a model")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no further model after so long")
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="for JSON and figures")
    parser.add_argument("--check", action="store_true", help="run everything once at tiny sizes")
    options = parser.parse_args(arguments)
    options.size = options.size or (["tiny"] if options.check else ["gpu" if device == "cuda" else "cpu", "launch"])
    options.whole = not (options.variants or options.quick or options.check)
    if options.quick:
        options.only = options.only or _QUICK_MODELS
        options.variants = options.variants or _QUICK_VARIANTS
    try:
        options.chosen = variants(options.variants)
        options.setups = [
            Setup(torch.device(device), _DTYPES[name], options.clip or (1.0 if name == "float16" else None))
            for name in options.dtype
        ]
        options.workloads = [each for size in options.size for each in workloads(size, options.only)]
        if not options.workloads:
            raise ValueError(f"no {', '.join(options.only)} of size {', '.join(options.size)}")
    except ValueError as error:
        parser.error(str(error))
    return options


def _plan(options: argparse.Namespace, device: str) -> Plan:
    if options.check:
        return Plan(Schedule(warm_up=2, rounds=1, steps=1, settle=0), host_times, None)
    seconds = options.seconds or (_QUICK_SECONDS if options.quick else _SECONDS)[device]
    return Plan(
        _SCHEDULE[device],
        device_times if device == "cuda" else host_times,
        seconds,
        builds=1 if options.quick else _BUILDS[device],
        compile_all=options.compile_all,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    options = _options(arguments)
    importlib.import_module("torch._dynamo")  # an optimizer's first step does, and would be the slower for it
    deadline = time.monotonic() + (options.budget or float("inf"))
    console = Console(width=None if sys.stdout.isatty() else 200)
    writes = options.whole or options.output is not None
    failed, left_out, compared = 0, [], 0
    with warnings.catch_warnings(), tf32(False):
        warnings.simplefilter("ignore")  # torch.compile's, of every model
        for setup in options.setups:
            plan = _plan(options, setup.device.type)
            for workload in options.workloads:
                if time.monotonic() > deadline:
                    left_out.append(f"{workload.name} ({workload.size}, {setup.dtype})".replace("torch.", ""))
                    continue
                comparison = compare(workload, options.chosen, setup, plan)
                comparison.show(console)
                compared += 1
                failed += sum(row.failed for row in comparison.rows)
                if writes:
                    _write(comparison, options.output)
    lines = [f"{compared} comparisons; {failed} variants failed"]
    if left_out:
        lines.append(f"no time for {', '.join(left_out)}")
    if not writes:
        lines.append("nothing is written: a run of some variants, or at other settings, wants --output FOLDER")
    console.print("\n".join(lines), highlight=False)
    return int(bool(failed or left_out))


def _write(comparison: Comparison, output: pathlib.Path | None) -> None:
    """The file of a workload, and the figure of all that there are at its size."""
    device, size, dtype = comparison.setup.device, comparison.workload.size, comparison.dtype
    results.save(comparison.file, comparison.as_dict(), output, device)
    found = found_before(size, dtype, comparison.device_name, output)
    results.save_figure(
        f"step-{size}-{dtype}",
        lambda figure: draw(figure, found),
        output,
        size=(16.0, 4.0 * math.ceil(len(found) / 4)),
        device=device,
    )


if __name__ == "__main__":
    fxprec.keep_memory()
    sys.exit(main())
