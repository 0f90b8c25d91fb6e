"""What fxprec.numerics.watch costs: a training step with it and without, in turns, and the ops that it adds.

    python -m benchmarks watch [--size cpu|gpu|launch|tiny] [--only gpt cnn] [--level O1] [--seconds 60]

Three steps of each model run in turns: without a watch, without one again (for the noise), and within one. They are the
usual loop with fxprec's AdamW; on a CPU on one thread, by the clock of the process, which other processes do not
disturb. Columns: medians of all timed steps; "watched / plain", by rounds (see ``measure.interleaved``), "=" where it
lies within the noise; ops that torch's dispatcher sees in a step beyond those of the plain one, and those of them that
read more than single numbers. ``--level O0`` is for a CPU that has no units for the low dtype, where a lowered step
takes so long that nothing else shows.

The figures of each model are written to ``benchmarks/results/DEVICE/watch-SIZE-LEVEL-MODEL.json`` (tiny ones where
``--output`` says so), from which ``python -m benchmarks tables`` makes tables.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fxprec
from benchmarks.measure.interleaved import (
    Ratio,
    Samples,
    Schedule,
    device_times,
    measure,
    noise,
)
from benchmarks.measure.results import environment, save
from benchmarks.measure.training_step import Setup, Step, loop, prepared
from benchmarks.workloads.training import SIZES, Workload, workloads
from fxprec.torch_internals import OpMode

__all__ = ["Cost", "cost", "main"]

_SCHEDULE: Final = Schedule(warm_up=3, rounds=40, steps=2, settle=1)
_MODELS: Final = ("gpt", "cnn")
#: Ops that read no memory.
_VIEWS: Final = ("view", "detach", "slice", "alias", "unbind", "t", "expand", "select")


class _Ops(OpMode):
    """Counts ops: all of them, and those that read a tensor of more than single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.all: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0].rpartition("::")[2]
        if name not in _VIEWS:
            self.all[name] += 1
            if any(isinstance(leaf, Tensor) and leaf.numel() > 8 for leaf in tree_leaves(args)):
                self.reads[name] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Cost:
    """Of one workload. ``ops`` and ``reads``: name -> how many more there are within a watch."""

    workload: Workload
    plain: Samples
    watched: Samples
    ratio: Ratio
    noise: float
    ops: Counter[str]
    reads: Counter[str]

    def as_dict(self) -> dict[str, Any]:
        """For a file: with every sample."""
        return {
            "model": self.workload.name,
            "shape": self.workload.shape,
            "plain_ms": self.plain.median,
            "watched_ms": self.watched.median,
            "ratio": {"value": self.ratio.value, "error": self.ratio.error, "verdict": self.verdict},
            "noise": self.noise,
            "ops": dict(self.ops),
            "reads": dict(self.reads),
            "samples_ms": {"plain": self.plain.rounds, "watched": self.watched.rounds},
        }

    @property
    def verdict(self) -> str:
        """Of the watched step."""
        return {"=": "=", "faster": "slower", "slower": "faster"}[self.ratio.verdict(self.noise)]


def cost(workload: Workload, setup: Setup, level: Any, seconds: float) -> Cost:
    """Measure a workload: about so many seconds of timing."""
    clock = device_times if setup.device.type == "cuda" else _process_times
    with contextlib.ExitStack() as stack:
        names = "plain", "again", "watched"
        steps = {name: _step(workload, setup, level, stack, watched=name == "watched") for name in names}
        for step in steps.values():
            for _ in range(_SCHEDULE.warm_up):
                step()
        ops = {name: _counted(steps[name]) for name in ("plain", "watched")}
        one_each = sum(sum(clock(step, 2)) / 2 for step in steps.values()) / 1e3
        samples = measure(steps, _SCHEDULE.within(seconds, one_each), clock)
    return Cost(
        workload,
        samples["plain"],
        samples["watched"],
        Ratio.of(samples["plain"], samples["watched"]),
        noise([Ratio.of(samples["plain"], samples["again"])]),
        ops["watched"].all - ops["plain"].all,
        ops["watched"].reads - ops["plain"].reads,
    )


def _process_times(step: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.process_time()
        step()
        times.append(1e3 * (time.process_time() - started))
    return times


def _step(workload: Workload, setup: Setup, level: Any, stack: contextlib.ExitStack, watched: bool) -> Step:
    plain, batches, ready = prepared(workload, setup)
    model, scaler = fxprec.convert(plain, dtype=setup.dtype, level=level)
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=setup.lr)
    if watched:
        stack.enter_context(fxprec.numerics.watch(model, optimizer, scaler, on_finding="raise"))
    loss_of: Callable[..., Tensor] = lambda *batch: workload.loss(model(*batch[:-1]), batch[-1])  # noqa: E731
    train = loop(model, optimizer, scaler, loss_of, setup.clip)
    return Step(model, optimizer, scaler, batches, train, ready)


def _counted(step: Step) -> _Ops:
    with _Ops() as ops:
        step()
    return ops


def _table(costs: list[Cost]) -> Table:
    table = Table(title="a training step within fxprec.numerics.watch")
    for name in ("model", "plain ms", "watched ms", "watched / plain", "noise", "", "more ops", "of them reads"):
        table.add_column(name, justify="left" if name in ("model", "of them reads") else "right")
    for each in costs:
        table.add_row(
            f"{each.workload.name}, {each.workload.shape}",
            f"{each.plain.median:.1f}",
            f"{each.watched.median:.1f}",
            f"{each.ratio.value:.4f} ± {each.ratio.error:.4f}",
            f"{each.noise:.4f}",
            each.verdict,
            str(each.ops.total()),
            ", ".join(f"{name} {count}" for name, count in sorted(each.reads.items())),
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks watch", description="Measure what a watch costs")
    parser.add_argument("--size", choices=SIZES, help="of the models; by default that of the device")
    parser.add_argument("--only", nargs="+", default=_MODELS, metavar="MODEL", help="by default %(default)s")
    parser.add_argument("--level", choices=["O0", "O1", "O2"], default="O1")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing for a model (%(default)s)")
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="by default benchmarks/results")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = options.size or ("gpu" if device.type == "cuda" else "cpu")
    try:
        chosen = workloads(size, options.only)
        setup = Setup(device, getattr(torch, options.dtype))
    except ValueError as error:
        parser.error(str(error))
    fxprec.keep_memory()
    before = environment(device)  # whose folder is that of all threads
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxprec.FxprecWarning)
        costs = [cost(workload, setup, options.level, options.seconds) for workload in chosen]
    for each in costs if size != "tiny" or options.output else ():
        data = {"environment": before | {"threads": 1}, "level": options.level, **each.as_dict()}
        save(f"watch-{size}-{options.level}-{each.workload.name}", data, options.output, device)
    Console(width=None if sys.stdout.isatty() else 180).print(_table(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
