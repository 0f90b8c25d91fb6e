"""Training steps on a CPU as users run them: one way in a process of its own, with malloc as it comes, and kept.

    python -m benchmarks alone [--only gpt mlp] [--variants autocast o1] [--times 3]

``benchmarks.step`` compares ways in one process, in which malloc keeps what is freed, so that none pays for the pages
of another. Here a process has one model and one way. What lies on top of its heap at the end of a step goes back to the
system, and is cleared anew, page by page, in the next; how much that is depends on how its tensors happen to lie. With
``fxprec.keep_memory`` nothing goes back, whatever trains. Figures are medians of the steps of a process; of several
processes, which take turns, the median and in brackets the least and the most. Pages: those that a step asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

import fxprec
from benchmarks.measure.processes import add_choice, chosen, run_one
from benchmarks.measure.training_step import Setup
from benchmarks.measure.variants import BASELINE, VARIANTS
from benchmarks.workloads.training import Size, workloads

__all__ = ["VARIANTS_HERE", "Figures", "main", "measure", "steps"]

VARIANTS_HERE: Final = (BASELINE, "o1", "o1-fused-low")
_MODELS: Final = ("mlp", "cnn", "resnet50", "unet", "gpt", "llama", "bert", "vit")
_WARM_UP: Final = 4


@dataclass
class Figures:
    """Of one way to train a model, of each process: milliseconds of a step, and pages that it asked for."""

    ms: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{statistics.median(self.ms):.1f} ({min(self.ms):.1f} to {max(self.ms):.1f})"


def steps(model: str, variant: str, size: Size, kept: bool, count: int) -> tuple[float, float]:
    """(milliseconds of a step, page faults) in this process, which has done nothing else."""
    import resource  # not on every system

    if kept:
        fxprec.keep_memory()
    (workload,) = workloads(size, only=(model,))
    step = VARIANTS[variant].build(workload, Setup(torch.device("cpu")))
    for _ in range(_WARM_UP):
        step()
    times = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return statistics.median(times), faults / count


def measure(model: str, variant: str, size: Size, kept: bool, count: int) -> tuple[float, float]:
    """The same in a process of its own.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    more = ["--steps", str(count), *(["--kept"] if kept else [])]
    ms, faults = json.loads(run_one("benchmarks.alone", model, variant, size, more))
    return ms, faults


def _show(model: str, found: dict[tuple[str, bool], Figures], console: Console) -> None:
    table = Table("way", title=f"{model}, ms a step")
    for heading in ("malloc as it comes", "pages", "x", "kept", "pages", "x"):
        table.add_column(heading, justify="right")
    base = statistics.median(found[BASELINE, False].ms)
    for variant in dict.fromkeys(variant for variant, _ in found):
        cells = []
        for kept in (False, True):
            figures = found[variant, kept]
            pages, times = statistics.median(figures.faults), base / statistics.median(figures.ms)
            cells += [str(figures), f"{pages:.0f}", f"{times:.2f}"]
        table.add_row(variant, *cells)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks alone", description="Time steps of processes that train one model in one way"
    )
    add_choice(parser, VARIANTS_HERE)
    parser.add_argument("--times", type=int, default=3, help="processes of each (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="that a process times (%(default)s)")
    parser.add_argument("--kept", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="one process of each at a tiny size")
    options = parser.parse_args(arguments)
    models, variants = chosen(parser, options, _MODELS, VARIANTS_HERE)
    if options.one:
        print(json.dumps(steps(models[0], options.one, options.size, options.kept, options.steps)))
        return 0
    if options.check:
        models, options.size, options.times, options.steps = models[:1], "tiny", 1, 2
    console = Console(width=None if sys.stdout.isatty() else 120)
    ways = [(variant, kept) for variant in dict.fromkeys((BASELINE, *variants)) for kept in (False, True)]
    for model in models:
        found = {way: Figures() for way in ways}
        try:
            for _ in range(options.times):
                for (variant, kept), figures in found.items():
                    ms, faults = measure(model, variant, options.size, kept, options.steps)
                    figures.ms.append(ms)
                    figures.faults.append(faults)
        except RuntimeError as error:  # such as that there is no compiler
            console.print(str(error), style="red", highlight=False, markup=False)
            return 1
        _show(model, found, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
