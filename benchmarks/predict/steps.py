"""``python -m benchmarks step --predict``: times of training steps on GPUs that are not there, by the model of time.

Nothing is measured and no GPU is needed. Of a step of fxprec, with the loss inside and its AdamW, each launch on the
pretended GPU is compiled and simulated; of torch.compile's, each kernel of inductor's code of the same model, in the
best of the forms that it would try. Products, convolutions and attention, which are NVIDIA's, take a share of the
machine's peak, and torch's other ops what their bytes take at the rate of a copy: the same on both sides. Each time has
the least and the most that the assumptions allow (``parts.ASSUMED`` says which they are and whose). Floor: products,
convolutions and attention at their middle shares, and the update's bytes.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure.results import environment, save
from benchmarks.predict import inductor, ours
from benchmarks.predict.launches import pretended
from benchmarks.predict.machines import MACHINES, Machine
from benchmarks.predict.parts import ASSUMED, Parts, Times, times_of
from benchmarks.workloads.training import Workload, workloads

__all__ = ["MODELS", "SIDES", "Row", "parts_of", "run"]

#: Those whose steps an H200 measured.
MODELS: Final = ("gpt", "llama", "bert", "vit", "resnet50", "unet")


@dataclass(frozen=True)
class Row:
    """A step of one side on one machine.

    Attributes:
        side: of ``SIDES``.
        times: with the best, the middle and the worst of what is assumed; milliseconds.
        floor: milliseconds that no step takes less than, if products get their middle shares.
        simulated: kernels whose code is simulated.
        unread: those whose code is not understood, which take what their bytes take; names -> how many.
        first: milliseconds of kernels, in the middle, if each had the form that comes first; None: there is one only.
        trouble: why there are no times.
    """

    model: str
    shape: str
    side: str
    machine: str
    times: Sequence[dict[str, float]] = ()
    floor: float | None = None
    simulated: int = 0
    unread: dict[str, int] | None = None
    first: float | None = None
    trouble: str = ""


#: Whose steps are predicted.
SIDES: Final = ("fxprec", "compile")


def parts_of(side: str, model: str, size: str, machine: str, dtype: torch.dtype) -> Parts:
    """What a step consists of, in a process of its own: it says from now on that there is the machine."""
    torch.set_num_threads(1)
    (workload,) = workloads(size, only=(model,))
    if side == "compile":
        return inductor.parts_of(workload, MACHINES[machine], dtype)
    return ours.parts_of(workload, pretended(MACHINES[machine]), dtype)


def predicted(side: str, model: str, size: str, names: Sequence[str], dtype: torch.dtype) -> list[Row]:
    """Of one side for machines of one compute capability and size; what fails says why."""
    (workload,) = workloads(size, only=(model,))
    try:
        parts = parts_of(side, model, size, names[0], dtype)
        return [_row(workload, side, parts, MACHINES[name]) for name in names]
    except Exception as error:  # of inductor anything; no row is left out without a word
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return [Row(model, workload.shape, side, name, trouble=why) for name in names]


def _row(workload: Workload, side: str, parts: Parts, machine: Machine) -> Row:
    times = times_of(parts, machine)
    several = any(len(forms) > 1 for forms in parts.launches)
    return Row(
        workload.name, workload.shape, side, machine.name,
        times=[_milliseconds(each) for each in times],
        floor=_floor(parts, machine, workload.parameters()),
        simulated=len(parts.launches),
        unread=dict(Counter(each.name for each in parts.unread)),
        first=1e3 * times_of(parts.first(), machine)[1].kernels if several else None,
    )  # fmt: skip


def _milliseconds(times: Times) -> dict[str, float]:
    return {
        "all": 1e3 * times.all, "kernels": 1e3 * times.kernels, "products": 1e3 * times.products,
        "others": 1e3 * times.others, "launches": times.launches,
    }  # fmt: skip


def _floor(parts: Parts, machine: Machine, parameters: int) -> float:
    """Of AdamW: weights, moments and gradients in FP32 read, all but the gradients written."""
    shares = ASSUMED[1].shares
    products = [
        max(each.flops / (shares[each.kind] * machine.flops), each.bytes / machine.achieved)
        for each in parts.work
        if each.kind != "other"
    ]
    return 1e3 * (sum(products) + 28 * parameters / machine.achieved)


def run(options: argparse.Namespace) -> int:
    """What ``--predict`` does; returns the exit status. A file for each machine is written after each model."""
    size, dtype = "tiny" if options.check else "gpu", options.dtype[0]
    console, rows, machines = Console(width=200), list[Row](), options.predict or ("H200",)
    data = {"environment": environment() | {"device": "predicted"}, "dtype": dtype, "size": size}
    data |= {"assumed": [asdict(each) for each in ASSUMED]}
    for model in options.only or MODELS:
        found = [*_model(model, size, machines, getattr(torch, dtype))]
        rows += found
        console.print(table(found))
        for row in found:
            if row.trouble or row.unread:
                unread = ", ".join(f"{count} {name}" for name, count in (row.unread or {}).items())
                why = row.trouble or f"as their bytes, for loops are unrolled in part: {unread}"
                console.print(f"{row.model}, {row.side}, {row.machine}: {why}", highlight=False)
        if options.output or not (options.check or options.only):
            for machine in machines:
                of = [asdict(row) for row in rows if row.machine == machine]
                save(f"step-{size}-{dtype}-{machine}", data | {"rows": of}, options.output)
    return int(any(row.trouble for row in rows))


def _model(model: str, size: str, names: Sequence[str], dtype: torch.dtype) -> Iterator[Row]:
    def alike(machine: Machine) -> tuple[int, int]:
        return machine.capability, machine.processors

    chosen = sorted((MACHINES[name] for name in names), key=alike)
    for _, machines in itertools.groupby(chosen, key=alike):
        same = [machine.name for machine in machines]
        for side in SIDES:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                yield from pool.submit(predicted, side, model, size, same, dtype).result()


def table(rows: Sequence[Row]) -> Table:
    """A line for each step."""
    made = Table(title="Predicted, by a model of time: nothing was measured")
    for name in ("model", "", "machine", "side", "ms", "from", "to", "floor", "kernels", "products", "others"):
        made.add_column(name, justify="left" if name in ("model", "", "machine", "side") else "right")
    made.add_column("launches", justify="right")
    for row in rows:
        if row.trouble:
            made.add_row(row.model, row.shape, row.machine, row.side, "not predicted")
            continue
        best, middle, worst = row.times
        figures = (middle["all"], best["all"], worst["all"], row.floor or 0.0)
        figures += tuple(middle[name] for name in ("kernels", "products", "others"))
        cells = [f"{figure:.2f}" for figure in figures]
        made.add_row(row.model, row.shape, row.machine, row.side, *cells, str(round(middle["launches"])))
    return made
