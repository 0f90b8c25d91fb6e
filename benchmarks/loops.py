"""Regions of row operations as compiled loops on a CPU, beside torch's kernels one by one, and what their prices say.

    python -m benchmarks loops [--quick] [--costs FILE]

Each region runs op by op and as a loop, forward alone and with its backward, at a few sizes. The prices are those that
``convert(fuse=True)`` goes by (of this machine where it was calibrated, else the shipped ones; ``--costs`` takes a file
of ``python -m fxprec calibrate --output``): a loop serves where it is priced below the ops. ``x best`` is what the
choice takes over the faster of both. Of a forward and backward some 13 us are those of a backward as such, which a
model pays once. The last line is the geometric mean and the worst of ``x best``; and of always the one, or the other.

The status is 1 where nothing can be compiled. Nothing is written.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fxprec
from benchmarks.measure.interleaved import fastest
from fxprec.costs.calibration import as_loop
from fxprec.costs.files import costs_of, read, shipped_for_here
from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.kernels.rows.program.prices import LoopPrices, seconds

__all__ = ["REGIONS", "Compared", "compare", "main"]

LOW: Final = torch.bfloat16
FULL: Final = torch.float32


@dataclass(frozen=True)
class Region:
    """A function of tensors.

    Attributes:
        function: of the columns' number and the tensors.
        dtypes: of tensors of rows x columns, which come first.
        weights: of tensors of one row.
    """

    function: Callable[..., Tensor]
    dtypes: tuple[torch.dtype, ...]
    weights: tuple[torch.dtype, ...] = ()

    def inputs(self, rows: int, columns: int, gradients: bool) -> list[Tensor]:
        """Normal numbers."""
        shapes = [((rows, columns), dtype) for dtype in self.dtypes] + [((columns,), dtype) for dtype in self.weights]
        return [torch.randn(shape).to(dtype).requires_grad_(gradients) for shape, dtype in shapes]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(LOW)


REGIONS: Final = {
    "(x + y) * y": Region(lambda _, x, y: (x + y) * y, (LOW, LOW)),
    "relu(x + y)": Region(lambda _, x, y: (x + y).relu(), (LOW, LOW)),
    "silu(x) * y": Region(lambda _, x, y: F.silu(x) * y, (LOW, LOW)),
    "tanh(x) * y": Region(lambda _, x, y: torch.tanh(x) * y, (LOW, LOW)),
    "gelu(x) * y": Region(lambda _, x, y: F.gelu(x) * y, (LOW, LOW)),
    "gelu by tanh": Region(lambda _, x: F.gelu(x, approximate="tanh"), (LOW,)),
    "mish": Region(lambda _, x: F.mish(x), (LOW,)),
    "softmax(0.3 x)": Region(lambda _, x: F.softmax(x * 0.3, -1), (LOW,)),
    "normalize": Region(lambda _, x: F.normalize(x, dim=-1), (LOW,)),
    "rms_norm": Region(lambda n, x, w: F.rms_norm(x, (n,), w, 1e-6), (LOW,), (LOW,)),
    "rms_norm by hand": Region(lambda _, x, w: _rms(x, w), (FULL,), (FULL,)),
    "layer_norm(x + y)": Region(lambda n, x, y, w, b: F.layer_norm(x + y, (n,), w, b), (LOW, LOW), (LOW, LOW)),
    "layer_norm(x + y), wide": Region(
        lambda n, x, y, w, b: F.layer_norm(x + y, (n,), w, b).to(LOW), (FULL, LOW), (FULL, FULL)
    ),
    "layer_norm, wide": Region(lambda n, x, w, b: F.layer_norm(x, (n,), w, b).to(LOW), (FULL,), (FULL, FULL)),
}  # fmt: skip
_SIZES: Final = ((16, 64), (128, 256), (1024, 512), (4096, 512))
_QUICK: Final = ("silu(x) * y", "rms_norm", "layer_norm(x + y)")
#: Seconds for a way of a region.
_SECONDS: Final = 0.05


@dataclass(frozen=True)
class Compared:
    """A region at one size; seconds, measured and priced."""

    region: str
    size: tuple[int, int]
    trained: bool
    ops: float
    loop: float
    priced_ops: float
    priced_loop: float

    @property
    def chosen(self) -> float:
        """What the choice takes."""
        return self.ops if self.priced_ops < self.priced_loop else self.loop

    @property
    def best(self) -> float:
        """The faster of both."""
        return min(self.ops, self.loop)


def compare(name: str, size: tuple[int, int], trained: bool, prices: LoopPrices, budget: float = _SECONDS) -> Compared:
    """Run a region both ways in turns; the fastest run of each counts."""
    region, (_, columns) = REGIONS[name], size

    def ops(*inputs: Tensor) -> Tensor:
        return region.function(columns, *inputs)

    loop = as_loop(ops, len(region.dtypes) + len(region.weights))
    inputs = region.inputs(*size, trained)
    out = loop(*inputs)
    if loop.path != "loops":
        raise RuntimeError(f"{name} is no loop: {loop.reason}")
    gradient = torch.randn_like(out)

    def run(function: Callable[..., Tensor]) -> Callable[[], object]:
        if not trained:
            return lambda: function(*inputs)
        return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)

    measured = fastest([run(ops), run(loop)], budget)
    plan = loop.plans[-1]
    priced = seconds(loop.graph_module, plan.programs, plan.layout.rows * plan.layout.columns, prices)
    return Compared(name, size, trained, measured[0], measured[1], *priced)


def _show(found: Sequence[Compared], console: Console) -> None:
    table = Table("region", "rows x columns", "", title="us")
    for heading in ("op by op", "as a loop", "priced: op by op", "as a loop", "x best"):
        table.add_column(heading, justify="right")
    for each in found:
        figures = [f"{1e6 * value:.3g}" for value in (each.ops, each.loop, each.priced_ops, each.priced_loop)]
        what = "forward, backward" if each.trained else "forward"
        table.add_row(each.region, "x".join(map(str, each.size)), what, *figures, f"{each.chosen / each.best:.2f}")
    console.print(table)
    ways = {
        "as priced": [each.chosen / each.best for each in found],
        "always op by op": [each.ops / each.best for each in found],
        "always a loop": [each.loop / each.best for each in found],
    }
    said = [
        f"{way} {math.exp(sum(map(math.log, of)) / len(of)):.3f}, at most {max(of):.2f}" for way, of in ways.items()
    ]
    console.print(f"x best: {'; '.join(said)}", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks loops", description="Price and time compiled loops")
    parser.add_argument("--quick", action="store_true", help="a few regions")
    parser.add_argument("--check", action="store_true", help="those at the smallest size, a few runs")
    parser.add_argument("--costs", type=pathlib.Path, metavar="FILE", help="prices to go by")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if why := why_not():
        console.print(f"no loops here: {why}", highlight=False)
        return 1
    costs = costs_of("cpu") if options.costs is None else read(options.costs)
    prices = costs.loops or shipped_for_here("cpu").loops
    assert prices is not None, "shipped costs have them"
    names = _QUICK if options.quick or options.check else [*REGIONS]
    sizes = _SIZES[:1] if options.check else _SIZES
    budget = 0.0 if options.check else _SECONDS
    found = [
        compare(name, size, trained, prices, budget) for name in names for size in sizes for trained in (False, True)
    ]
    _show(found, console)
    return 0


if __name__ == "__main__":
    fxprec.keep_memory()
    sys.exit(main())
