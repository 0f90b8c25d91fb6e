"""What there is to read of a converted model, and how long that takes to make: its report, all its nodes, its page.

    python -m benchmarks inspection [--only resnet50 gpt2-12 bert]

A ResNet-50, a GPT-2 of 12 layers and the models of the tests' zoo are converted, run forward and backward once, and
looked at: "report" is what ``print(fxprec.report(model))`` prints, "nodes" ``print(fxprec.report(model).nodes)``,
"page" the file of ``fxprec.report(model).to_html(path)``. Seconds are those of one run, by the clock. Nothing is
written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch
from rich.console import Console
from rich.table import Table

import fxprec
from benchmarks.workloads.zoo import ZOO, Case, gpt2, resnet

__all__ = ["CASES", "Looked", "look", "main"]

T = TypeVar("T")

#: The zoo, and before it two models in the depth that people know.
CASES: Final[dict[str, Case]] = {
    "resnet50": Case(resnet, lambda: {"input": torch.randn(2, 3, 64, 64)}, lambda output: output.square().mean()),
    "gpt2-12": Case(lambda: gpt2(12), ZOO["gpt2"].inputs),
    **ZOO,
}
COLUMNS: Final = ("model", "report, lines", "seconds", "nodes, lines", "page, kB", "seconds")


@dataclass(frozen=True, slots=True)
class Looked:
    """Of one model: lines and seconds of its report, lines of its nodes, bytes and seconds of its page."""

    lines: int
    report_s: float
    nodes: int
    page_bytes: int
    page_s: float

    def cells(self) -> tuple[str, ...]:
        """Those of a row, behind the model's name."""
        page = f"{self.page_bytes / 1e3:.0f}"
        return str(self.lines), f"{self.report_s:.2f}", str(self.nodes), page, f"{self.page_s:.2f}"


def look(case: Case) -> Looked:
    """Convert the model, run it forward and backward, and look at it."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, inputs = case.build().train(), case.inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fxprec.convert(model, inputs, dtype=torch.bfloat16)
        case.loss(model(**inputs)).backward()
    report_s, text = _timed(lambda: str(fxprec.report(model)))
    report = fxprec.report(model)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page_s, _ = _timed(lambda: report.to_html(page))
        return Looked(_lines(text), report_s, _lines(str(report.nodes)), page.stat().st_size, page_s)


def _lines(text: str) -> int:
    return len(text.splitlines())


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks inspection", description="Count and time what there is to read of a model"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], metavar="MODEL", help=", ".join(CASES))
    options = parser.parse_args(arguments)
    table = Table(title="What there is to read of a converted model")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in options.only:
        table.add_row(name, *look(CASES[name]).cells())
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
