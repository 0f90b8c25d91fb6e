"""Row programs as compiled loops on a CPU: edges of functions and sizes, threads, what is declined, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import region_tools as tools
from fxprec.kernels.cpu import compiled_attention, cpp
from fxprec.kernels.rows.run.loops import Loops

pytestmark = pytest.mark.skipif(bool(compiled_attention.why_not()), reason=compiled_attention.why_not())
LOW = torch.bfloat16
INF, NAN = math.inf, math.nan


def looped(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """The region of a function, which serves these inputs."""
    region = tools.region_of(function, kernels="loops")
    region(*inputs)
    assert (region.path, region.reason) == ("loops", "")
    return region


def leaf(*shape: int, dtype: torch.dtype = LOW) -> Tensor:
    """Eighths, whose sums of two are exact in bfloat16: what is left of errors is the loop's own."""
    return (torch.randn(shape) * 8).round().clamp(-31, 31).div(8).to(dtype).requires_grad_()


def check(function: Callable[..., Any], *inputs: Tensor) -> None:
    """Outputs and gradients err at most twice as much as torch's ops one by one."""
    region = looped(function, *inputs)
    torch.manual_seed(0)
    found, exact = tools.run_both(function, inputs, region)
    torch.manual_seed(0)
    eager, _ = tools.run_both(function, inputs, function)
    for own, other, right in zip(found, eager, exact, strict=True):
        assert own.dtype is other.dtype
        slack = 2.0**-8 if own.dtype is LOW else 2.0**-20
        assert tools.error(own, right) <= max(2 * tools.error(other, right), slack)


# -- values -----------------------------------------------------------------------------------------------------------


def of_torch(name: str) -> Callable[[Tensor], Tensor]:
    return lambda x: getattr(torch, name)(x)


NAMES = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "erf", "tanh", "sigmoid", "sign", "floor", "ceil",
    "trunc", "abs", "neg", "reciprocal", "relu", "isnan",
)  # fmt: skip
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {name: of_torch(name) for name in NAMES} | {
    "silu": lambda x: F.silu(x),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": lambda x: F.softplus(x),
    "logsigmoid": lambda x: F.logsigmoid(x),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "minimum": lambda x: torch.minimum(x, x.flip(0)),
}
SPECIAL = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 3.4e38, -3.4e38, 1e-38, 1e-45, -1e-45, 88.7, 88.8, -87.4, -103.9, 0.5]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_at_special_values_and_over_a_wide_range(name: str) -> None:
    """Both in vectors and in what is left of a row: each value stands at the end of one, too."""
    function = FUNCTIONS[name]
    spread = torch.logspace(-30, 2, 501)
    x = torch.cat((torch.tensor(SPECIAL), spread, -spread, torch.linspace(-90, 90, 700), torch.tensor(SPECIAL)))
    if name in ("maximum", "minimum"):
        found, exact = looped(lambda x, y: getattr(torch, name)(x, y), x, x.flip(0))(x, x.flip(0)), function(x)
    else:
        found, exact = looped(function, x)(x), function(x.double())
    if found.dtype is torch.bool:
        assert torch.equal(found, exact)
        return
    exact = exact.double()
    assert torch.equal(found.isnan(), exact.isnan())
    rounded = exact.float()
    assert torch.equal(found.isinf(), rounded.isinf())
    normal = rounded.isfinite() & (rounded.abs() >= torch.finfo(torch.float32).tiny)
    own, torchs = ((each.double() - exact)[normal].abs() for each in (found, function(x)))
    scale = x if name == "gelu by tanh" else exact  # 1 + tanh(x) cancels
    units = scale[normal].abs().double() * 2.0**-23
    assert (own <= torch.maximum(4.5 * units, 2 * torchs)).all()  # libmvec promises 4 units in the last place
    zeros = rounded == 0
    if name in ("floor", "ceil", "trunc", "neg", "abs", "sqrt"):
        assert torch.equal(found[zeros].signbit(), rounded[zeros].signbit())


def test_rounding_to_bfloat16_is_torchs_to_the_bit() -> None:
    bits = torch.arange(-(2**31), 2**31 - 1, 104729, dtype=torch.int64).to(torch.int32)
    x = torch.cat((bits.view(torch.float32), torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-45])))
    region = looped(lambda x: (x * 1.0).to(LOW) * 2.0, x)
    assert torch.equal(region(x).nan_to_num(), (x.to(LOW) * 2.0).nan_to_num())
    assert torch.equal(region(x).isnan(), x.isnan())


@pytest.mark.parametrize("op", ["amax", "amin"])
def test_nan_in_a_row_is_its_extreme(op: str) -> None:
    x = torch.randn(5, 37)
    for row, column in ((0, 0), (1, 36), (2, 15), (3, 16)):
        x[row, column] = NAN
    found = looped(lambda x: getattr(torch, op)(x * 2.0, -1, keepdim=True) + x, x)(x)
    assert torch.equal(found.isnan(), torch.tensor([[True]] * 4 + [[False]]).expand(5, 37))
    assert torch.equal(found[4], getattr(torch, op)(x[4] * 2.0) + x[4])


def test_gradients_of_maxima_are_shared_among_ties() -> None:
    x = torch.randint(0, 3, (7, 33)).float().requires_grad_()

    def function(x: Tensor) -> Tensor:
        return torch.amax(x + 1.0, -1, keepdim=True) * x

    weights = torch.randn(7, 33)
    (found,) = torch.autograd.grad(looped(function, x)(x), x, weights)
    (right,) = torch.autograd.grad(function(x), x, weights)
    torch.testing.assert_close(found, right)


# -- sizes and layouts ------------------------------------------------------------------------------------------------


def add_norm(columns: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, F.layer_norm(total, (columns,), weight, bias)

    return function


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 257, 1000])
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 5)])
def test_odd_sizes(rows: tuple[int, ...], columns: int) -> None:
    full = (*rows, columns)
    check(add_norm(columns), leaf(*full), leaf(*full), *(leaf(columns, dtype=torch.float32) for _ in range(2)))
    check(lambda x, w: F.rms_norm(x, (columns,), w, 1e-6), leaf(*full), leaf(columns, dtype=torch.float32))
    check(lambda x, y: F.silu(x) * y, leaf(*full), leaf(*full))
    check(lambda x, y: F.softmax(x * 0.3 + y, -1), leaf(*full), leaf(columns))


@pytest.mark.parametrize(
    "lay",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: F.pad(x, (1, 2))[..., 1:-2],
        lambda x: x[:1].expand(x.shape),
        lambda x: x.to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "every second", "padded", "expanded", "channels last"],
)
def test_strides(lay: Callable[[Tensor], Tensor]) -> None:
    x = lay(torch.randn(3, 4, 5, 6).to(LOW)).detach().requires_grad_()
    check(lambda x, y, b: F.silu(x + b) * y, x, leaf(3, 4, 5, 6), leaf(4, 1, 1))
    check(lambda x, y, s: (x * s + y).relu(), x, leaf(3, 1, 5, 6), leaf())


def test_masks_integers_and_rows_that_are_masked_whole() -> None:
    x, mask = leaf(6, 19), torch.rand(6, 19) > 0.5
    mask[2] = True
    check(lambda x, mask: torch.where(mask, x, x * 2.0) + 1.0, x, mask)
    check(
        lambda x, keys, rows: torch.where(keys <= rows, x, 0.0) * 0.5, x, torch.arange(19), torch.arange(6).view(6, 1)
    )
    masked = looped(lambda x, mask: F.softmax(x.masked_fill(mask, -INF) + 1.0, -1), x, mask)(x, mask)
    assert torch.equal(masked.isnan(), torch.arange(6).view(6, 1).eq(2).expand(6, 19))


# -- tasks and threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [64, 257])
def test_results_do_not_depend_on_the_number_of_threads(columns: int) -> None:
    inputs = leaf(513, columns), leaf(513, columns), *(leaf(columns, dtype=torch.float32) for _ in range(2))
    region = looped(add_norm(columns), *inputs)
    assert region.plans[-1].backward_launch.partials[0] > 1
    weights = [torch.randn(513, columns).to(LOW) for _ in range(2)]

    def gradients() -> list[Tensor]:
        return [x.clone() for x in torch.autograd.grad(region(*inputs), inputs, weights)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = gradients()
        torch.set_num_threads(3)
        together = gradients()
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, alone, together))


def test_column_sums_over_many_rows_are_exact_to_fp32() -> None:
    x, weight = leaf(5000, 24), leaf(24, dtype=torch.float32)
    check(lambda x, w: F.rms_norm(x, (24,), w, 1e-6), x, weight)
    region = looped(lambda x, w: F.rms_norm(x, (24,), w, 1e-6), x, weight)
    (own,) = torch.autograd.grad(region(x, weight).float().sum(), weight)
    wide = x.detach().double()
    right = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).sum(0)
    assert (own - right).abs().max() <= 1e-5 * right.abs().max()


def test_second_derivatives_are_torchs() -> None:
    x, y = (torch.randn(70, 64).requires_grad_() for _ in range(2))

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x) * y + torch.sigmoid(x * y)

    second = []
    for run in (looped(function, x, y), function):
        (first,) = torch.autograd.grad(run(x, y).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), (x, y)))
    for own, right in zip(*second, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-6)


# -- what runs op by op -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (lambda x, y: x.double() + y, (leaf(4, 8), leaf(4, 8)), "torch.float64"),
        (lambda x, y: (x + y).half().float(), (torch.randn(4, 8), torch.randn(4, 8)), "that C++ loops do not have"),
        (lambda x, y: x + y + 1.0, (torch.randn(4, 8).half(), torch.randn(4, 8).half()), "float16 in a C++ loop"),
        (lambda x, y: F.dropout(x + y, 0.5, True), (torch.randn(4, 8), torch.randn(4, 8)), "numbers are torch's"),
        (lambda x, y: torch.where(torch.exp(x) == y, x, y), (torch.randn(4, 8), torch.randn(4, 8)), "of what libm"),
    ],
)  # fmt: skip
def test_what_loops_do_not_serve_runs_op_by_op_and_says_why(function: Any, inputs: Any, reason: str) -> None:
    region = tools.region_of(function, kernels="loops")
    torch.manual_seed(0)
    found = region(*inputs)
    assert region.path == "aten" and reason in region.reason, region.reason
    torch.manual_seed(0)
    assert torch.equal(found, function(*inputs))


def test_memory_that_is_read_negated() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x * 2.0 + y) * y

    x, y = torch.randn(64, 64, dtype=torch.complex64).conj().imag, torch.randn(64, 64)
    region = tools.region_of(function, kernels="loops")
    assert torch.equal(region(x, y), function(x, y)) and "negated" in region.reason
    looped(function, y, y)


# -- compiling --------------------------------------------------------------------------------------------------------


def test_regions_that_differ_in_names_alone_share_a_library() -> None:
    def one(first: Tensor, second: Tensor) -> Tensor:
        return F.silu(first) * second

    def other(a: Tensor, b: Tensor) -> Tensor:
        return F.silu(a) * b

    sources = []
    for function in (one, other):
        region = tools.region_of(function, name=function.__name__, kernels="loops")
        with torch.no_grad():
            region(torch.randn(9, 5), torch.randn(9, 5))
        launch = region.plans[-1].inference_launch
        assert isinstance(launch, Loops)
        sources.append(launch.source)
    assert sources[0] == sources[1]


def test_another_length_compiles_nothing_anew() -> None:
    region = looped(lambda x, mask: F.softmax(x + mask, -1), leaf(2, 5, 9), torch.randn(9))
    for length in (11, 40, 64):
        x, mask = leaf(3, length, length), torch.randn(length)
        torch.testing.assert_close(region(x, mask), F.softmax(x + mask, -1), rtol=1e-5, atol=1e-6)
        assert region.path == "loops"
    assert len({launch.source for plan in region.plans for launch, _ in plan.launches()}) == 2


def test_what_takes_long_is_computed_once_a_row() -> None:
    """Twice in a softmax: for its sum, and for its result."""
    with torch.no_grad():
        region = looped(lambda x: F.softmax(x * 2.0, -1), torch.randn(3, 40))
    code = region.source.partition('extern "C" void')[2]
    assert code.count("expf(") == 1 and code.count("for (int64_t column") == 3


def test_what_the_compiler_says_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("FXPREC_CACHE_DIR", str(tmp_path / "cache"))
    cpp.compiled_text.cache_clear()
    region = tools.region_of(lambda x, y: torch.exp2(x) * y + 0.321, kernels="loops")
    with torch.no_grad(), pytest.raises(cpp.CompilerError, match="no room"):
        region(torch.randn(3, 5), torch.randn(3, 5))
