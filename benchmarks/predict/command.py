"""``python -m benchmarks kernels --predict``: times of kernels on GPUs that are not there, by a model of time.

Nothing is measured and no GPU is needed: each kernel is compiled for the machine's compute capability, its SASS, grid
and bytes are read, and a part of a multiprocessor is simulated (``model``, ``machines`` and ``sass`` say how and by
whose figures). "x" is the time over what its bytes take at the rate of a large copy: 1 is as good as can be.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure.results import environment, save
from benchmarks.predict.against import compared
from benchmarks.predict.cases import Case, Untouched, cases
from benchmarks.predict.compared import Compared
from benchmarks.predict.launches import Launch, launches_of, pretended
from benchmarks.predict.machines import MACHINES, Machine
from benchmarks.predict.model import LAUNCH, Prediction, predict
from benchmarks.predict.sass import SassError
from benchmarks.workloads.regions import MODELS

__all__ = ["Row", "run"]

#: From which ratio on a row says why.
GOAL: Final = 1.15


@dataclass(frozen=True)
class Row:
    """One pass of a kernel on one machine.

    Attributes:
        us: microseconds; None where there is no prediction.
        bound: those that the bytes take that must be moved.
        launches: kernels.
        why: it takes longer than ``GOAL`` times that; "" where it does not.
    """

    kernel: str
    shape: str
    direction: str
    machine: str
    us: float | None
    bound: float
    launches: int
    why: str


def row_of(case: Case, launches: Sequence[Launch], machine: Machine, trouble: str = "") -> Row:
    """Predict what a case launched."""
    found = [predict(launch.kernel, machine) for launch in launches]
    seconds, bound = sum(each.seconds for each in found), case.bound / machine.achieved
    why = trouble or (_why(case, launches, found, seconds, machine) if seconds > GOAL * bound else "")
    us = None if trouble else 1e6 * seconds
    return Row(case.kernel, case.shape, case.direction, machine.name, us, 1e6 * bound, len(launches), why)


def _why(case: Case, launches: Sequence[Launch], found: Sequence[Prediction], seconds: float, machine: Machine) -> str:
    """What takes the most beyond the bound, in words."""
    spilled = sum(launch.spills for launch in launches)
    if spilled:
        return f"spills {spilled} bytes a thread, which is not predicted"
    bound = case.bound / machine.achieved
    moved = sum(launch.kernel.moved for launch in launches)
    slowest, launch = max(zip(found, launches, strict=True), key=lambda pair: pair[0].seconds - pair[0].bound)
    kernel = launch.kernel
    lost = {
        f"moves {moved / case.bound:.2f} times as much": moved / machine.achieved - bound,
        f"{len(launches)} launch{'es' * (len(launches) > 1)} of {1e6 * LAUNCH:.0f} us": LAUNCH * len(launches),
    }
    lost[
        f"`{launch.name}`: {slowest.limit}; of its {kernel.programs / machine.processors:.1f} programs of "
        f"{kernel.warps} warps a multiprocessor holds {slowest.held}"
    ] = seconds - bound - sum(lost.values())
    return max(lost, key=lambda what: lost[what])


def predicted(names: Sequence[str], dtype: torch.dtype, tiny: bool, only: str) -> list[Row]:
    """For machines of one compute capability and size, in a process of its own."""
    machines = [MACHINES[name] for name in names]
    device = pretended(machines[0])
    return [*_rows(machines, Untouched(device, dtype, tiny), only)]


def predicted_forms(name: str, dtype: torch.dtype, device: str, only: str) -> list[Compared]:
    """Forms that were measured on a device, in a process of its own."""
    setup = Untouched(pretended(MACHINES[name]), dtype)
    models = [model for model in MODELS if only and only in model]
    return compared(setup, MACHINES[name], device, str(dtype).removeprefix("torch."), models)


def _rows(machines: Sequence[Machine], setup: Untouched, only: str) -> Iterator[Row]:
    for case in cases(setup, only):
        try:
            launches = launches_of(case.run, case.moved)
            trouble = "" if launches else "launches no kernel"
        except SassError as error:
            launches, trouble = [], f"not predicted: {error}"
        for machine in machines:
            yield row_of(case, launches, machine, trouble)


def run(options: argparse.Namespace, dtype: torch.dtype) -> int:
    """What ``--predict`` does; returns the exit status."""
    chosen = [MACHINES[name] for name in options.predict or ("H200",)]
    if options.against:
        return _against(options, chosen[0], dtype)

    def alike(machine: Machine) -> tuple[int, int]:
        return machine.capability, machine.processors

    rows: list[Row] = []
    for _, machines in itertools.groupby(sorted(chosen, key=alike), key=alike):
        names = [machine.name for machine in machines]
        with _process() as pool:
            rows += pool.submit(predicted, names, dtype, options.check, options.only).result()
    Console(width=200).print(table(rows))
    if options.output or not options.check:
        data: dict[str, Any] = {"environment": environment() | {"device": "predicted"}, "dtype": options.dtype}
        save(f"kernels-{options.dtype}", data | {"rows": [asdict(row) for row in rows]}, options.output)
    return int(not rows)


def _against(options: argparse.Namespace, machine: Machine, dtype: torch.dtype) -> int:
    """What ``--against`` does."""
    with _process() as pool:
        found = pool.submit(predicted_forms, machine.name, dtype, options.against, options.only).result()
    made = Table(title=f"Forms as {options.against} measured them, and as the model predicts them")
    for name in ("model", "region", "pass", "forms", "predicted / measured", "from", "to", "ordered", "pick"):
        made.add_column(name)
    for each in found:
        figures = (each.mean, min(each.ratios), max(each.ratios), each.ordered, each.pick)
        made.add_row(
            each.model, each.region, each.direction, str(len(each.times)), *(f"{figure:.2f}" for figure in figures)
        )
    Console(width=200).print(made)
    data = {"environment": environment() | {"device": "predicted"}, "dtype": options.dtype, "machine": machine.name}
    data |= {"measured": options.against, "kernels": [asdict(each) for each in found]}
    save(f"forms-{options.dtype}", data, options.output)
    return int(not found)


def _process() -> ProcessPoolExecutor:
    """That pretends to have a GPU, as a process does for good."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def table(rows: Sequence[Row]) -> Table:
    """A line for each pass of each kernel."""
    made = Table(title="Predicted, by a model of time: nothing was measured")
    for name in ("kernel", "shape", "pass", "machine", "us", "x", "why"):
        made.add_column(name, justify="right" if name in ("us", "x") else "left")
    for row in rows:
        figures = ("", "") if row.us is None else (f"{row.us:.1f}", f"{row.us / row.bound:.2f}")
        made.add_row(row.kernel, row.shape, row.direction, row.machine, *figures, row.why)
    return made
