"""What it costs to see writes to weights that no version counts: of a training step, and of a no_grad forward.

    python -m benchmarks writes [--size cpu] [--steps 5]

Of the gpt workload's step with ``fxprec.optim.AdamW`` the time within looks at samples and notes of them
(``fxprec/shadows/samples.py``), and what part of the step that is; on a GPU, where kernels look, steps with and without
their launches in turns. Of a forward that does nothing but read its shadows, with and without samples in turns, for
several numbers of weights: the difference is what a ``no_grad`` forward pays (of the host's time, on a GPU).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.measure.training_step import Setup
from benchmarks.measure.variants import VARIANTS
from benchmarks.workloads.training import workloads
from fxprec.kernels.optim.changed_copies import ChangedCopies
from fxprec.shadows import ShadowStore, store

__all__ = ["main", "of_a_forward", "of_a_step"]

_WEIGHTS: Final = (10, 100, 400)
_SIDE: Final = 256


def of_a_step(size: Any, steps: int) -> tuple[float, float]:
    """Return median seconds of a training step of gpt, and those of them that looks and notes take."""
    (workload,) = workloads(size, only=("gpt",))
    step = VARIANTS["o1-own"].build(workload, Setup(torch.device("cpu")))
    spent = [0.0]

    def timed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(looks: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(looks)
            finally:
                spent[0] += time.perf_counter() - started

        return run

    whole, within = [], []
    step()
    originals = store.note, store.same
    store.note, store.same = map(timed, originals)
    try:
        for _ in range(steps):
            spent[0], started = 0.0, time.perf_counter()
            step()
            whole.append(time.perf_counter() - started)
            within.append(spent[0])
    finally:
        store.note, store.same = originals
    return statistics.median(whole), statistics.median(within)


def of_a_step_on_cuda(size: Any, steps: int) -> tuple[float, float]:
    """Return median seconds of a training step of gpt on a GPU, without the launches that look, and with them."""
    (workload,) = workloads(size, only=("gpt",))
    step = VARIANTS["o1-own"].build(workload, Setup(torch.device("cuda")))
    originals = ChangedCopies.launch, ChangedCopies.note
    times: tuple[list[float], list[float]] = [], []
    try:
        for turn in range(-10, 2 * steps):  # ten to warm up
            looks = turn % 2
            ChangedCopies.launch, ChangedCopies.note = originals if looks else (_no_launch, _no_launch)
            torch.cuda.synchronize()
            started = time.perf_counter()
            step()
            torch.cuda.synchronize()
            if turn >= 0:
                times[looks].append(time.perf_counter() - started)
    finally:
        ChangedCopies.launch, ChangedCopies.note = originals
    return statistics.median(times[0]), statistics.median(times[1])


def _no_launch(self: ChangedCopies, values: Tensor) -> None:
    """Stand in for a launch."""


def of_a_forward(weights: int, rounds: int, device: str = "cpu") -> tuple[float, float]:
    """Return median seconds of a read of so many shadows under no_grad, without samples and with them."""
    parameters = [nn.Parameter(torch.randn(_SIDE, _SIDE, device=device)) for _ in range(weights)]
    shadows = ShadowStore(torch.bfloat16)
    with torch.no_grad():
        shadows.begin()
        shadows.read(parameters)
        [(key, plan)] = shadows._cached_reads.items()
        plans = replace(plan, looks=()), plan
        times: tuple[list[float], list[float]] = [], []
        for turn in range(2 * rounds):
            shadows._cached_reads[key] = plans[turn % 2]
            started = time.perf_counter()
            shadows.begin()
            shadows.read(parameters)
            times[turn % 2].append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both; the exit status is 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks writes", description=(__doc__ or "").partition("\n")[0])
    on_cuda = torch.cuda.is_available()
    sizes = ("gpu", "cpu", "launch", "tiny")
    parser.add_argument("--size", default="gpu" if on_cuda else "cpu", choices=sizes)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2000)
    given = parser.parse_args(arguments)
    if on_cuda:
        without, whole = of_a_step_on_cuda(given.size, max(given.steps, 50))
        within = whole - without
    else:
        whole, within = of_a_step(given.size, given.steps)
    print(f"a step of gpt ({given.size}): {1e3 * whole:.1f} ms, of which {1e6 * within:.1f} us, {within / whole:.2%}")
    for weights in _WEIGHTS:
        without, with_samples = of_a_forward(weights, given.rounds, "cuda" if on_cuda else "cpu")
        more = 1e6 * (with_samples - without)
        print(
            f"no_grad, {weights} weights: {1e6 * without:.1f} us without samples, {1e6 * with_samples:.1f} with: "
            f"{more:.1f} more, {more / weights:.3f} a weight"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
