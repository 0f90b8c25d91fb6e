"""Column sums: parts of any number of programs add up as in float64, in whatever dtype, and spill nothing."""

from __future__ import annotations

import pytest
import torch

import kernel_tools
import norm_tools
from fxprec.kernels.nn.column_sums import TILE, add_parts, finish_kernel

F16, F32 = torch.float16, torch.float32


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize(("count", "columns"), [(300, 37), (1, 1), (128, 64)])  # more than a tile has, and few
def test_parts_add_up(device: str, sums: int, count: int, columns: int) -> None:
    parts = torch.randn(sums, count, columns, device=device)
    outs = [torch.empty(columns, device=device, dtype=dtype) for dtype in (F32, F16)[:sums]]
    add_parts(parts, outs)
    for out, part in zip(outs, parts, strict=True):
        assert norm_tools.error(out, part.double().sum(0)) <= (2e-5 if out.dtype == F32 else 3e-2)
    again = [torch.empty_like(out) for out in outs]
    add_parts(parts, again)
    assert all(map(kernel_tools.same_bits, outs, again))


@kernel_tools.compiles
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_nothing_spills(architecture: int) -> None:
    types = dict.fromkeys(("parts", "first", "second"), F32) | {"count": "i32", "columns": "i32"}
    kernel = norm_tools.compiled(
        finish_kernel, architecture, TILE[2], types, {"ROWS": TILE[0], "BLOCK": TILE[1]}, ("count",)
    )
    assert kernel.spills == 0 and kernel.registers <= 128 and len(kernel.narrow()) <= 4
