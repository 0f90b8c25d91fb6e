"""Peak memory of a whole training step, by category: fxprec beside FP32, autocast and torch.compile.

    python -m benchmarks memory [--size cpu|gpu|launch|tiny] [--only gpt mlp] [--variants autocast o1-own]

Counted, not estimated, and the same at every run (``measure.peak`` says how). What is counted, at the moment when
most is allocated:

- weights: parameters and buffers; optimizer: its state; shadows: fxprec's low-precision copies of weights. torch's
  autocast has such copies too, made anew at each step: they are among its activations.
- gradients: those of parameters that are there at that moment. activations: all else, which is what the forward keeps
  for the backward, and temporaries.

"x": all of it over eager autocast's. "x step": without weights and optimizer's state, which no precision of the step
changes. "kept": what lives where the backward begins. The data is not counted. ``o1-chunked``: the head's matmul and
the cross-entropy in chunks of rows (``fxprec.kernels.linear_cross_entropy``), for models that end so.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import pathlib
import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor, nn

import fxprec
from benchmarks.measure.peak import graph_pools, meter, peak_of, watched
from benchmarks.measure.results import environment, save, save_figure
from benchmarks.measure.training_step import Setup, tf32
from benchmarks.measure.variants import BASELINE, VARIANTS, Variant
from benchmarks.reports.memory import BUDGETS, Row, draw, table, verdicts
from benchmarks.workloads.training import NAMES, SIZES, Workload, named, workloads
from fxprec.model.conversion import is_converted

__all__ = ["DEFAULT", "chosen", "chunked", "main", "measure", "rows_of"]

#: What is measured unless variants are named.
DEFAULT: Final = (
    "fp32", BASELINE, "compile", "compile-graphs", "bfloat16", "o1", "o1-own", "o1-low", "o1-fused-low", "o1-loss",
    "o1-chunked", "o2-own", "o1-whole",
)  # fmt: skip
_WARM_STEPS: Final = 3
#: On a CPU torch.compile takes a minute or two for each of the others.
_QUICK_TO_COMPILE: Final = ("mlp", "cnn", "gpt")


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(workload: Workload, variant: Variant, setup: Setup) -> Row:
    """The peak of the fourth step; raises what building or training raises."""
    step = variant.build(workload, setup)
    for _ in range(_WARM_STEPS):
        step()
    pools = graph_pools(setup.device)
    if not pools:  # a captured step's gradients lie in its graph's memory, for good
        step.optimizer.zero_grad(set_to_none=True)
    parameters = [*step.model.parameters()]
    held = _bytes(p.grad for p in parameters)
    with watched(step.model) as marks:
        peak = peak_of(meter(setup.device).measure(step, marks))
    return Row(
        workload=workload.name,
        shape=workload.shape,
        variant=variant.name,
        weights=_bytes([*parameters, *step.model.buffers()]),
        optimizer=_bytes(x for state in step.optimizer.state.values() for x in state.values()),
        shadows=_shadows(step.model),
        gradients=held + peak.gradients,
        activations=pools + peak.bytes - peak.gradients,
        phase=peak.phase,
        kept=peak.kept,
    )


def _bytes(values: Iterable[Any]) -> int:
    """Of the tensors among the values, each storage once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _shadows(model: nn.Module) -> int:
    return fxprec.report(model).headline.weights.shadow_bytes if is_converted(model) else 0


class _Deferred(nn.Module):
    """A head whose matmul is left to the loss: hidden states pass."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def chunked(workload: Workload, dtype: torch.dtype) -> Workload:
    """The same model and loss, with the head's matmul in ``fxprec.kernels.linear_cross_entropy``.

    Raises:
        ValueError: the model does not end in a linear head over a vocabulary.
    """
    if workload.name not in _WITH_HEAD:
        raise ValueError(f"{workload.name} has no head over a vocabulary; {', '.join(_WITH_HEAD)} have one")
    heads: list[nn.Linear] = []

    def make() -> nn.Module:
        model = workload.make()
        head = model.head
        assert isinstance(head, nn.Linear)
        model.head = _Deferred(head)
        heads[:] = [head]
        return model

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        [head] = heads
        return fxprec.kernels.linear_cross_entropy(hidden.to(dtype), head.weight, target, head.bias)

    return dataclasses.replace(workload, make=make, loss=loss)


_WITH_HEAD: Final = ("gpt", "gpt-50k", "llama", "bert")
_CHUNKED: Final = Variant(
    "o1-chunked",
    "fxprec O1, its AdamW, chunked linear + cross-entropy",
    lambda workload, setup: VARIANTS["o1-own"].build(chunked(workload, setup.dtype), setup),
)


def chosen(names: Sequence[str]) -> list[Variant]:
    """The variants that are named, or ``DEFAULT``; what ratios are taken against is always there.

    Raises:
        ValueError: an unknown name; says which is nearest.
    """
    known = {**VARIANTS, _CHUNKED.name: _CHUNKED}
    names = named(names, known, "variant") or DEFAULT
    return [known[name] for name in dict.fromkeys([BASELINE, *names])]


def rows_of(
    workload: Workload,
    variants: Sequence[Variant],
    setup: Setup,
    left_out: dict[str, str],
    compile_all: bool = True,
) -> list[Row]:
    """A row for each variant; ``left_out`` gets those without one, "workload, variant" -> why."""
    rows = []
    for variant in variants:
        why = variant.unserved(setup)
        slow = variant.inductor and setup.device.type == "cpu" and workload.name not in _QUICK_TO_COMPILE
        if slow and not compile_all:
            why = "compiling this model takes a CPU a minute or two; --compile-all does it"
        if not why and variant is _CHUNKED and workload.name not in _WITH_HEAD:
            continue
        if not why:
            try:
                rows.append(measure(workload, variant, setup))
            except variant.refuses as error:
                why = f"{type(error).__name__}: {error}"
            except torch.OutOfMemoryError:
                why = "does not fit into the device's memory"
        if why:
            left_out[f"{workload.name}, {variant.name}"] = why
        torch.compiler.reset()
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


# -- the command ------------------------------------------------------------------------------------------------------


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks memory", description="Count the peak memory of training steps by category"
    )
    parser.add_argument("--size", choices=SIZES, help="of the models; by default that of the device")
    parser.add_argument("--only", nargs="+", default=(), metavar="MODEL", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--variants", nargs="+", default=(), metavar="NAME", help=f"by default {', '.join(DEFAULT)}")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip gradients; float16: 1.0 where not given")
    parser.add_argument("--compile-all", action="store_true", help="on a CPU compile the larger models, too")
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="for JSON and the figure")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.size = options.size or ("gpu" if device.type == "cuda" else "cpu")
    options.whole = not (options.only or options.variants)
    clip = options.clip or (1.0 if options.dtype == "float16" else None)
    try:
        options.workloads = workloads(options.size, options.only)
        if not options.workloads:
            raise ValueError(f"no {', '.join(options.only)} of size {options.size}")
        options.chosen = chosen(options.variants)
        options.setup = Setup(device, getattr(torch, options.dtype), clip)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    options = _options(arguments)
    setup: Setup = options.setup
    measured = environment(setup.device)
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    with warnings.catch_warnings(), tf32(False):
        warnings.simplefilter("ignore")  # torch.compile's, of every model
        for workload in options.workloads:
            rows += rows_of(workload, options.chosen, setup, left_out, compile_all=options.compile_all)
    console.print(table(rows))
    for what, why in left_out.items():
        console.print(f"left out: {what}: {why}", markup=False, highlight=False, soft_wrap=True)
    for line in verdicts(rows, setup.device.type):
        console.print(line, highlight=False)
    if not (options.whole or options.output):
        console.print("nothing is written: a run of some of it wants --output FOLDER", highlight=False)
        return 0
    name = f"memory-{options.size}-{options.dtype}"
    data = {
        "environment": measured, "size": options.size, "dtype": options.dtype, "clip": setup.clip,
        "budget": BUDGETS[setup.device.type], "rows": [row.as_dict(rows) for row in rows], "left_out": left_out,
    }  # fmt: skip
    save(name, data, options.output, setup.device)
    height = 0.8 + 2.4 * len(options.workloads)
    save_figure(name, partial(draw, rows=rows), options.output, size=(9.0, height), device=setup.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
