"""Is the error ledger of ``fxprec.numerics.audit`` right? Its sums, what it finds, and what it predicts.

    python -m benchmarks ledger [adds-up planted variances] [--only gpt zoo-bert] [--samples 512]

adds-up: rounding and bend of all rows, against the error that was measured: of all models of the other benchmarks and
of the zoo, at O1 and O2, in bfloat16 and where a CPU can bear it in float16; of the tiny ones also that of gradients.
Of the others an audit's time (of the processor, on one core) and memory beside those of an FP32 training step.

planted: the result of one node after the other is rounded to four bits. Where that changes the loss by more than three
times the largest other row, the node must be the first row; its rank is shown for the others. The change is taken
twice, and both must be so large: in the low run all roundings behind the planted one are drawn anew, which changes the
loss as well; in a float64 run none is, but a ReLU near 0 may decide otherwise there than in the low run.

variances: each row's mean square over samples, summed, against the mean square error of as many held-out samples,
which a float64 copy of the original model measures. Where the sum lies outside of the interval of what was measured,
rows are not independent: "off the diagonal" is what their products add to the squares.

A model has a file of its own for each question, so that figures can be gathered a model at a time. The status is 1
where columns do not add up, or something planted is not found.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from rich.console import Console

import fxprec
from benchmarks.measure.ledgers import added_up, planted, predicted
from benchmarks.measure.results import environment, save
from benchmarks.measure.timing import one_core
from benchmarks.reports.ledger import Planted, Sum, Variances, planted_table, sum_table, variances_table
from benchmarks.workloads.subjects import ADDED_UP, SMALL, small, to_add_up, unserved
from benchmarks.workloads.training import named

__all__ = ["QUESTIONS", "SAMPLES", "main"]

SAMPLES: Final = 512
_ROUNDS: Final = 2


def _add_up(name: str, options: argparse.Namespace) -> tuple[list[Sum], dict[str, Any], bool]:
    found = []
    for subject in to_add_up(name, options.size):
        dtypes = (torch.bfloat16, torch.float16) if subject.cheap else (torch.bfloat16,)
        asked = itertools.product(dtypes, ("O1", "O2"), (False, True) if subject.cheap else (False,))
        for dtype, level, gradients in asked:
            timed = subject.size != "tiny" and (dtype, level, gradients) == (torch.bfloat16, "O1", False)
            found.append(added_up(subject, dtype, level, gradients, _ROUNDS if timed else 0))
    return found, {"model": name, "sums": [each.as_dict() for each in found]}, all(each.adds_up for each in found)


def _plant(name: str, options: argparse.Namespace) -> tuple[list[Planted], dict[str, Any], bool]:
    found = planted(small(name))
    return [found], found.as_dict(), found.due == found.found


def _predict(name: str, options: argparse.Namespace) -> tuple[list[Variances], dict[str, Any], bool]:
    found = predicted(small(name), options.samples)
    return [found], found.as_dict(), True


#: Question -> names of the models, what asks a model, and the table of all answers.
QUESTIONS: Final[dict[str, tuple[tuple[str, ...], Callable[..., Any], Callable[..., Any]]]] = {
    "adds-up": (ADDED_UP, _add_up, sum_table),
    "planted": (SMALL, _plant, planted_table),
    "variances": (SMALL, _predict, variances_table),
}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks ledger", description="Measure whether the error ledger is right"
    )
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(QUESTIONS)}; by default all")
    parser.add_argument("--only", nargs="+", default=(), metavar="MODEL", help=f"of {', '.join(ADDED_UP)}")
    parser.add_argument("--size", nargs="+", choices=["cpu", "tiny"], default=["cpu", "tiny"], help="that add up")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help="to calibrate on, and held out")
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="for JSON")
    options = parser.parse_args(arguments)
    try:
        options.questions = named(options.questions, QUESTIONS, "question") or [*QUESTIONS]
        options.only = named(options.only, ADDED_UP, "model")
        if options.samples < 2:
            raise ValueError("--samples is 2 at least")
    except ValueError as error:
        parser.error(str(error))
    options.whole = options.samples == SAMPLES and len(options.size) == 2
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    options = _options(arguments)
    device = torch.device("cpu")
    console = Console(width=None if sys.stdout.isatty() else 200)
    right = True
    for question in options.questions:
        names, ask, table = QUESTIONS[question]
        answers = []
        for name in names:
            if options.only and name not in options.only:
                continue
            if why := unserved(name):
                console.print(f"left out: {name}: {why}", highlight=False, soft_wrap=True)
                continue
            measured = environment(device)
            with warnings.catch_warnings(), one_core():
                warnings.simplefilter("ignore")  # float16 on a CPU, and what models of others say
                found, data, fine = ask(name, options)
            answers += found
            right &= fine
            if options.whole or options.output:
                save(f"ledger-{question}-{name}", {"environment": measured, **data}, options.output, device)
        console.print(table(answers))
    if not (options.whole or options.output):
        console.print("nothing is written: a run at other settings wants --output FOLDER", highlight=False)
    return int(not right)


if __name__ == "__main__":
    fxprec.keep_memory()
    sys.exit(main())
