"""Trains to a fixed number of steps with several seeds: final loss, test accuracy and time of an epoch.

    python -m benchmarks accuracy [--only digits text] [--variants fp32 autocast o1] [--seeds 3] [--epochs 8]

The table of the mixed-precision tutorials, with fxprec beside. ``digits``: the tutorials' MNIST CNN on scikit-learn's
digits, upsampled to 28 x 28. ``text``: a small GPT on the source text of Python's standard library, where accuracy is
that of the next character. Nothing is downloaded.

All variants of a seed start from the same weights, see the same batches in the same order, and take turns, an epoch
each. loss: mean of the last epoch; accuracy: on the test set. Both are shown as mean and half the range over the seeds,
and said to be "equal" to FP32's only where the means differ by no more than FP32's own seeds do (or by one answer of a
test set). Times leave out the first epoch, which converts; what lies within the noise, which a variant trained twice
shows, is "=".
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Generator

import fxprec
from benchmarks.measure.interleaved import Ratio, Samples, noise, order
from benchmarks.measure.plots import bars
from benchmarks.measure.results import save, save_figure
from benchmarks.measure.training_step import Setup, Step, tf32
from benchmarks.measure.variants import BASELINE, VARIANTS, Variant
from benchmarks.workloads.tasks import TASKS, Task
from benchmarks.workloads.training import named
from fxprec.model.conversion import is_converted

__all__ = ["DEFAULT", "Run", "Verdict", "compare", "main", "verdict"]

Verdict = Literal["equal", "better", "worse"]
REFERENCE: Final = "fp32"
DEFAULT: Final = (REFERENCE, BASELINE, "o1", "o1-own", "o2-own", "o1-pays")
_TWIN: Final = f"{BASELINE} again"


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A variant with one seed.

    Attributes:
        loss: mean of the last epoch. accuracy: of the test set, 0 to 1.
        seconds: of each epoch after the first.
    """

    variant: str
    seed: int
    loss: float = 0.0
    accuracy: float = 0.0
    seconds: list[float] = field(default_factory=list)


def compare(task: Task, variants: Mapping[str, Variant], seeds: Sequence[int], setup: Setup) -> list[Run]:
    """Train all variants with each seed; names are those of the result, and may hold the same variant twice."""
    runs = []
    for seed in seeds:
        seeded = replace(setup, seed=seed, lr=task.lr, batches=1)
        steps = {name: variant.build(task.workload, seeded) for name, variant in variants.items()}
        found = {name: Run(name, seed) for name in steps}
        for epoch in range(task.epochs):
            for name in order([*steps], epoch):
                seconds, loss = _epoch(task, steps[name], seed, epoch, setup.device)
                found[name].loss = loss
                if epoch:
                    found[name].seconds.append(seconds)
        for name, step in steps.items():
            lowers = variants[name].name != REFERENCE and not is_converted(step.model)
            with torch.autocast(setup.device.type, dtype=setup.dtype, enabled=lowers):
                found[name].accuracy = _accuracy(task, step, setup.device)
        runs += found.values()
        steps.clear()
        torch.compiler.reset()
    return runs


def _epoch(task: Task, step: Step, seed: int, epoch: int, device: torch.device) -> tuple[float, float]:
    """One pass over the data: seconds, and the mean of the losses."""
    shuffled = torch.randperm(len(task.inputs), generator=Generator().manual_seed(1000 * seed + epoch))
    chosen = [*shuffled.split(task.batch)]
    if len(chosen[-1]) < task.batch and len(chosen) > 1:
        chosen.pop()  # graphs of fixed shapes want full batches
    batches = [(task.inputs[rows].to(device), task.targets[rows].to(device)) for rows in chosen]
    torch.manual_seed(1000 * seed + epoch)  # the same dropout for all
    _wait(device)
    started = time.perf_counter()
    losses = [step.train(*batch) for batch in batches]
    mean = torch.stack(losses).mean().item()
    return time.perf_counter() - started, mean


@torch.no_grad()
def _accuracy(task: Task, step: Step, device: torch.device) -> float:
    step.model.eval()
    found = [step.model(x.to(device)).argmax(-1).cpu() for x in task.test_inputs.split(task.batch)]
    step.model.train()
    return int((torch.cat(found) == task.test_targets).sum()) / task.answers


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# -- what the figures say ---------------------------------------------------------------------------------------------


def verdict(found: Sequence[float], reference: Sequence[float], *, higher: bool, least: float = 0.0) -> Verdict:
    """Whether means differ by more than the reference's values among themselves.

    Args:
        found, reference: a value a seed.
        higher: is better.
        least: a difference that is never one, such as a single answer of a test set.
    """
    difference = statistics.fmean(found) - statistics.fmean(reference)
    if abs(difference) <= max(max(reference) - min(reference), least) + 1e-12:  # of a sum's rounding
        return "equal"
    return "better" if (difference > 0) == higher else "worse"


def summary(task: Task, runs: Sequence[Run]) -> dict[str, Any]:
    """The noise, and by variant mean and half the range of loss and accuracy, verdicts, seconds of an epoch, ratio.

    There is no verdict of a single seed, which shows no range.
    """
    names = [*dict.fromkeys(run.variant for run in runs)]
    of = {name: [run for run in runs if run.variant == name] for name in names}
    times = {name: Samples(tuple((s,) for run in of[name] for s in run.seconds)) for name in names}
    timed = BASELINE in times and bool(times[BASELINE].rounds)
    floor = noise([Ratio.of(times[_TWIN], times[BASELINE])]) if timed and _TWIN in times else None
    found = {}
    for name in names:
        losses, rights = [run.loss for run in of[name]], [run.accuracy for run in of[name]]
        what = VARIANTS[name].what if name in VARIANTS else name
        row: dict[str, Any] = {"what": what, "loss": _spread(losses), "accuracy": _spread(rights)}
        if name != REFERENCE and len(of.get(REFERENCE, [])) > 1:
            reference = of[REFERENCE]
            row["loss"]["verdict"] = verdict(losses, [run.loss for run in reference], higher=False)
            row["accuracy"]["verdict"] = verdict(
                rights, [run.accuracy for run in reference], higher=True, least=1 / task.answers
            )
        if timed:
            row["epoch_s"] = times[name].median
            if floor is not None and name not in (BASELINE, _TWIN):
                ratio = Ratio.of(times[name], times[BASELINE])
                row["ratio"] = {"value": ratio.value, "verdict": ratio.verdict(floor)}
        found[name] = row
    return {"noise": floor, "variants": {name: row for name, row in found.items() if name != _TWIN}}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"mean": statistics.fmean(values), "range": (max(values) - min(values)) / 2}


def table(task: Task, found: Mapping[str, Any]) -> Table:
    floor = found["noise"]
    caption = "" if floor is None else f"noise {floor:.1%}: '=' is within it; "
    shown = Table(
        title=f"{task.workload.name}: {task.workload.shape}, {task.epochs} epochs",
        caption=f"{caption}verdicts on loss and accuracy are against FP32, by the range of its seeds",
    )
    for column in ("variant", "epoch s", f"x {BASELINE}", "loss", "", "accuracy", ""):
        shown.add_column(column, justify="left" if column == "variant" else "right")
    for row in found["variants"].values():
        ratio, loss, right = row.get("ratio"), row["loss"], row["accuracy"]
        shown.add_row(
            row["what"], f"{row['epoch_s']:.3f}" if "epoch_s" in row else "",
            "" if ratio is None else f"{ratio['value']:.2f} {ratio['verdict']}",
            f"{loss['mean']:.4f} ± {loss['range']:.4f}", loss.get("verdict", ""),
            f"{right['mean']:.2%} ± {right['range']:.2%}", right.get("verdict", ""),
        )  # fmt: skip
    return shown


def draw(figure: Any, runs: Sequence[Run]) -> None:
    """Loss, accuracy and seconds of an epoch; a dot a seed or an epoch."""
    names = [*dict.fromkeys(run.variant for run in runs)]
    panels: dict[str, dict[str, list[float]]] = {
        "loss of the last epoch": {name: [run.loss for run in runs if run.variant == name] for name in names},
        "test accuracy, %": {name: [100 * run.accuracy for run in runs if run.variant == name] for name in names},
        "seconds of an epoch": {
            name: [s for run in runs if run.variant == name for s in run.seconds] or [0.0] for name in names
        },
    }
    bars(figure, panels)


# -- the command ------------------------------------------------------------------------------------------------------


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks accuracy", description="Train with several seeds: loss, accuracy, time of an epoch"
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--variants", nargs="+", default=(), metavar="NAME", help=f"by default {', '.join(DEFAULT)}")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--epochs", type=int, help="by default as many as the task needs")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="for JSON and figures")
    options = parser.parse_args(arguments)
    options.whole = not (options.only or options.variants or options.epochs or options.seeds < 3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        options.setup = Setup(device, getattr(torch, options.dtype))
        names = dict.fromkeys([REFERENCE, BASELINE, *(named(options.variants, VARIANTS, "variant") or DEFAULT)])
        options.tasks = named(options.only, TASKS, "task") or [*TASKS]
        if options.seeds < 1 or (options.epochs is not None and options.epochs < 1):
            raise ValueError("--seeds and --epochs are 1 at least")
    except ValueError as error:
        parser.error(str(error))
    options.chosen = {name: VARIANTS[name] for name in names} | {_TWIN: VARIANTS[BASELINE]}
    unserved = [
        f"{name}: {v.unserved(options.setup)}" for name, v in options.chosen.items() if v.unserved(options.setup)
    ]
    if unserved:
        parser.error("; ".join(unserved))
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name in options.tasks:
        task = TASKS[name]()
        task = replace(task, epochs=options.epochs or task.epochs)
        with tf32(False):
            runs = compare(task, options.chosen, range(options.seeds), options.setup)
        found = summary(task, runs)
        console.print(table(task, found))
        if options.whole or options.output:
            _write(task, found, runs, options)
        else:
            console.print("nothing is written: a run of some of it wants --output FOLDER", highlight=False)
    return 0


def _write(task: Task, found: Mapping[str, Any], runs: Sequence[Run], options: argparse.Namespace) -> None:
    name, device = task.workload.name, options.setup.device
    data = {
        "task": name, "shape": task.workload.shape, "dtype": options.dtype, "epochs": task.epochs,
        "seeds": options.seeds, "answers": task.answers, **found, "runs": [asdict(run) for run in runs],
    }  # fmt: skip
    file = f"accuracy-{options.dtype}-{name}"
    save(file, data, options.output, device)
    save_figure(file, lambda figure: draw(figure, runs), options.output, size=(12.0, 4.5), device=device)


if __name__ == "__main__":
    fxprec.keep_memory()
    sys.exit(main())
