"""Depthwise convolutions on a CPU in bfloat16, forward and backward: torch's, and ours, whose backward runs in FP32.

    python -m benchmarks depthwise

Milliseconds of a forward with its backward, in turns, the fastest of several; "x": torch's over ours. "taken": whether
a converted model takes ours at these sizes (``pays`` of ``fxprec.kernels.calls.depthwise_conv2d``). The error is the
norm of the distance of both gradients to float64, over that of torch's. ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the
environment holds oneDNN to an older processor's instructions. Nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fxprec
from benchmarks.measure.interleaved import fastest
from fxprec.kernels.calls.depthwise_conv2d import DEPTHWISE, pays

__all__ = ["SIZES", "Found", "Size", "main", "measure"]

#: Seconds for each of the two.
_SECONDS: Final = 0.4


class Size(NamedTuple):
    """Square images and filters; as many rows and columns of zeros around the image as keep its size."""

    batch: int
    channels: int
    side: int
    filters: int
    stride: int = 1
    dilation: int = 1


#: ConvNeXt's, EfficientNet's and MobileNet's, and small ones.
SIZES: Final = (
    Size(8, 40, 24, 7), Size(8, 80, 12, 7), Size(8, 160, 6, 7), Size(8, 320, 3, 7), Size(4, 96, 56, 7),
    Size(8, 144, 24, 5), Size(4, 240, 28, 5, 2), Size(8, 144, 24, 3, 2), Size(8, 144, 24, 3, 1, 2),
    Size(8, 144, 24, 3), Size(8, 384, 6, 3), Size(1, 96, 14, 7), Size(1, 32, 7, 3, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Seconds of torch's and of ours; the error of ours over torch's; whether a converted model takes ours."""

    torchs: float
    ours: float
    error: float
    taken: bool


def measure(size: Size, seconds: float = _SECONDS) -> Found:
    """Both, side by side."""
    stride, dilation = [size.stride] * 2, [size.dilation] * 2
    padding, groups = [size.dilation * (size.filters // 2)] * 2, size.channels
    x = torch.randn(size.batch, size.channels, size.side, size.side).bfloat16().requires_grad_()
    w = torch.randn(size.channels, 1, size.filters, size.filters).bfloat16().requires_grad_()
    gradient = torch.randn(F.conv2d(x, w, None, stride, padding, dilation, groups).shape).bfloat16()

    def torchs() -> Sequence[Tensor]:
        return torch.autograd.grad(F.conv2d(x, w, None, stride, padding, dilation, groups), (x, w), gradient)

    def ours() -> Sequence[Tensor]:
        return torch.autograd.grad(DEPTHWISE(x, w, None, [*stride], [*padding], [*dilation]), (x, w), gradient)

    wide = [each.detach().double().requires_grad_() for each in (x, w)]
    y = F.conv2d(wide[0], wide[1], None, stride, padding, dilation, groups)
    exact = torch.autograd.grad(y, wide, gradient.double())
    errors = [_error(run(), exact) for run in (torchs, ours)]
    taken = pays(x, w, None, stride, dilation, groups)
    return Found(*fastest([torchs, ours], seconds), error=errors[1] / errors[0], taken=taken)


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return sum(((own.double() - right).norm() / right.norm()).item() for own, right in zip(found, exact, strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks depthwise", description="Time depthwise convolutions")
    parser.add_argument("--check", action="store_true", help="one small size, a few runs")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    table = Table("batch x channels x side, filters", title="bfloat16, forward and backward")
    for heading in ("torch, ms", "ours, ms", "x", "error", "taken"):
        table.add_column(heading, justify="right")
    for size in (Size(1, 4, 8, 5),) if options.check else SIZES:
        found = measure(size, 0.0 if options.check else _SECONDS)
        steps = f", stride {size.stride}" * (size.stride > 1) + f", dilation {size.dilation}" * (size.dilation > 1)
        table.add_row(
            f"{size.batch} x {size.channels} x {size.side}, {size.filters}{steps}",
            f"{1e3 * found.torchs:.3g}",
            f"{1e3 * found.ours:.3g}",
            f"{found.torchs / found.ours:.2f}",
            f"{found.error:.2f}",
            "yes" if found.taken else "",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    fxprec.keep_memory()
    sys.exit(main())
