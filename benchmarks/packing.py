"""Weights packed for oneDNN, beside plain ones, in the products of training steps: what packing takes, and gains.

    python -m benchmarks packing [--quick]

A packed weight is read faster, and is packed anew whenever an optimizer has changed it. Of ``y = x W^T`` and of the
input's gradient ``dx = dy W`` (which wants ``W`` packed as it lies, transposed): ms on the plain weight, on the packed
one, and of packing. "pays after": from so many products with one version of the weight on, all in all. The last lines
are what all products of a step, ``dW = dy^T x`` as well, take over those on plain weights, if each weight that gains by
it is packed at its second read, for a step of 1, 4 and 16 micro-batches.

bfloat16, sizes of ``python -m benchmarks step --size cpu``. The status is 1 where oneDNN packs nothing. Nothing is
written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import fxprec
from benchmarks.measure.interleaved import fastest
from fxprec.kernels.cpu.packed import can_pack, pack_linear
from fxprec.kernels.torch_internals import linear_pointwise

__all__ = ["SIZES", "Product", "main", "measure", "over_plain"]

LOW: Final = torch.bfloat16
#: Rows, inputs and outputs.
SIZES: Final = (
    (256, 2048, 2048), (1024, 512, 1536), (1024, 512, 512), (1024, 512, 2048), (1024, 2048, 512), (1024, 256, 256),
    (1024, 256, 683), (1024, 256, 1024), (1024, 1024, 256), (784, 256, 1024),
)  # fmt: skip
_MICRO_BATCHES: Final = (1, 4, 16)
#: Seconds for a way.
_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Product:
    """Seconds of a product on a plain weight, on a packed one, and of packing it."""

    plain: float
    packed: float
    pack: float

    @property
    def pays_after(self) -> float:
        """Products with one version of the weight; inf: never."""
        return self.pack / (self.plain - self.packed) if self.packed < self.plain else float("inf")

    def of(self, reads: int) -> float:
        """Of so many with one version, packed at the second read if that gains."""
        return min(reads * self.plain, self.plain + self.pack + (reads - 1) * self.packed)


def measure(rows: int, inputs: int, outputs: int, seconds: float = _SECONDS) -> tuple[Product, Product, float]:
    """The forward, the input's gradient, and seconds of the weight's gradient."""
    x, gradient = torch.randn(rows, inputs).to(LOW), torch.randn(rows, outputs).to(LOW)
    weight = torch.randn(outputs, inputs).to(LOW)
    packed, turned = pack_linear(weight), pack_linear(weight.t())
    times = fastest(
        [
            lambda: F.linear(x, weight),
            lambda: linear_pointwise(x, packed, None, "none", [], ""),
            lambda: pack_linear(weight),
            lambda: gradient @ weight,
            lambda: linear_pointwise(gradient, turned, None, "none", [], ""),
            lambda: pack_linear(weight.t()),
            lambda: gradient.t() @ x,
        ],
        seconds,
    )
    return Product(*times[:3]), Product(*times[3:6]), times[6]


def over_plain(found: Iterable[tuple[Product, Product, float]], reads: int) -> float:
    """Of steps with so many reads of each weight: all products, packed where that gains, over plain ones."""
    found = [*found]
    plain = sum(reads * (forward.plain + gradient.plain + weight) for forward, gradient, weight in found)
    return sum(forward.of(reads) + gradient.of(reads) + reads * weight for forward, gradient, weight in found) / plain


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks packing", description="Time products on packed weights")
    parser.add_argument("--quick", action="store_true", help="two sizes")
    parser.add_argument("--check", action="store_true", help="one small size, a few runs")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if not can_pack(LOW):
        console.print("no packed weights here: torch has no oneDNN with bfloat16", highlight=False)
        return 1
    sizes = ((8, 32, 16),) if options.check else SIZES[: 2 if options.quick else None]
    found = [measure(*size, 0.0 if options.check else _SECONDS) for size in sizes]
    table = Table("rows x inputs, outputs", title="ms")
    for product in ("y", "dx"):
        for heading in (f"{product}: plain", "packed", "to pack", "pays after"):
            table.add_column(heading, justify="right")
    table.add_column("dW", justify="right")
    for (rows, inputs, outputs), (forward, gradient, weight) in zip(sizes, found, strict=True):
        cells = [cell for each in (forward, gradient) for cell in _cells(each)]
        table.add_row(f"{rows} x {inputs}, {outputs}", *cells, f"{1e3 * weight:.3g}")
    console.print(table)
    for reads in _MICRO_BATCHES:
        console.print(f"{reads:2} micro-batches: {over_plain(found, reads):.3f} of plain", highlight=False)
    return 0


def _cells(product: Product) -> list[str]:
    after = product.pays_after
    times = [f"{1e3 * each:.3g}" for each in (product.plain, product.packed, product.pack)]
    return [*times, "never" if after == float("inf") else f"{after:.1f}"]


if __name__ == "__main__":
    fxprec.keep_memory()
    sys.exit(main())
