"""RMS norm with the residual add and dropout before it; what it shares with layer norm is tested there in full."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernel_tools
import norm_tools
from benchmarks.workloads import kernel_bytes
from fxprec.kernels.launch.philox import draw_seeds, drop_threshold, keep_mask
from fxprec.kernels.nn import norm_launch, norm_long_rows, norm_rows
from fxprec.kernels.nn import rms_norm as module
from fxprec.kernels.nn.rms_norm import rms_norm

error, gradients, near = norm_tools.error, norm_tools.gradients, norm_tools.near
bytes_moved = functools.partial(kernel_bytes.norm, center=False)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [F32, F16, BF16]
SHAPES = [(3, 5, 37), (64,), (7, 1), (2600, 6), (3, 768)]
#: Plain torch, Triton's interpreter, a device.
PLACES = [pytest.param("cpu", id="plain"), *kernel_tools.DEVICES]
every_place = pytest.mark.parametrize("device", PLACES)
_OPS = module._OPS


def inputs(shape: tuple[int, ...], device: str, x: torch.dtype, residual: torch.dtype | None = None) -> list[Any]:
    """x, residual, weight; the weight is FP32 with values that x's dtype holds."""
    made = [torch.randn(shape).to(x), (torch.randn(shape) * 2).to(residual or x), torch.randn(shape[-1]).to(x).float()]
    return [t.to(device).requires_grad_() for t in made]


def reference(x: Tensor, residual: Tensor | None, weight: Tensor | None, *args: Any, **options: Any) -> Any:
    options = {"eps": torch.finfo(F32).eps, **options}
    return norm_tools.reference(x, residual, weight, None, *args, center=False, **options)


def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@every_place
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("add", "offset"), [(False, 0.0), (True, 1.0)])
def test_results_and_gradients_are_as_near_to_float64_as_eagers(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], add: bool, offset: float
) -> None:
    x, residual, weight = own = inputs(shape, device, dtype)
    cotangents = [torch.randn(shape).to(device, dtype) for _ in range(2)]
    columns = shape[-1:]
    forms = []
    for kind in (torch.float64, dtype):
        leaves = [t.detach().to(kind).requires_grad_() for t in own]
        s = leaves[1] + leaves[0] if add else leaves[0]
        eps = torch.finfo(F32).eps if kind == torch.float64 else None
        y = F.rms_norm(s, columns, leaves[2] + offset, eps)
        results = (y, s) if add else (y,)
        wanted = leaves if add else [leaves[0], leaves[2]]
        forms.append([*results, *gradients(results, wanted, [c.to(kind) for c in cotangents])])
    ours: Any
    ours = rms_norm(x, columns, weight, residual=residual, offset=offset) if add else rms_norm(x, columns, weight)
    wanted = own if add else [x, weight]
    mine = [*(ours if add else [ours]), *gradients(ours, wanted, cotangents)]
    # The interpreter cuts where it should round to bfloat16.
    slack = 2**-7 if kernel_tools.INTERPRETING and dtype == BF16 else 2**-21
    for got, truth, low in zip(mine, *forms, strict=True):
        assert error(got, truth) <= 2 * error(low, truth) + slack * max(truth.abs().max().item(), 1.0)
    assert [t.dtype for t in mine[-len(wanted) :]] == [t.dtype for t in wanted]


@every_place
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_eps_it_is_torchs(device: str, dtype: torch.dtype) -> None:
    """Of values so small that it matters."""
    x = (torch.randn(4, 64, device=device) * 1e-3).to(dtype)
    ours = rms_norm(x, 64)
    assert error(ours, F.rms_norm(x, (64,))) <= norm_tools.TOLERANCES[dtype] * 4
    wide = x.double()
    truth = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + torch.finfo(F32).eps)
    assert error(ours, truth) <= norm_tools.TOLERANCES[dtype] * 4
    assert error(rms_norm(x, 64, eps=1e-3), truth) > 0.5


@every_place
@pytest.mark.parametrize(("low", "stream"), [(F32, F32), (F16, F32), (F16, F16)])
@pytest.mark.parametrize("output", [None, F32])
def test_stream_dropout_and_offset(
    device: str, low: torch.dtype, stream: torch.dtype, output: torch.dtype | None
) -> None:
    x, residual, weight = own = inputs((9, 37), device, low, stream)
    torch.manual_seed(11)
    y, s = rms_norm(x, 37, weight, 1e-6, residual=residual, dropout_p=0.4, output_dtype=output, offset=1.0)
    assert s.dtype == torch.promote_types(low, stream) and y.dtype == (output or low)
    torch.manual_seed(11)
    seed = draw_seeds(1, torch.device(device))
    expected = reference(x, residual, weight, seed, 37, eps=1e-6, p=0.4, offset=1.0, dtype=output)
    near((y, s), expected, low)
    again = rms_norm(s.detach(), 37, weight, 1e-6, output_dtype=output or low, offset=1.0)
    assert kernel_tools.same_bits(y, again), "y is of the s that was stored"
    cotangents = [torch.randn(9, 37, device=device).to(t.dtype) for t in (y, s)]
    found = gradients((y, s), own, cotangents)
    near(found, gradients(expected, own, cotangents), low)
    keep = keep_mask(seed, 9, 37, 0.4)
    assert torch.equal(found[0][~keep], torch.zeros_like(found[0][~keep])) and found[0][keep].any()
    _, quiet = rms_norm(x, 37, weight, residual=residual, dropout_p=0.4, training=False)
    assert kernel_tools.same_bits(quiet, (x.float() + residual.float()).to(quiet.dtype))


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
@pytest.mark.parametrize(("columns", "p", "low"), [(33, 0.3, F32), (48, 0.0, F16), (61, 0.3, F16)])
def test_long_rows_are_as_short_ones(
    device: str, columns: int, p: float, low: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORWARD_COLUMNS": 32, "BACKWARD_COLUMNS": 32, "_LONG_BLOCK": 16, "_LONG_WARPS": 1}.items():
        monkeypatch.setattr(norm_launch, name, value)
    monkeypatch.setattr(norm_launch, "_COLUMNS_TILE", (4, 16, 1))
    x, residual, weight = own = inputs((11, columns), device, low, F32)
    torch.manual_seed(5)
    ours = rms_norm(x, columns, weight, residual=residual, dropout_p=p, offset=1.0)
    torch.manual_seed(5)
    seed = draw_seeds(1, torch.device(device)) if p else None
    expected = reference(x, residual, weight, seed, columns, p=p, offset=1.0)
    near(ours, expected, low)
    cotangents = [torch.randn(11, columns, device=device).to(t.dtype) for t in ours]
    near(gradients(ours, own, cotangents), gradients(expected, own, cotangents), low)
    near([rms_norm(residual, columns)], [F.rms_norm(residual, (columns,))])


@every_place
def test_empty_rows_and_strided_rows(device: str) -> None:
    x, residual, weight = own = inputs((0, 8), device, F32)
    y, s = rms_norm(x, 8, weight, residual=residual)
    found = gradients((y, s), own, [torch.ones_like(y), torch.ones_like(s)])
    assert [g.shape for g in found] == [t.shape for t in own] and not found[2].any()
    wide = torch.randn(6, 5, 64, device=device)
    for form in (wide[..., 3:43], wide.transpose(0, 1)[..., ::2], torch.randn(40, device=device).expand(6, 40)):
        columns = form.shape[-1]
        assert not form.is_contiguous()
        assert torch.equal(rms_norm(form, columns), rms_norm(form.contiguous(), columns))


@every_place
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(device: str, value: float) -> None:
    x, _, weight = inputs((6, 40), device, F32)
    x.data[2, 7] = value
    y = rms_norm(x, 40, weight)
    expected = F.rms_norm(x, (40,), weight)
    assert torch.equal(y.isnan(), expected.isnan()) and y[2].isnan().any() and y[[0, 1, 3, 4, 5]].isfinite().all()
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert dx[2].isnan().any() and dx[[0, 1, 3, 4, 5]].isfinite().all() and dweight.isnan().any()


# As a torch op


def loss(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    y, s = rms_norm(x, 8, weight, residual=residual, dropout_p=0.3, offset=1.0)
    return (rms_norm(y, 8, weight).square() @ torch.arange(8.0).to(y.dtype)).sum().float() + s.sin().sum()


def seeded(function: Any, *args: Any) -> Any:
    torch.manual_seed(4)
    return function(*args)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_opcheck(p: float) -> None:
    x, residual, weight = inputs((3, 5, 8), "cpu", BF16, F32)
    seed = draw_seeds(1, x.device) if p else None
    torch.library.opcheck(_OPS.plain.op, (x, weight, None, 8, 1e-5, 1.0, BF16))
    torch.library.opcheck(_OPS.added.op, (x, residual, weight, None, seed, 8, 1e-5, p, 1.0, BF16))
    s = residual.detach()
    wanted = (F32, BF16, F32, None)
    inner = (x.detach(), s, s, weight.detach(), torch.rand(1, 15) + 0.5, seed, 8, p, 1.0, *wanted)
    torch.library.opcheck(_OPS.backward.op, inner)


def test_compile_export_and_checkpoint() -> None:
    own = inputs((3, 5, 8), "cpu", BF16, F32)
    expected = torch.autograd.grad(seeded(loss, *own), own)
    assert all(g.any() for g in expected)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, torch.autograd.grad(seeded(compiled, *own), own), expected))
    again = seeded(lambda: checkpoint(loss, *own, use_reentrant=False))
    assert all(map(torch.equal, torch.autograd.grad(again, own), expected))

    class Block(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Any:
            return loss(*inputs)

    plain = tuple(t.detach() for t in own)
    program = torch.export.export(Block(), plain)
    assert any("fxprec.add_rms_norm" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(seeded(program.module(), *plain), seeded(loss, *plain))


def test_func_grad() -> None:
    own = inputs((3, 5, 8), "cpu", F32)
    found = seeded(torch.func.grad(loss, (0, 1, 2)), *(t.detach() for t in own))
    near(found, torch.autograd.grad(seeded(loss, *own), own))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_double_backward_is_eagers(p: float) -> None:
    """Against torch's RMS norm in float64, with the same mask."""
    own = inputs((6, 8), "cpu", F32)
    cotangents = [torch.randn(6, 8, requires_grad=True) for _ in range(2)]
    directions = [torch.randn_like(t) for t in own]
    seed = draw_seeds(1, torch.device("cpu"))
    factor = keep_mask(seed, 6, 8, p) / (1 - p)
    found = []
    for kind in (F32, torch.float64):
        leaves = [t.detach().to(kind).requires_grad_() for t in own]
        grads = [t.detach().to(kind).requires_grad_() for t in cotangents]
        x, residual, weight = leaves
        if kind == F32:
            results = _OPS.added(x, residual, weight, None, seed if p else None, 8, 1e-5, p, 1.0, F32)[:2]
        else:
            s = residual + x * factor
            results = F.rms_norm(s, (8,), weight + 1, 1e-5), s
        first = gradients(results, leaves, grads, create_graph=True)
        total = sum((g * d.to(kind)).sum() for g, d in zip(first, directions, strict=True))
        assert isinstance(total, Tensor)
        second = torch.autograd.grad(total, [*leaves, *grads])
        assert all(g.any() for g in second)
        found.append([*first, *second])
    for ours, truth in zip(*found, strict=True):
        assert error(ours, truth.detach()) <= 1e-5 * max(1.0, truth.abs().max().item())


X = torch.zeros(4, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((X.double(), 8), {}, TypeError, r"takes x in .*got torch.float64.*torch's own"),
        ((X, 7), {}, ValueError, r"normalized_shape \(7,\).*got \(4, 8\)"),
        ((X, 8, X), {}, ValueError, r"weight of shape \(8,\), got \(4, 8\)"),
        ((X, 8), {"residual": X[0]}, ValueError, r"residual of shape \(4, 8\), got \(8,\)"),
        ((X, 8), {"dropout_p": 0.5}, ValueError, r"give residual"),
        ((X, 8), {"offset": 1.0}, ValueError, r"give weight"),
    ],
)
def test_bad_arguments(arguments: Any, options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"(?s)rms_norm.*{message}"):
        rms_norm(*arguments, **options)


# What the compiler makes of it


def compiled(form: str, architecture: int, x: torch.dtype, stream: torch.dtype, columns: int, p: float) -> Any:
    """The kernel with residual, weight and offset, at a size."""
    wide = torch.promote_types(x, stream)
    types: dict[str, Any] = {"x": x, "residual": stream, "y": x, "s": wide, "dy": x, "ds": wide}
    types |= {"dresidual": stream, "dx": x, "seed": "*i64"}
    types |= dict.fromkeys(("weight", "statistics", "dweights"), F32)
    strides = ("x_stride", "residual_stride", "dy_stride", "ds_stride", "s_stride", "columns")
    types |= dict.fromkeys(("rows", *strides), "i32")
    constants: dict[str, Any] = {"COLUMNS": columns, "CENTER": False, "OFFSET": 1.0, "THRESHOLD": drop_threshold(p)}
    constants |= {"bias": None, "dbiases": None}
    if not p:
        constants |= {"seed": None} | ({"dx": None} if x == stream else {})
    long = (1, norm_launch._LONG_BLOCK, norm_launch._LONG_WARPS)
    kernel, (rows, block, warps) = {
        "forward": (norm_rows.forward_kernel, norm_launch._tile(columns)),
        "backward": (norm_rows.backward_kernel, norm_launch._tile(columns)),
        "long_forward": (norm_long_rows.long_forward_kernel, long),
        "long_backward": (norm_long_rows.long_backward_kernel, long),
        "columns": (norm_long_rows.columns_kernel, norm_launch._COLUMNS_TILE),
    }[form]
    constants |= {"ROWS": rows, "BLOCK": block, "STAGES": norm_launch._STAGES}
    built = norm_tools.compiled(kernel, architecture, warps, types, constants, ("rows",))
    print(form, architecture, x, stream, columns, p, built.registers, "registers", built.shared, "bytes shared")
    return built


@kernel_tools.compiles
@pytest.mark.parametrize(
    ("architecture", "x", "stream", "p", "columns"),
    [(90, BF16, BF16, 0.0, 4096), (80, F16, F32, 0.1, 8192), (100, F32, F32, 0.1, 1024)],
)
@pytest.mark.parametrize("form", ["forward", "backward", "long_forward", "long_backward", "columns"])
def test_nothing_spills_and_tiles_move_16_bytes_at_a_time(
    architecture: int, x: torch.dtype, stream: torch.dtype, p: float, form: str, columns: int
) -> None:
    kernel = compiled(form, architecture, x, stream, columns, p)
    assert kernel.spills == 0 and kernel.registers <= 152
    assert not re.search(r"\b(atom|red)\.", kernel.ptx)
    if form in ("forward", "backward"):
        assert len(kernel.narrow()) <= (1 if form == "forward" else 4) + (p > 0)
        promised = bytes_moved(100, columns, x, residual=stream, dropout=p > 0)[form == "backward"]
        assert promised == 100 * columns * sum(kernel.moved(*norm_launch._tile(columns)[:2])) + 400


def test_bytes_of_a_plain_norm() -> None:
    assert bytes_moved(10, 64, BF16) == (4 * 640 + 40, 6 * 640 + 40)
    assert bytes_moved(10, 64, BF16, parameters=(F32,))[1] == 6 * 640 + 40 + 8 * 64
