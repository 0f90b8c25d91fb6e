"""Kernels and fused regions: time, and bandwidth against that of a copy; beside eager autocast and torch.compile.

On a machine with a CUDA device, from the checkout's root (nothing needs to be installed but torch, triton, rich,
networkx and transformers), in 2 and in 6 minutes::

    python -m benchmarks kernels --quick --output "${OUT:-benchmarks/results}"
    python -m benchmarks kernels --output "${OUT:-benchmarks/results}"

Each row is the forward or the backward of one kernel at one shape. What its figures mean:

- ``us``: median time of the device for one run, with inputs that come from memory, not from the L2 cache.
- ``GB/s``: the bytes that must be moved (each tensor that goes in or comes out once, and what the file of the kernel
  says besides) over that time. ``% copy``: over the bandwidth of a large copy, measured in the same process. ``% same
  size``: over that of a copy that moves as many bytes, which is what a short kernel can reach.
- ``x eager``, ``x compile``: time of the same function op by op under torch.autocast, and compiled by torch.compile,
  over ours: above 1 ours is faster. ``memory``: allocated at most by a run, ours over eager's.
- ``noise``: how far two medians of our own kernel lie apart, measured like two variants.
- ``goal``: 85 % of the copy's bandwidth (forms that compute a matmul have none), and not slower than torch.compile
  beyond the noise. "wrong": results differ from FP32's by more than twice what eager's do, and a rounding.

Variants run in turns. The files that it writes hold p20 and p80 of all of them, and the time that the host took. The
status is 1 where a row is wrong or failed, whatever the speeds are. ``--check`` runs everything once at tiny sizes, on
a CPU too (with TRITON_INTERPRET=1 our kernels in Triton's interpreter), where times mean nothing.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.measure.timing import Clock, DeviceClock, HostClock, Series, Work, copy_work
from benchmarks.reports.kernels import Report, Row, machine
from benchmarks.workloads.problems import PROBLEMS, Problem, Setup, Source
from benchmarks.workloads.regions import QUICK_REGION, REGIONS
from fxprec.kernels.launch.triton_support import interpreting

__all__ = ["check", "main", "rows", "sources"]

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: Bytes that the large copy moves.
_COPY: Final = 4 << 30
#: Seconds of timing that a row gets, and of all, by ``quick``, after which no kernel is started.
_SECONDS: Final = 0.5
_BUDGET: Final = {False: 330.0, True: 110.0}


def sources(quick: bool, only: str = "") -> list[Source]:
    """The kernels before the regions, the most important first."""
    found = [*(s for s in PROBLEMS if s.quick), QUICK_REGION] if quick else [*PROBLEMS, *REGIONS]
    return [source for source in found if only in source.name]


def rows(problem: Problem, setup: Setup, clock: Clock, seconds: float, copied: float) -> Iterator[Row]:
    """The forward and the backward of a problem, timed; ``copied``: bytes a second of the large copy."""
    torch.compiler.reset()  # each function is another one to it, and it counts them
    wrong = check(problem, setup)
    # On a CPU only that dynamo and autograd take the function: compiling there says nothing.
    backend = "inductor" if setup.device.type == "cuda" else "aot_eager"
    variants: dict[str, Callable[..., Any]] = {
        "ours": problem.ours,
        "eager": _eager(problem, setup),
        "compile": torch.compile(_eager(problem, setup), fullgraph=True, dynamic=False, backend=backend),
        "ours again": problem.ours,
    }
    directions = ["forward + backward"] if problem.together else ["forward", "backward"]
    for direction in directions:
        if direction == "backward" and not any(x.requires_grad for x in problem.inputs):
            continue
        moved = problem.moved[direction == "backward"]
        works = {name: _work(function, problem.inputs, direction) for name, function in variants.items()}
        if moved is not None:
            works["copy"] = copy_work(moved, setup.device)
        series: dict[str, Series] = clock.measure(works, seconds)
        yield Row(problem.kernel, problem.shape, direction, moved, copied, series, wrong)


def _eager(problem: Problem, setup: Setup) -> Callable[..., Any]:
    def run(*inputs: Tensor) -> Any:
        with torch.autocast(setup.device.type, dtype=setup.low, enabled=problem.autocast):
            return problem.eager(*inputs)

    return run


def _work(function: Callable[..., Any], inputs: tuple[Tensor, ...], direction: str) -> Work:
    if direction == "forward":
        return Work(lambda _: function(*inputs))
    wanted = [x for x in inputs if x.requires_grad]
    cotangents: list[Tensor] = []

    def prepare() -> list[Tensor]:
        outputs = _differentiable(function(*inputs))
        if not cotangents:
            cotangents.extend(map(_cotangent, outputs))
        return outputs

    def backward(outputs: list[Tensor]) -> object:
        found = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
        outputs.clear()  # what the graph saved goes with it, as in a training step
        return found

    if direction == "backward":
        return Work(backward, prepare)
    return Work(lambda _: backward(prepare()))


def _differentiable(results: Any) -> list[Tensor]:
    found = [results] if isinstance(results, Tensor) else [*results]
    return [x for x in found if x.requires_grad]


def _cotangent(output: Tensor) -> Tensor:
    """That of a loss is 1, as in ``loss.backward()``."""
    return torch.ones_like(output) if output.dim() == 0 else torch.randn_like(output)


def check(problem: Problem, setup: Setup) -> str:
    """Compare results and gradients with those in FP32: "", or what is wrong."""
    if not problem.compared:
        return ""
    found: dict[str, list[Tensor]] = {}
    cotangents: list[Tensor] = []
    for name in ("exact", "eager", "ours"):
        inputs = [
            x.detach().float().requires_grad_(x.requires_grad) if name == "exact" and x.is_floating_point() else x
            for x in problem.inputs
        ]
        function = problem.ours if name == "ours" else problem.eager
        with torch.autocast(setup.device.type, dtype=setup.low, enabled=name == "eager" and problem.autocast):
            results = function(*inputs)
        outputs = _differentiable(results)
        cotangents = cotangents or [_cotangent(x).to(setup.low) for x in outputs]
        wanted = [x for x in inputs if x.requires_grad]
        gradients: Any = ()
        if wanted and outputs:
            typed = [c.to(o.dtype) for c, o in zip(cotangents, outputs, strict=True)]
            gradients = torch.autograd.grad(outputs, wanted, typed, allow_unused=True)
        results = [results] if isinstance(results, Tensor) else [*results]
        found[name] = [x.detach() for x in (*results, *(g for g in gradients if g is not None))]
    if len({len(each) for each in found.values()}) > 1:
        return "wrong: a gradient is missing, or there is one too many"
    slack = torch.finfo(setup.low).eps / 2 * (1 + interpreting())  # the interpreter cuts where a GPU rounds
    for number, (exact, eager, ours) in enumerate(zip(found["exact"], found["eager"], found["ours"], strict=True)):
        mine, theirs = _error(ours, exact), _error(eager, exact)
        if not mine <= 2 * theirs + slack:
            return f"wrong: result {number} is off by {mine:.1e}, eager by {theirs:.1e}"
    return ""


def _error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over norm."""
    difference = torch.linalg.vector_norm(found.float() - exact.float())
    return float(difference / torch.linalg.vector_norm(exact.float()).clamp_min(1e-30))


def _fill(report: Report, chosen: list[Source], setup: Setup, clock: Clock, seconds: float, deadline: float) -> None:
    """Run all the sources; what fails becomes a row that says so, and what comes too late is named."""
    for source in chosen:
        if time.monotonic() > deadline:
            report.left_out.append(source.name)
            continue
        torch.manual_seed(0)
        name = source.name
        try:
            for problem in source.make(setup):
                name = problem.kernel
                if time.monotonic() > deadline:
                    report.left_out.append(name)
                    continue
                for row in rows(problem, setup, clock, seconds, report.copied):
                    report.add(row)
        except Exception as error:  # one kernel that does not compile is no reason to lose the others' figures
            traceback.print_exc()
            report.add(Row(name, "", "", None, report.copied, {}, f"failed: {type(error).__name__}: {error}"))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks kernels", description="Time kernels and fused regions on a CUDA device"
    )
    parser.add_argument("--quick", action="store_true", help="the most important ten rows, in about 2 minutes")
    parser.add_argument("--dtype", choices=[*_DTYPES], default="bfloat16")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels whose name contains this")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no further kernel after so long")
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="for JSON and markdown")
    parser.add_argument("--check", action="store_true", help="run each once at a tiny size, on a CPU where need be")
    options = parser.parse_args(arguments)
    if not options.check and not torch.cuda.is_available():
        parser.error("needs a CUDA device, and torch sees none; --check runs each kernel once at a tiny size without")
    if not sources(options.quick, options.only):
        names = ", ".join(dict.fromkeys(source.name for source in sources(options.quick)))
        parser.error(f"--only {options.only!r} names none of: {names}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    started = time.monotonic()
    on_device = torch.cuda.is_available() and not interpreting()
    device = torch.device("cuda" if on_device else "cpu")
    setup = Setup(device, _DTYPES[options.dtype], tiny=options.check)
    clock: Clock = HostClock() if options.check else DeviceClock(device)
    nbytes = 1 << 20 if options.check else _COPY
    copied = nbytes / (1e-6 * clock.measure({"copy": copy_work(nbytes, device)}, 1.0)["copy"].median)
    folder = options.output or (None if options.check else pathlib.Path(__file__).parent / "results")
    report = Report(machine(device), options.dtype, copied, folder, check=options.check, quick=options.quick)
    budget = options.budget or (float("inf") if options.check else _BUDGET[options.quick])
    deadline = started + budget
    chosen = sources(options.quick, options.only)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile's, of every function
        _fill(report, chosen, setup, clock, _SECONDS, deadline)
    report.seconds = time.monotonic() - started
    report.write()
    report.show(Console(width=None if sys.stdout.isatty() else 180))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
