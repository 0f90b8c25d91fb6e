"""A forward without gradients: frozen models beside eager autocast, FP32, ``model.bfloat16()`` and torch.compile.

From the checkout's root, on a CPU::

    python -m benchmarks inference --quick
    python -m benchmarks inference
    python -m benchmarks inference --only mlp resnet50 --compile

All variants of a model run in turns in one process, from equal weights on equal data, under ``torch.inference_mode()``;
eager autocast and the frozen model are built twice, and what lies within the noise that those show is called "=" (see
``measure.interleaved``). ``prepare s`` is what comes before the first result: converting, freezing, packing, compiling,
and the first call. ``error``: root mean square of the output's error against the same model in float64, over that of
the output. ``--compile`` adds torch.compile with inductor's freezing, which takes minutes for the larger models, and a
converted model whose outputs stay bfloat16, as torch.compile's do: others give FP32, as the original does.

Results are written after each model, to ``benchmarks/results`` only by whole runs: with ``--quick``, ``--check`` or
``--seconds`` where ``--output`` says. The status is 1 where a variant failed. ``--check`` runs everything once at tiny
sizes.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import pathlib
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor, nn

import fxprec
from benchmarks.measure import results
from benchmarks.measure.interleaved import Schedule, free_variants, host_times, measure
from benchmarks.reports.inference import BASELINE, Batch, Found, Row, draw, found_before, twin_of
from benchmarks.workloads.training import NAMES, Workload, workloads

__all__ = ["VARIANTS", "compare", "main"]

Call = Callable[[], Any]
Inputs = tuple[Tensor, ...]

#: Batches by size and model; of the others that of the workload.
_BATCHES: Final[dict[str, dict[str, tuple[int, ...]]]] = {
    "cpu": {
        "mlp": (1, 16, 256), "cnn": (1, 16, 256), "resnet50": (1, 8, 32), "unet": (1, 8), "gpt": (1, 4),
        "llama": (1, 4), "bert": (1, 8, 32), "vit": (1, 4, 16),
    },
}  # fmt: skip
_SIZES: Final = ("cpu", "launch")
#: Its training step is what is of interest, and a logit in fifty thousand takes float64 half a minute.
_LEFT_OUT: Final = ("gpt-50k",)
_TWICE: Final = (BASELINE, "frozen")
_BESIDE_COMPILE: Final = ("frozen-low", "compile")
_SCHEDULE: Final = Schedule(warm_up=3, rounds=20, steps=50, settle=2)
_SECONDS: Final = 10.0
_QUICK_SECONDS: Final = 2.0
_QUICK_MODELS: Final = ("mlp", "cnn", "bert")
_LEAST_STEPS: Final = 3


@dataclass(frozen=True)
class Variant:
    """A way to run a model: ``build`` makes the call, from a model of its own, in FP32 and eval mode."""

    what: str
    build: Callable[[nn.Module, Inputs], Call]


def _plain(model: nn.Module, inputs: Inputs) -> Call:
    def run() -> Any:
        with torch.inference_mode():
            return model(*inputs)

    return run


def _autocast(model: nn.Module, inputs: Inputs) -> Call:
    def run() -> Any:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return model(*inputs)

    return run


def _bfloat16(model: nn.Module, inputs: Inputs) -> Call:
    low = tuple(each.bfloat16() if each.is_floating_point() else each for each in inputs)
    return _plain(model.bfloat16(), low)


def _converted(model: nn.Module, inputs: Inputs) -> Call:
    return _plain(fxprec.convert(model, dtype=torch.bfloat16).module, inputs)


def _frozen(pack: bool, **options: Any) -> Callable[[nn.Module, Inputs], Call]:
    def build(model: nn.Module, inputs: Inputs) -> Call:
        run = _plain(fxprec.convert(model, dtype=torch.bfloat16, **options).module, inputs)
        run()
        fxprec.freeze(model, pack=pack)
        return run

    return build


def _compiled(model: nn.Module, inputs: Inputs) -> Call:
    from torch._inductor import config  # loaded only where it is asked for

    compiled = torch.compile(model)

    def run() -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), config.patch(freezing=True):
            return compiled(*inputs)

    return run


VARIANTS: Final = {
    BASELINE: Variant("torch.autocast", _autocast),
    "fp32": Variant("FP32", _plain),
    "bfloat16": Variant("model.bfloat16()", _bfloat16),
    "converted": Variant("fxprec O1", _converted),
    "frozen-plain": Variant("fxprec O1, frozen, pack=False", _frozen(False)),
    "frozen": Variant("fxprec O1, frozen", _frozen(True)),
    "frozen-fused": Variant("fxprec O1, fuse=True, frozen", _frozen(True, fuse=True)),
    "frozen-low": Variant(
        "fxprec O1, fuse=True, frozen, low outputs", _frozen(True, fuse=True, keep_output_dtype=False)
    ),
    "frozen-pays": Variant('fxprec O1, lower="pays", frozen', _frozen(True, lower="pays")),
    "compile": Variant("torch.compile, freezing", _compiled),
}


def compare(workload: Workload, batch: int | None, names: list[str], seconds: float | None) -> Batch:
    """Build all variants for one batch, run them in turns, free them. One that fails is a row that says so.

    Args:
        batch: rows of each input; None: as the workload has them.
        names: of ``VARIANTS``.
        seconds: of timing; None: one call each.
    """
    torch.manual_seed(0)
    model = workload.make().eval()
    *inputs, _ = workload.batch(torch.Generator().manual_seed(0))
    if batch is not None:
        inputs = [torch.cat([each] * -(-batch // len(each)))[:batch] for each in inputs]
    given = tuple(inputs)
    wide = tuple(each.double() if each.is_floating_point() else each for each in given)
    exact = _plain(copy.deepcopy(model).double(), wide)()
    found = Batch(len(given[0]), [])
    calls: dict[str, Call] = {}
    for name in names:
        for own in (name, twin_of(name))[: 1 + (name in _TWICE)]:
            row = Row(own, VARIANTS[name].what)
            found.rows.append(row)
            mine = copy.deepcopy(model)
            started = time.perf_counter()
            try:
                call = VARIANTS[name].build(mine, given)
                output = call()
                row.prepare = time.perf_counter() - started
                row.error = _error(output, exact)
            except Exception as error:  # one variant that fails is no reason to lose the others' figures
                how = "refused" if isinstance(error, fxprec.ConversionError) else "failed"  # as documented
                row.trouble = f"{how}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                continue
            calls[own] = call
    schedule = Schedule(warm_up=1, rounds=1, steps=1, settle=0)
    for _ in range(1 if seconds is None else _SCHEDULE.warm_up):
        for call in calls.values():
            call()
    if seconds is not None:
        each = 1e-3 * sum(min(host_times(call, _LEAST_STEPS)) for call in calls.values())
        steps = max(_LEAST_STEPS, min(_SCHEDULE.steps, int(seconds / each / _SCHEDULE.rounds) - _SCHEDULE.settle))
        schedule = Schedule(_SCHEDULE.warm_up, _SCHEDULE.rounds, steps, _SCHEDULE.settle).within(seconds, each)
    samples = measure(calls, schedule, host_times)
    for row in found.rows:
        row.samples = samples.get(row.name)
    calls.clear()
    free_variants()
    return found


def _error(output: Any, exact: Any) -> float:
    if not isinstance(output, Tensor):
        output, exact = next(iter(output)), next(iter(exact))
    return float((output.double() - exact).norm() / exact.norm())


# -- the command ------------------------------------------------------------------------------------------------------


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks inference", description="Time forwards, in turns")
    parser.add_argument("--size", nargs="+", choices=[*_SIZES, "tiny"], metavar="SIZE", help=f"of {', '.join(_SIZES)}")
    parser.add_argument("--only", nargs="+", default=(), metavar="MODEL", help="only these models")
    parser.add_argument("--compile", action="store_true", help="torch.compile with freezing, and its like")
    parser.add_argument("--seconds", type=float, metavar="S", help="of timing for a batch of a model")
    parser.add_argument("--quick", action="store_true", help="a few models, in about a minute")
    parser.add_argument("--check", action="store_true", help="run everything once at tiny sizes")
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="for JSON and figures")
    options = parser.parse_args(arguments)
    options.size = options.size or (["tiny"] if options.check else ["cpu"] if options.quick else [*_SIZES])
    options.only = options.only or (_QUICK_MODELS if options.quick else ())
    options.writes = options.output is not None or not (options.quick or options.check or options.seconds)
    options.names = [name for name in VARIANTS if options.compile or name not in _BESIDE_COMPILE]
    try:
        chosen = [each for size in options.size for each in workloads(size, options.only)]
    except ValueError as error:
        parser.error(str(error))
    options.workloads = [each for each in chosen if each.name not in _LEFT_OUT or each.name in options.only]
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    options = _options(arguments)
    importlib.import_module("torch._dynamo")  # else the first variant that captures waits for it
    console = Console(width=None if sys.stdout.isatty() else 160)
    seconds = None if options.check else options.seconds or (_QUICK_SECONDS if options.quick else _SECONDS)
    device, failed = torch.device("cpu"), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile's
        for workload in options.workloads:
            batches = _BATCHES.get(workload.size, {}).get(workload.name, (None,))
            found = Found(workload.name, workload.size, workload.shape, results.device_name(device), [])
            for batch in batches:
                found.batches.append(compare(workload, batch, options.names, seconds))
                found.show(console, found.batches[-1])
                failed += sum(row.trouble.startswith("failed") for row in found.batches[-1].rows)
            if options.writes:
                results.save(found.file, found.as_dict(), options.output, device)
                before = found_before(workload.size, NAMES, found.device_name, options.output)
                results.save_figure(
                    f"inference-{workload.size}", lambda figure, of=before: draw(figure, of), options.output,
                    size=(16.0, 4.0 * -(-len(before) // 4)), device=device,
                )  # fmt: skip
    if not options.writes:
        console.print("nothing is written: a run in parts wants --output FOLDER", highlight=False)
    return int(failed > 0)


if __name__ == "__main__":
    fxprec.keep_memory()
    sys.exit(main())
