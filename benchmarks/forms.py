"""Forms of the fused regions' kernels: rows, block, warps, stages and resident programs, each timed.

    python -m benchmarks forms [--only gpt-2-small llama-1b] [--budget 120] [--top 5] [--output FOLDER]

For the forward and the backward kernel of each region of a model, forms around the one that fxprec gives it are
compiled side by side, must give the same results, and run in turns, timed by CUDA events with inputs from memory (see
``measure.timing``). "% copy" is the share of a large copy's bandwidth, of the bytes that must be moved. A kernel that
moves less than 16 MB is left out. What fxprec itself builds does not change: when another form wins by more than the
noise, ``fxprec/kernels/rows/emit/tiling.py`` is where it is chosen.

A form that does not compile, or wants more shared memory than there is, is counted; the status is 1 where the present
one does, and where a form gives other results. The figures of each model are written to
``benchmarks/results/DEVICE/forms-DTYPE-MODEL.json``, from which ``python -m benchmarks tables`` makes a table.
``--check`` builds all forms at tiny sizes without a device and launches nothing; with TRITON_INTERPRET=1 each runs once
in Triton's interpreter, where times mean nothing, and is compared.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch
from rich.console import Console

from benchmarks.measure.forms import Case, Operands, cases, launches
from benchmarks.measure.results import save
from benchmarks.measure.timing import Clock, DeviceClock, HostClock, Work, copy_work
from benchmarks.reports.forms import COLUMNS, Found, Timed, table
from benchmarks.workloads.problems import Setup
from benchmarks.workloads.regions import MODELS, calls, slug
from benchmarks.workloads.training import named
from fxprec.kernels.launch.triton_support import interpreting
from fxprec.kernels.rows.run.kernel import Launch

__all__ = ["Sweep", "main", "sweep"]

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: Bytes that the large copy moves, and that a kernel must move to be swept.
_COPY: Final = 4 << 30
_SMALLEST: Final = 16 << 20
#: Seconds of timing that the forms of a kernel get; each runs 20 times at least.
_SECONDS: Final = 3.0
#: How, in words, for the file.
_TIMING: Final = "in turns, each run alone, with inputs from memory; medians"


@dataclass(frozen=True)
class Sweep:
    """How kernels are swept.

    Attributes:
        clock: None: forms are built, and nothing is launched.
        copied: bytes a second of a large copy.
        threads: that compile.
    """

    clock: Clock | None
    copied: float
    threads: int
    smallest: int = _SMALLEST


def sweep(case: Case, how: Sweep) -> tuple[Found | None, int]:
    """(what was found, how many forms there are); nothing is found where nothing is launched.

    Raises:
        RuntimeError: the form that fxprec gives it does not run.
    """
    present, *others = launches(case)
    if how.clock is None:
        return None, 1 + len(others)
    operands = Operands.of(case)
    wanted = operands.run(present)

    def trouble(launch: Launch) -> str:
        try:
            differs = operands.differs(launch, wanted)
            return f"wrong: {differs}" if differs else ""
        except Exception as error:  # whatever Triton and the driver say of a form is what is asked
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

    with ThreadPoolExecutor(how.threads) as pool:
        troubles = [*pool.map(trouble, others)]
    good = [launch for launch, said in zip(others, troubles, strict=True) if not said]
    works = {str(n): Work(lambda _, launch=launch: operands.run(launch)) for n, launch in enumerate([present, *good])}
    series = how.clock.measure(works, _SECONDS)
    mine, *timed = [_timed(launch, series[str(n)].median) for n, launch in enumerate([present, *good])]
    layout = case.plan.layout
    found = Found(
        case.plan.name, case.direction, present.tiling.kind, layout.rows, layout.columns, case.moved, how.copied, mine,
        tuple(sorted(timed, key=lambda each: each.us)), tuple(said for said in troubles if said),
    )  # fmt: skip
    return found, 1 + len(others)


def _timed(launch: Launch, us: float) -> Timed:
    form = launch.tiling
    resident = form.resident if form.persistent else 0
    return Timed(us, form.rows, form.block, form.warps, form.stages, resident, launch.grid[0])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks forms", description="Time other forms of fused regions' kernels on a CUDA device"
    )
    models = {slug(name): name for name in MODELS}
    parser.add_argument("--only", nargs="+", default=(), metavar="MODEL", help=f"of {', '.join(models)}")
    parser.add_argument("--dtype", choices=[*_DTYPES], default="bfloat16")
    parser.add_argument("--budget", type=float, default=240.0, metavar="SECONDS", help="start no kernel after (240)")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="forms of a kernel in the table (%(default)s)")
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="by default benchmarks/results")
    parser.add_argument("--check", action="store_true", help="build all at tiny sizes; launch none without a device")
    options = parser.parse_args(arguments)
    try:
        options.models = [models[name] for name in named(options.only, models, "model") or models]
    except ValueError as error:
        parser.error(str(error))
    if not options.check and (interpreting() or not torch.cuda.is_available()):
        parser.error("needs a CUDA device, and torch sees none; --check builds each form without")
    return options


def _sweep(options: argparse.Namespace, device: torch.device) -> Sweep:
    if options.check:
        return Sweep(HostClock() if interpreting() else None, 1e9, 1, 0)
    clock = DeviceClock(device)
    copied = _COPY / (1e-6 * clock.measure({"copy": copy_work(_COPY, device)}, 1.0)["copy"].median)
    return Sweep(clock, copied, os.cpu_count() or 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    options = _options(arguments)
    deadline = time.monotonic() + options.budget
    device = torch.device("cpu" if options.check else "cuda")
    setup = Setup(device, _DTYPES[options.dtype], tiny=options.check)
    how = _sweep(options, device)
    console = Console(width=None if sys.stdout.isatty() else 160)
    left_out, failed, kernels, forms = [], 0, 0, 0
    for model in options.models:
        found: list[Found] = []
        chosen = [case for case in cases(calls(model, MODELS[model], setup), device) if case.moved >= how.smallest]
        for case in chosen:
            name = f"{case.plan.name} {case.direction}"
            if time.monotonic() > deadline:
                left_out.append(f"{model}: {name}")
                continue
            try:
                swept, count = sweep(case, how)
            except Exception as error:  # one kernel that does not run is no reason to lose the others' figures
                console.print(f"{model}: {name} failed: {type(error).__name__}: {error}", style="red", markup=False)
                failed += 1
                continue
            kernels, forms = kernels + 1, forms + count
            found += [swept] if swept else []
        if found:
            console.print(table(model, found, options.top))
            if options.output or not options.check:
                data = {"model": model, "dtype": options.dtype, "copy_bytes_a_second": how.copied, "columns": COLUMNS}
                data |= {"timing": _TIMING, "kernels": [each.as_dict() for each in found]}
                save(f"forms-{options.dtype}-{slug(model)}", data, options.output, device)
        failed += sum(each.wrong for each in found)
    done = "ran" if how.clock else "built"
    late = f"; no time for {', '.join(left_out)}" if left_out else ""
    console.print(f"{forms} forms of {kernels} kernels {done}; {failed} failed{late}", highlight=False, markup=False)
    return int(bool(failed or not kernels))


if __name__ == "__main__":
    sys.exit(main())
