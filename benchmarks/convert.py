"""What ``convert`` costs, beside the captures that it stands on and its peers, up to a hundred thousand nodes.

    python -m benchmarks convert [--layers 12 50 200] [--nodes 1000 10000 100000] [--limit 60]

On one core, in seconds of the processor (torch.compile, which starts compilers, by the wall clock). First table: stacks
of pre-norm blocks, each way to get a graph: ``symbolic_trace``, which stops at modules of torch.nn, and ``convert`` (no
inputs); dynamo's capture alone and ``convert`` on it (at the first call); torch.fx's tracer told to go through modules,
as ours does (it looks through all names for each weight: quadratic); ``torch.export``; and torch.compile with inductor
(forward and backward, from an empty cache). What would take longer than the limit, by what the stack before it took,
is left out. "x": what convert takes besides its passes, over symbolic_trace or dynamo of the same model. "nodes": of
the graph that the passes are given, weights among them.

Second table: the passes alone on synthetic graphs, in milliseconds per 1,000 nodes: a linear cost keeps a column flat;
"regions" is ``fuse`` where it forms fused regions. Third table: what the first call of a region costs, once for all
that are equal. Last, whether DESIGN's budgets are met.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure.plots import curves
from benchmarks.measure.results import environment, save, save_figure
from benchmarks.measure.timing import one_core
from benchmarks.reports.convert import (
    ALL,
    REGIONS,
    STANDS_ON,
    WAYS,
    Budget,
    Stack,
    budgets,
    derivations,
    exponent,
    pass_times,
    stacks,
)

__all__ = ["main"]

_LAYERS: Final = (12, 50, 200, 800, 3000)
_NODES: Final = (1_000, 3_000, 10_000, 30_000, 100_000)


def stack_table(found: Sequence[Stack], limit: float) -> Table:
    shown = Table(title="Stacks of blocks, seconds", caption=f"-: beyond {limit:g} s, left out")
    headings = [heading for way in WAYS for heading in ([way, "x"] if way in STANDS_ON else [way])]
    for column in ("blocks", "nodes", *headings):
        shown.add_column(column, justify="right")
    for stack in found:
        cells = []
        for way in WAYS:
            best = stack.best(way)
            cells.append("-" if best is None else f"{best:.3f}")
            if way in STANDS_ON:
                share = stack.over_capture(way)
                cells.append("-" if share is None else f"{share:.2f}")
        shown.add_row(str(stack.blocks), str(stack.nodes), *cells)
    return shown


def pass_table(found: Mapping[int, Mapping[str, float]]) -> Table:
    shown = Table(title="The passes alone, milliseconds per 1,000 nodes")
    names = [*next(iter(found.values()))]
    for column in ("nodes", *names):
        shown.add_column(column, justify="right")
    for nodes, times in found.items():
        shown.add_row(str(nodes), *(f"{times[name]:.0f}" for name in names))
    if len(found) > 1:
        slopes = [exponent([*found], [nodes * times[name] for nodes, times in found.items()]) for name in names]
        shown.add_section()
        shown.add_row("exponent", *(f"{slope:.2f}" for slope in slopes))
    return shown


def derivation_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    shown = Table(title="Deriving a region, forward and backward, milliseconds")
    for column in ("region", "nodes", "first", "again, other rows"):
        shown.add_column(column, justify="left" if column == "region" else "right")
    for name, row in found.items():
        shown.add_row(name, str(row["nodes"]), f"{row['first_ms']:.1f}", f"{row['again_ms']:.1f}")
    return shown


def draw(figure: Any, stacked: Sequence[Stack], passes: Mapping[int, Mapping[str, float]]) -> None:
    """Seconds over nodes, both logarithmic: ways to capture, and the passes alone."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for way in WAYS:
        points = [(float(stack.nodes), best) for stack in stacked if (best := stack.best(way)) is not None]
        if points:
            lines[way] = [n for n, _ in points], [t for _, t in points]
    for name, label in ((ALL, "passes alone"), (REGIONS, "fuse with regions")):
        if passes:
            times = [1e-6 * nodes * each[name] for nodes, each in passes.items()]
            slope = f", exponent {exponent([*passes], times):.2f}" if len(passes) > 1 else ""
            lines[label + slope] = [float(nodes) for nodes in passes], times
    curves(figure, lines, x="nodes", y="seconds, one core", log=True)


def as_dict(
    stacked: Sequence[Stack],
    passes: Mapping[int, Mapping[str, float]],
    derived: Mapping[str, Mapping[str, Any]],
    kept: Sequence[Budget],
    limit: float,
) -> dict[str, Any]:
    return {
        "limit_s": limit,
        "stacks": [
            asdict(stack) | {"over_capture": {way: stack.over_capture(way) for way in stack.passes}}
            for stack in stacked
        ],
        "passes_ms_per_1000": {str(nodes): dict(times) for nodes, times in passes.items()},
        "derivations": dict(derived),
        "budgets": [asdict(each) | {"met": each.met} for each in kept],
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status: 1 where a budget is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks convert", description="Time convert and its peers")
    parser.add_argument("--layers", type=int, nargs="*", default=_LAYERS, metavar="N", help="blocks of the stacks")
    parser.add_argument("--nodes", type=int, nargs="*", default=_NODES, metavar="N", help="of the synthetic graphs")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="leave out what takes longer")
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="for JSON and the figure")
    options = parser.parse_args(arguments)
    if not all(each > 0 for each in (*options.layers, *options.nodes)):
        parser.error("--layers and --nodes are 1 at least")
    whole = (tuple(options.layers), tuple(options.nodes)) == (_LAYERS, _NODES)
    device = torch.device("cpu")
    measured = environment(device)
    console = Console(width=None if sys.stdout.isatty() else 160)
    with one_core():
        stacked = stacks(options.layers, options.limit)
        if stacked:
            console.print(stack_table(stacked, options.limit))
        pass_times(200)  # imports and caches
        passes = {nodes: pass_times(nodes) for nodes in sorted(options.nodes)}
        if passes:
            console.print(pass_table(passes))
        derived = derivations()
        console.print(derivation_table(derived))
    kept = budgets(stacked, passes)
    for each in kept:
        console.print(str(each), highlight=False)
    if whole or options.output:
        data = {"environment": measured, **as_dict(stacked, passes, derived, kept, options.limit)}
        save("convert", data, options.output, device)
        save_figure("convert", lambda figure: draw(figure, stacked, passes), options.output, device=device)
    else:
        console.print("nothing is written: a run of some of it wants --output FOLDER", highlight=False)
    return int(not all(each.met for each in kept))


if __name__ == "__main__":
    sys.exit(main())
