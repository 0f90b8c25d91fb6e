"""FP32 functions of row programs against torch in float64: distances in FP32 values, and special values to the bit."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

import kernel_tools
from fxprec.kernels.launch.triton_support import constexpr, jit, tl
from fxprec.kernels.rows.emit import functions

on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
fused_multiply_add = kernel_tools.fused_multiply_add
COUNT = 4096
INF, NAN = math.inf, math.nan


@jit()
def _apply(x_ptr, y_ptr, out_ptr, FUNCTION: constexpr, ARITY: constexpr, BLOCK: constexpr):
    """x_ptr, y_ptr, out_ptr: fp32 [BLOCK], in a grid of one."""
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    if ARITY == 1:
        out = FUNCTION(x)
    else:
        out = FUNCTION(x, tl.load(y_ptr + place))
    tl.store(out_ptr + place, out)


@jit()
def _reduce(x_ptr, out_ptr, FUNCTION: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """x_ptr: fp32 [ROWS, COLUMNS]. out_ptr: fp32 [ROWS]."""
    rows = tl.arange(0, ROWS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    tl.store(out_ptr + rows[:, None], FUNCTION(x))


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


def applied(name: str, x: Tensor, y: Tensor | None = None) -> Tensor:
    size = 1 << (len(x) - 1).bit_length()
    padded = [torch.nn.functional.pad(t, (0, size - len(t)), value=1.0) for t in (x, x if y is None else y)]
    out = torch.empty_like(padded[0])
    _apply[(1,)](*padded, out, FUNCTION=getattr(functions, name), ARITY=1 if y is None else 2, BLOCK=size)
    return out[: len(x)]


def numbers(low: float, high: float, device: str) -> Tensor:
    """Of both signs, evenly spread on a logarithmic scale, and on a linear one."""
    spread = torch.logspace(low, high, COUNT // 4, dtype=torch.float64)
    line = torch.linspace(-(10.0**high), 10.0**high, COUNT // 2, dtype=torch.float64)
    return torch.cat((spread, -spread, line)).float().to(device)


@on_devices
@pytest.mark.parametrize(
    ("name", "low", "high", "most"),
    [
        ("exp", -30, 1.93, 3), ("tanh", -30, 1.5, 6), ("expm1", -30, 1.9, 6), ("log1p", -30, 30, 4),
        ("sign", -40, 38, 0), ("trunc", -9, 30, 0),
    ],
)  # fmt: skip
def test_distance_from_float64(
    device: str, name: str, low: float, high: float, most: int, fused_multiply_add: None
) -> None:
    x = numbers(low, high, device)
    if name == "log1p":
        x = torch.where(x <= -1, -0.999 / x.abs().clamp_min(1), x)
    exact = getattr(torch, name)(x.double()).float()
    own = applied(name, x)
    assert kernel_tools.ulps(own, exact) <= most


@on_devices
@pytest.mark.parametrize("name", ["exp", "tanh", "expm1", "log1p", "sign", "trunc"])
def test_special_values(device: str, name: str) -> None:
    x = torch.tensor([0.0, -0.0, INF, -INF, NAN, -1.0, -2.0, 1e-45, 3.4e38, -3.4e38, 2.5, -2.5], device=device)
    own, exact = applied(name, x), getattr(torch, name)(x)
    assert torch.equal(own.isnan(), exact.isnan())
    odd = ~(x.abs() > 1) | x.isinf()
    assert torch.allclose(own.nan_to_num(), exact.nan_to_num(), rtol=1e-6, atol=0 if name != "log1p" else 1e-45)
    if name != "sign":  # torch's has one zero
        assert torch.equal(own[odd].signbit() & ~own[odd].isnan(), exact[odd].signbit() & ~exact[odd].isnan())


@on_devices
@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_the_larger_and_the_smaller_with_nan(device: str, name: str) -> None:
    odd = torch.tensor([0.0, 1.0, -1.0, INF, -INF, NAN, 1e-45, 3e38], device=device)
    x, y = (t.reshape(-1) for t in torch.meshgrid(odd, odd, indexing="ij"))
    own, exact = applied(name, x, y), getattr(torch, name)(x, y)
    assert torch.equal(own.isnan(), exact.isnan()) and torch.equal(own.nan_to_num(), exact.nan_to_num())


@on_devices
@pytest.mark.parametrize("name", ["max", "min"])
def test_rows(device: str, name: str) -> None:
    x = torch.randn(8, 16, device=device)
    x[1, 3], x[2, 4], x[3, :], x[4, 0] = NAN, INF, -INF, NAN
    x[5, -1], x[6, 2] = NAN, -INF
    out = torch.empty(8, device=device)
    _reduce[(1,)](x, out, FUNCTION=getattr(functions, f"row_{name}"), ROWS=8, COLUMNS=16)
    exact = getattr(torch, f"a{name}")(x, 1)
    assert torch.equal(out.isnan(), exact.isnan()) and torch.equal(out.nan_to_num(), exact.nan_to_num())


@kernel_tools.compiles
@pytest.mark.parametrize("architecture", kernel_tools.ARCHITECTURES)
@pytest.mark.parametrize("name", ["log1p", "expm1", "maximum"])
def test_compiled(name: str, architecture: int) -> None:
    """The logarithm must not be the hardware's, which has few digits near 1; NaN costs the maximum nothing."""
    constants = {"FUNCTION": getattr(functions, name), "ARITY": 2 if name == "maximum" else 1, "BLOCK": 1024}
    pointers = dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), "*fp32")
    found = kernel_tools.compiled(_apply, architecture, 4, pointers, constants)
    assert found.spills == 0 and not re.search(r"lg2\.approx", found.ptx)
    assert name != "maximum" or "max.NaN.f32" in found.ptx
