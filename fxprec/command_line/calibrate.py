"""Run ``python -m fxprec calibrate``: measure the costs that ``lower="pays"`` and compiled loops go by."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from fxprec.command_line.waiting import Waiting
from fxprec.command_line.written import add_json, tell
from fxprec.costs.calibration import calibrate
from fxprec.costs.files import costs_of, path_of, write
from fxprec.inspection.text import columns, plain, titled
from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.passes.costs.device_costs import DeviceCosts, Work, time_text
from fxprec.passes.graph.text import dtype_name

_ABOUT: Final = """Measure what matrix products, convolutions, attention, casts and compiled loops take on this machine,
and keep it for convert(..., lower="pays") and convert(..., fuse=True): some seconds, in which nothing else should run.
A CPU is measured with the number of threads that torch takes; with another number it is another machine."""
_STATUS: Final = """Example:
  python -m fxprec calibrate --threads 4

Exit status: 0; 1: measured, and not written; 2: it cannot be done, with a line that says why."""


def add_to(commands: Any) -> None:
    """Add the command to a parser's."""
    command = commands.add_parser(
        "calibrate",
        help="measure what lowering costs on this machine",
        description=_ABOUT,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    command.add_argument("--threads", type=int, help="of torch's, on a CPU; default: as torch has it")
    command.add_argument("--show", action="store_true", help="show the costs that serve now, and measure nothing")
    command.add_argument("--output", type=Path, help="keep them there, and not where convert looks")
    add_json(command)
    command.add_argument("--quick", action="store_true", help="two sizes only, to try the command; wants --output")
    command.set_defaults(run=run)


def run(options: argparse.Namespace, waiting: Waiting) -> int:
    """Run the command and return its exit status: 0, or 1 where the file cannot be written.

    Raises:
        ValueError: arguments that cannot be.
    """
    if options.quick and options.output is None and not options.show:
        raise ValueError("--quick measures too little for convert to go by: give --output FILE")
    if options.threads is not None:
        if options.threads < 1:
            raise ValueError(f"--threads {options.threads}: at least one")
        torch.set_num_threads(options.threads)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.show:
        tell(options, costs_of(device), _table(costs_of(device)))
        return 0
    waiting.say("measuring")
    costs = calibrate(device, quick=options.quick)
    tell(options, costs, _table(costs))
    if device == "cpu" and (why := why_not()):
        print(f"compiled loops were not measured: {why}. Shipped costs serve for them", file=sys.stderr)
    path = options.output or path_of(device)
    try:
        write(costs, path)
    except OSError as error:
        print(f"not written to {path}: {error}. Give --output FILE, or set FXPREC_CACHE_DIR", file=sys.stderr)
        return 1
    print(f"written to {path}", file=sys.stderr)
    return 0


def _table(costs: DeviceCosts) -> str:
    names = ("work", "size", *map(dtype_name, costs.curves))
    return plain(titled(str(costs), columns(names, _rows(costs))))


def _rows(costs: DeviceCosts) -> Iterator[tuple[str, ...]]:
    for work in Work:
        sizes = {size for of_work in costs.curves.values() if work in of_work for size, _ in of_work[work].points}
        for size in sorted(sizes):
            times = (time_text(of_work[work](size)) if work in of_work else "-" for of_work in costs.curves.values())
            yield str(work), f"{size:.3g}", *times
