"""The first training step, from the model in memory to its first loss: with empty caches on disk, and with full ones.

    python -m benchmarks first [--only gpt mlp] [--variants o1 o1-fused-low compile]

Each figure is of a process of its own: converting or compiling, and one step, which imports, traces, rewrites, and
compiles loops (``fuse=True``, ``AdamW(compiled=True)``) or inductor's kernels. "empty": nothing was compiled on this
machine before; "full": the same again. What compiles nothing is measured once. Where no C++ compiler is, ``fuse=True``
raises within a second of that and says so; by default nothing is compiled.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure.processes import add_choice, chosen, run_one
from benchmarks.measure.results import environment, save
from benchmarks.measure.training_step import Setup
from benchmarks.measure.variants import BASELINE, VARIANTS
from benchmarks.workloads.training import Size, workloads

__all__ = ["CACHES", "COMPILES", "VARIANTS_HERE", "first_step", "main", "measure"]

VARIANTS_HERE: Final = (BASELINE, "o1", "o1-fused", "o1-fused-loss", "compile")
#: Those of them that look into caches on disk.
COMPILES: Final = frozenset({"o1-fused", "o1-fused-low", "o1-fused-loss", "o1-compiled", "o1-inductor", "compile"})
#: Where fxprec, inductor and Triton keep what they compiled.
CACHES: Final = ("FXPREC_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_MODELS: Final = ("mlp", "cnn", "gpt", "llama", "bert")
#: inductor takes a CPU a minute or two for each of the others.
_QUICK_TO_COMPILE: Final = ("mlp", "cnn", "gpt")


def first_step(model: str, variant: str, size: Size) -> float:
    """Seconds from a model and data in memory to the end of the first step, in this process."""
    (workload,) = workloads(size, only=(model,))
    step = VARIANTS[variant].build(workload, Setup(torch.device("cpu"), clip=1.0))
    step()
    return time.perf_counter() - step.ready


def measure(model: str, variant: str, size: Size, caches: pathlib.Path) -> float:
    """The same in a process of its own.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    surroundings = {name: str(caches / name) for name in CACHES}
    return float(run_one("benchmarks.first", model, variant, size, surroundings=surroundings))


def _all(models: Sequence[str], variants: Sequence[str], size: Size, console: Console) -> list[dict[str, Any]]:
    rows = []
    for model in models:
        for variant in variants:
            if variant == "compile" and model not in _QUICK_TO_COMPILE:
                console.print(f"{model}, compile: left out, inductor takes minutes", highlight=False)
                continue
            with tempfile.TemporaryDirectory() as folder:
                times = [measure(model, variant, size, pathlib.Path(folder)) for _ in range(1 + (variant in COMPILES))]
            empty, full = (times[0], times[1]) if len(times) > 1 else (None, times[0])
            rows.append({"model": model, "variant": variant, "empty_s": empty, "full_s": full})
            console.print(f"{model}, {variant}: {', '.join(f'{each:.2f} s' for each in times)}", highlight=False)
    return rows


def _show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table("model", "variant", title="the first step, s")
    for heading in ("empty caches", "full caches"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = ("" if row[key] is None else f"{row[key]:.2f}" for key in ("empty_s", "full_s"))
        table.add_row(row["model"], row["variant"], *cells)
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks first", description="Time first steps")
    add_choice(parser, VARIANTS_HERE)
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="for JSON")
    parser.add_argument("--check", action="store_true", help="two variants of a tiny model; nothing is written")
    options = parser.parse_args(arguments)
    models, variants = chosen(parser, options, _MODELS, VARIANTS_HERE)
    if options.one:
        print(first_step(models[0], options.one, options.size))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.check:
        _show(_all(["mlp"], [BASELINE, "o1-compiled"], "tiny", console), console)
        return 0
    around = environment(torch.device("cpu"))
    rows = _all(models, variants, options.size, console)
    _show(rows, console)
    if options.output is not None or not (options.only or options.variants):
        data = {"environment": around, "rows": rows}
        save(f"first-{options.size}-bfloat16", data, options.output, torch.device("cpu"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
