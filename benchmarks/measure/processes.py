"""One way to train a model in a process of its own: what benchmarks share that start such processes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks.measure.results import ROOT
from benchmarks.measure.variants import VARIANTS
from benchmarks.workloads.training import NAMES, Size, named

__all__ = ["add_choice", "chosen", "run_one"]


def run_one(
    module: str, model: str, variant: str, size: Size, more: Sequence[str] = (), surroundings: Mapping[str, str] = {}
) -> str:
    """The last line that a benchmark prints when its option ``--one`` names a variant.

    Args:
        module: of the benchmark.
        more: of its options.
        surroundings: variables of the environment beside those of this process.

    Raises:
        RuntimeError: it failed; with the last that it said.
    """
    command = [sys.executable, "-m", module, "--size", size, "--only", model, "--one", variant, *more]
    environment = {**os.environ, **surroundings}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{model}, {variant}: {''.join(run.stderr.strip().splitlines()[-1:])}")
    return run.stdout.splitlines()[-1]


def add_choice(parser: argparse.ArgumentParser, variants: Sequence[str]) -> None:
    """The options that say which models and variants run, and ``--one``; by default these variants."""
    parser.add_argument("--size", default="cpu", choices=("cpu", "launch", "tiny"))
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="only these models")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help=f"instead of {', '.join(variants)}")
    parser.add_argument("--one", help=argparse.SUPPRESS)


def chosen(
    parser: argparse.ArgumentParser, options: argparse.Namespace, models: Sequence[str], variants: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(models, variants) that the options name, else these; a name that is none ends the command."""
    try:
        return (
            named(options.only or models, NAMES, "model"),
            named(options.variants or variants, VARIANTS, "variant"),
        )
    except ValueError as error:
        parser.error(str(error))
