"""Layer norm with the residual add and dropout before it: as accurate as eager, in one pass, and a torch op."""

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
from fxprec.kernels.nn import layer_norm as module
from fxprec.kernels.nn import norm_launch, norm_long_rows, norm_rows
from fxprec.kernels.nn.layer_norm import layer_norm

error, gradients, near = norm_tools.error, norm_tools.gradients, norm_tools.near
reference = functools.partial(norm_tools.reference, center=True)
bytes_moved = functools.partial(kernel_bytes.norm, center=True)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [F32, F16, BF16]
SHAPES = [(3, 5, 37), (64,), (7, 1), (2600, 6), (3, 768), (1, 300)]
#: Plain torch, Triton's interpreter, a device.
PLACES = [pytest.param("cpu", id="plain"), *kernel_tools.DEVICES]
every_place = pytest.mark.parametrize("device", PLACES)
_OPS = module._OPS


def inputs(shape: tuple[int, ...], device: str, x: torch.dtype, residual: torch.dtype | None = None) -> list[Any]:
    """x, residual, weight, bias; parameters are FP32 with values that x's dtype holds."""
    columns = shape[-1]
    made = [torch.randn(shape), torch.randn(shape) * 2, torch.randn(columns) + 1, torch.randn(columns)]
    made = [t.to(x if residual is None or i != 1 else residual) for i, t in enumerate(made)]
    made = [t if i < 2 else t.float() for i, t in enumerate(made)]
    return [t.to(device).requires_grad_() for t in made]


def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@every_place
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("add", [False, True])
def test_results_and_gradients_are_as_near_to_float64_as_eagers(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], add: bool
) -> None:
    own = inputs(shape, device, dtype)
    cotangents = [torch.randn(shape).to(device, dtype) for _ in range(2)]
    columns = shape[-1:]

    def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
        s = residual + x
        return (F.layer_norm(s, columns, weight, bias), s) if add else F.layer_norm(x, columns, weight, bias)

    x, residual, weight, bias = own
    ours = layer_norm(x, columns, weight, bias, residual=residual) if add else layer_norm(x, columns, weight, bias)
    forms = []
    for kind in (torch.float64, dtype):
        leaves = [t.detach().to(kind).requires_grad_() for t in own]
        results = eager(*leaves)
        wanted = leaves if add else [leaves[0], *leaves[2:]]
        found = gradients(results, wanted, [c.to(kind) for c in cotangents])
        forms.append([*(results if add else [results]), *found])
    wanted = own if add else [x, weight, bias]
    mine = [*(ours if add else [ours]), *gradients(ours, wanted, cotangents)]
    # The interpreter cuts where it should round to bfloat16.
    slack = 2**-7 if kernel_tools.INTERPRETING and dtype == BF16 else 2**-21
    # Terms of a gradient are as large as 1 / deviation: those of a single column cancel, but for an FMA's rounding.
    terms = 1e-5**-0.5 if columns == (1,) else 1.0
    for got, truth, low in zip(mine, *forms, strict=True):
        assert error(got, truth) <= 2 * error(low, truth) + slack * max(truth.abs().max().item(), terms)
    assert [t.dtype for t in mine[-len(wanted) :]] == [t.dtype for t in wanted]


@every_place
@pytest.mark.parametrize(("low", "stream"), [(F16, F32), (F32, F16), (BF16, F16), (F16, F16)])
@pytest.mark.parametrize("output", [None, F32, F16])
def test_the_stream_has_the_promoted_dtype_and_is_rounded_once(
    device: str, low: torch.dtype, stream: torch.dtype, output: torch.dtype | None
) -> None:
    x, residual, weight, bias = own = inputs((9, 40), device, low, stream)
    y, s = layer_norm(x, 40, weight, bias, residual=residual, output_dtype=output)
    wide = torch.promote_types(low, stream)
    assert s.dtype == wide and y.dtype == (output or low)
    assert kernel_tools.same_bits(s, (x.float() + residual.float()).to(wide))
    again = layer_norm(s.detach(), 40, weight, bias, output_dtype=output or low)
    # Of the s that was stored: of the sum that was rounded to it y would be off by roundings of s. Two kernels may
    # contract other products, which FP32 outputs show.
    torch.testing.assert_close(y, again, rtol=2**-18 if y.dtype is F32 else 0, atol=2**-18 if y.dtype is F32 else 0)
    cotangents = [torch.randn(9, 40, device=device).to(t.dtype) for t in (y, s)]
    expected = reference(x, residual, weight, bias, None, 40, dtype=output)
    found = gradients((y, s), own, cotangents)
    near(found[:2], gradients(expected, own[:2], cotangents), min(low, stream, key=lambda d: d.itemsize))
    near(found[2:], gradients(expected, own[2:], cotangents), F32)


@every_place
@pytest.mark.parametrize(("low", "stream"), [(F32, F32), (F16, F32), (F16, F16)])
@pytest.mark.parametrize("columns", [4, 37, 130])
def test_dropout_has_the_mask_of_its_seed_in_both_directions(
    device: str, low: torch.dtype, stream: torch.dtype, columns: int
) -> None:
    x, residual, weight, bias = own = inputs((9, columns), device, low, stream)
    torch.manual_seed(11)
    y, s = layer_norm(x, columns, weight, bias, residual=residual, dropout_p=0.4)
    torch.manual_seed(11)
    seed = draw_seeds(1, torch.device(device))
    keep = keep_mask(seed, 9, columns, 0.4)
    assert 0 < keep.sum() < keep.numel()
    dropped = s.detach() == residual.detach()
    assert torch.equal(dropped[x != 0], ~keep[x != 0]) or low == F16
    expected = reference(x, residual, weight, bias, seed, columns, p=0.4)
    near((y, s), expected, low)
    cotangents = [torch.randn(9, columns, device=device).to(t.dtype) for t in (y, s)]
    found = gradients((y, s), own, cotangents)
    near(found, gradients(expected, own, cotangents), low)
    assert torch.equal(found[0][~keep], torch.zeros_like(found[0][~keep]))


@every_place
def test_evaluation_drops_nothing(device: str) -> None:
    x, residual, weight, bias = inputs((9, 40), device, F32)
    y, s = layer_norm(x, 40, weight, bias, residual=residual, dropout_p=0.4, training=False)
    assert torch.equal(s, x + residual)
    near([y], [layer_norm(s, 40, weight, bias)])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows be long from 33 columns on, in blocks of 16."""
    monkeypatch.setattr(norm_launch, "FORWARD_COLUMNS", 32)
    monkeypatch.setattr(norm_launch, "BACKWARD_COLUMNS", 32)
    monkeypatch.setattr(norm_launch, "_LONG_BLOCK", 16)
    monkeypatch.setattr(norm_launch, "_LONG_WARPS", 1)
    monkeypatch.setattr(norm_launch, "_COLUMNS_TILE", (4, 16, 1))


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
@pytest.mark.parametrize(("columns", "p", "low"), [(33, 0.3, F32), (48, 0.0, F16), (61, 0.3, F16)])
def test_long_rows_are_as_short_ones(device: str, columns: int, p: float, low: torch.dtype, short: None) -> None:
    own = inputs((11, columns), device, low, F32)
    own[0].data += 50  # a mean far from zero
    x, residual, weight, bias = own
    torch.manual_seed(5)
    ours = layer_norm(x, columns, weight, bias, residual=residual, dropout_p=p)
    torch.manual_seed(5)
    seed = draw_seeds(1, torch.device(device)) if p else None
    expected = reference(x, residual, weight, bias, seed, columns, p=p)
    near(ours, expected, low)
    cotangents = [torch.randn(11, columns, device=device).to(t.dtype) for t in ours]
    near(gradients(ours, own, cotangents), gradients(expected, own, cotangents), low)
    plain = layer_norm(residual, columns, weight)
    near([plain], [F.layer_norm(residual, (columns,), weight)])
    near(
        gradients(plain, [residual, weight], cotangents[1:]),
        gradients(F.layer_norm(residual, (columns,), weight), [residual, weight], cotangents[1:]),
    )
    only = torch.autograd.grad(ours[1].sum(), own[:2])
    near(only, torch.autograd.grad(expected[1].sum(), own[:2]), low)


@every_place
def test_rows_apart_are_read_in_place_and_others_copied(device: str) -> None:
    wide = torch.randn(6, 5, 64, device=device)
    weight, bias = torch.randn(2, 40, device=device)
    apart = wide[..., 3:43]
    forms = [
        (apart, wide[..., 20:60]),
        (torch.randn(40, device=device).expand(6, 5, 40), wide[..., :40]),
        (torch.randn(6, 40, 5, device=device).transpose(1, 2), apart),
        (torch.randn(6, 5, 80, device=device)[..., ::2], torch.randn(5, 6, 40, device=device).transpose(0, 1)),
    ]
    for x, residual in forms:
        assert not x.is_contiguous()
        own = [x.detach().requires_grad_(), residual.detach().requires_grad_()]
        same = [t.detach().contiguous().requires_grad_() for t in own]
        ours = layer_norm(own[0], 40, weight, bias, residual=own[1])
        expected = layer_norm(same[0], 40, weight, bias, residual=same[1])
        assert all(map(torch.equal, ours, expected)) and all(t.is_contiguous() for t in ours)
        cotangents = [x, residual]
        found = gradients(ours, own, cotangents)
        assert all(map(torch.equal, found, gradients(expected, same, [t.contiguous() for t in cotangents])))
    assert norm_launch._rows(apart, 40)[0].data_ptr() == apart.data_ptr() and norm_launch._rows(apart, 40)[1] == 64


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
def test_rows_more_than_2_31_elements_apart(device: str) -> None:
    """Of the storage only these rows are ever touched."""
    x = torch.empty(2**31 + 64, dtype=F16, device=device).as_strided((2, 37), (2**31 + 8, 1))
    x.copy_(torch.randn(2, 37))
    near([layer_norm(x, 37)], [layer_norm(x.contiguous(), 37)], F16)
    near(layer_norm(x, 37, residual=x), layer_norm(x.contiguous(), 37, residual=x.contiguous()), F16)


@every_place
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (2, 0)])
def test_empty_tensors(device: str, shape: tuple[int, ...]) -> None:
    own = inputs(shape, device, F32)
    x, residual, weight, bias = own
    y, s = layer_norm(x, shape[-1], weight, bias, residual=residual, dropout_p=0.5)
    assert y.shape == s.shape == shape
    found = gradients((y, s), own, [torch.ones_like(y), torch.ones_like(s)])
    assert [g.shape for g in found] == [t.shape for t in own]
    assert not found[2].any() and not found[3].any()


@every_place
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (0, 3), (2, 3)])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_gradients_of_some_results_for_some_inputs(device: str, wanted: tuple[int, ...], used: tuple[int, ...]) -> None:
    for p in (0.0, 0.5):
        some_gradients(device, p, wanted, used)


def some_gradients(device: str, p: float, wanted: tuple[int, ...], used: tuple[int, ...]) -> None:
    own = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs((9, 40), device, F32))]
    x, residual, weight, bias = own
    cotangents = [torch.randn(9, 40, device=device) for _ in range(2)]
    found = []
    for form in range(2):
        torch.manual_seed(2)
        if form:
            seed = draw_seeds(1, torch.device(device)) if p else None
            results = reference(x, residual, weight, bias, seed, 40, p=p)
        else:
            results = layer_norm(x, 40, weight, bias, residual=residual, dropout_p=p)
        leaves = [own[i] for i in wanted]
        pairs = [(results[i], cotangents[i]) for i in used if results[i].requires_grad]
        outputs, grads = [r for r, _ in pairs], [c for _, c in pairs]
        grads = torch.autograd.grad(outputs, leaves, grads, allow_unused=True) if pairs else [None] * len(leaves)
        found.append([torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)])
    near(*found)


@every_place
@pytest.mark.parametrize("parameters", [(None, None), ("weight", None), (None, "bias")])
def test_parameters_may_be_missing_or_low(device: str, parameters: tuple[str | None, str | None]) -> None:
    x, residual, weight, bias = inputs((5, 40), device, F16)
    low = [t.detach().half().requires_grad_() for t in (weight, bias)]
    scale, shift = (t if name else None for name, t in zip(parameters, low, strict=True))
    ours = layer_norm(x, 40, scale, shift, residual=residual)
    expected = reference(x, residual, scale, shift, None, 40)
    near(ours, expected, F16)
    own = [x, residual, *(t for t in (scale, shift) if t is not None)]
    cotangents = [torch.randn(5, 40, device=device).half() for _ in range(2)]
    near(gradients(ours, own, cotangents), gradients(expected, own, cotangents), F16)


@every_place
def test_the_norm_is_over_several_dimensions(device: str) -> None:
    x = torch.randn(3, 4, 5, 6, device=device, requires_grad=True)
    weight, bias = (torch.randn(5, 6, device=device, requires_grad=True) for _ in range(2))
    ours, expected = layer_norm(x, (5, 6), weight, bias), F.layer_norm(x, (5, 6), weight, bias)
    near([ours], [expected])
    cotangent = [torch.randn_like(x)]
    near(gradients(ours, [x, weight, bias], cotangent), gradients(expected, [x, weight, bias], cotangent))


@every_place
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row_and_does_not_get_lost(device: str, value: float) -> None:
    x, residual, weight, bias = inputs((6, 40), device, F32)
    x.data[2, 7] = value
    for p in (0.0, 0.9):
        y, s = layer_norm(x, 40, weight, bias, residual=residual, dropout_p=p)
        assert y[2].isnan().all() and y[[0, 1, 3, 4, 5]].isfinite().all()
        assert not s[2, 7].isfinite(), "a dropped one, too: dropout multiplies"
        dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
        assert dx[2].isnan().all() and dx[[0, 1, 3, 4, 5]].isfinite().all() and dweight.isnan().all()


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
def test_the_same_bits_every_time(device: str) -> None:
    x, residual, weight, bias = own = inputs((500, 24), device, F16)
    cotangents = [torch.randn(500, 24, device=device).half() for _ in range(2)]
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        results = layer_norm(x, 24, weight, bias, residual=residual, dropout_p=0.2)
        runs.append([*results, *gradients(results, own, cotangents)])
    assert all(map(kernel_tools.same_bits, *runs))


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
@pytest.mark.parametrize("sums", [1, 2])
def test_parts_of_more_programs_than_a_tile_has_rows_add_up(device: str, sums: int) -> None:
    parts = torch.randn(sums, 300, 37, device=device)
    outs = [torch.empty(37, device=device, dtype=dtype) for dtype in (F32, F16)[:sums]]
    norm_launch.add_parts(parts, outs)
    for out, part in zip(outs, parts, strict=True):
        assert error(out, part.double().sum(0)) <= (2e-5 if out.dtype == F32 else 3e-2)


# As a torch op


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("low", [F32, BF16])
def test_opcheck(p: float, low: torch.dtype) -> None:
    x, residual, weight, bias = inputs((3, 5, 8), "cpu", low, F32)
    seed = draw_seeds(1, x.device) if p else None
    torch.library.opcheck(_OPS.plain.op, (x, weight, bias, 8, 1e-5, 0.0, low))
    torch.library.opcheck(_OPS.added.op, (x, residual, weight, bias, seed, 8, 1e-5, p, 0.0, low))
    statistics = torch.rand(2, 15) + 0.5
    wanted = (F32, low, F32, None)
    dy, ds, s = x.detach(), residual.detach(), residual.detach()
    torch.library.opcheck(_OPS.backward.op, (dy, ds, s, weight.detach(), statistics, seed, 8, p, 0.0, *wanted))


def loss(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, p: float = 0.3) -> Tensor:
    y, s = layer_norm(x, 8, weight, bias, residual=residual, dropout_p=p)
    return (layer_norm(y, 8, weight).square().sum() + s.sin().sum()).float()


def seeded(function: Any, *args: Any) -> Any:
    torch.manual_seed(4)
    return function(*args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_sees_one_graph(dynamic: bool) -> None:
    own = inputs((3, 5, 8), "cpu", BF16, F32)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = torch.autograd.grad(seeded(loss, *own), own)
    assert all(map(torch.equal, torch.autograd.grad(seeded(compiled, *own), own), expected))
    assert all(g.any() for g in expected)


def test_export_has_the_op() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
            return layer_norm(x, 8, weight, residual=residual, dropout_p=0.3)

    own = [t.detach() for t in inputs((3, 5, 8), "cpu", F32)[:3]]
    program = torch.export.export(Block(), tuple(own), dynamic_shapes=({0: torch.export.Dim("rows")},) * 2 + (None,))
    assert any("fxprec.add_layer_norm" in str(node.target) for node in program.graph.nodes)
    own[:2] = [torch.randn(7, 5, 8) for _ in range(2)]
    assert all(map(torch.equal, seeded(program.module(), *own), seeded(Block(), *own)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_draws_the_same_mask(use_reentrant: bool) -> None:
    own = inputs((3, 5, 8), "cpu", F32)
    expected = torch.autograd.grad(seeded(loss, *own), own)
    for t in own:
        t.grad = None
    seeded(lambda: checkpoint(loss, *own, use_reentrant=use_reentrant)).backward()
    assert all(torch.equal(t.grad, e) for t, e in zip(own, expected, strict=True))


def test_func_grad() -> None:
    own = inputs((3, 5, 8), "cpu", F32)
    plain = [t.detach() for t in own]
    found = seeded(torch.func.grad(loss, (0, 1, 2, 3)), *plain)
    near(found, torch.autograd.grad(seeded(loss, *own), own))
    twice = torch.func.grad(lambda x: torch.func.grad(loss)(x, *plain[1:]).square().sum())
    (first,) = torch.autograd.grad(seeded(loss, *own), own[0], create_graph=True)
    near([seeded(twice, plain[0])], torch.autograd.grad(first.square().sum(), own[0]))


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("add", [False, True])
def test_double_backward_is_eagers(p: float, add: bool) -> None:
    """Against torch's layer norm in float64, with the same mask."""
    own = inputs((6, 8), "cpu", F32)
    cotangents = [torch.randn(6, 8, requires_grad=True) for _ in range(2)]
    directions = [torch.randn_like(t) for t in own]
    seed = draw_seeds(1, torch.device("cpu"))
    factor = keep_mask(seed, 6, 8, p) / (1 - p)
    found = []
    for kind in (F32, torch.float64):
        leaves = [t.detach().to(kind).requires_grad_() for t in own]
        grads = [t.detach().to(kind).requires_grad_() for t in cotangents]
        x, residual, weight, bias = leaves
        if kind == F32:
            results: Any = layer_norm(x, 8, weight, bias)
            if add:
                results = _OPS.added(x, residual, weight, bias, seed if p else None, 8, 1e-5, p, 0.0, F32)[:2]
        else:
            s = residual + x * factor
            results = (F.layer_norm(s, (8,), weight, bias), s) if add else F.layer_norm(x, (8,), weight, bias)
        wanted = leaves if add else [x, weight, bias]
        first = gradients(results, wanted, grads, create_graph=True)
        total = sum((g * d.to(kind)).sum() for g, d in zip(first, directions, strict=False))
        assert isinstance(total, Tensor)
        second = torch.autograd.grad(total, [*wanted[:-1], *grads[: 1 + add]])
        assert all(g.any() for g in second)
        found.append([*first, *second])
    for ours, truth in zip(*found, strict=True):
        assert error(ours, truth.detach()) <= 1e-5 * max(1.0, truth.abs().max().item())


def test_the_backward_saves_s_and_no_input() -> None:
    own = inputs((64, 128), "cpu", BF16, F32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, s = layer_norm(own[0], 128, own[2], own[3], residual=own[1], dropout_p=0.1)
    large = [t for t in saved if t.numel() >= 64 * 128]
    assert [t.data_ptr() for t in large] == [s.data_ptr()] and y.dtype == BF16


# What is refused

X = torch.zeros(4, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((X.double(), 8), {}, TypeError, r"takes x in .*got torch.float64.*torch's own"),
        ((X, 8, X[0].double()), {}, TypeError, r"takes weight in .*got torch.float64"),
        ((X.int(), 8), {}, TypeError, r"takes x in .*got torch.int32"),
        ((X, 8), {"output_dtype": torch.float64}, TypeError, r"output_dtype=torch.float64"),
        ((X, 7), {}, ValueError, r"normalized_shape \(7,\).*got \(4, 8\)"),
        ((X, ()), {}, ValueError, r"normalized_shape \(\)"),
        ((X, 8, X), {}, ValueError, r"weight of shape \(8,\), got \(4, 8\)"),
        ((X, 8, None, X[0, 1:]), {}, ValueError, r"bias of shape \(8,\), got \(7,\)"),
        ((X, 8), {"residual": X[0]}, ValueError, r"residual of shape \(4, 8\), got \(8,\)"),
        ((X, 8), {"residual": X.to("meta")}, ValueError, r"one device, got x on 'cpu' and residual on 'meta'"),
        ((X, 8), {"dropout_p": 0.5}, ValueError, r"give residual"),
        ((X, 8), {"residual": X, "dropout_p": 1.0}, ValueError, r"p in \[0, 1\)"),
        ((X, 8), {"residual": X, "dropout_p": -0.1}, ValueError, r"p in \[0, 1\)"),
    ],
)
def test_bad_arguments(arguments: Any, options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"(?s)(layer_norm|dropout).*{message}"):
        layer_norm(*arguments, **options)


# What the compiler makes of it


def compiled(
    form: str, architecture: int, x: torch.dtype, stream: torch.dtype, columns: int, p: float, aligned: bool = True
) -> Any:
    """The kernel with residual and both parameters, at a size."""
    wide = torch.promote_types(x, stream)
    types: dict[str, Any] = {"x": x, "residual": stream, "y": x, "s": wide, "dy": x, "ds": wide}
    types |= {"dresidual": stream, "dx": x, "seed": "*i64"}
    types |= dict.fromkeys(("weight", "bias", "statistics", "dweights", "dbiases", "parts", "first", "second"), F32)
    strides = ("x_stride", "residual_stride", "dy_stride", "ds_stride", "s_stride", "columns")
    types |= dict.fromkeys(("rows", "count", *strides), "i32")
    constants: dict[str, Any] = {"COLUMNS": columns, "CENTER": True, "OFFSET": 0.0, "THRESHOLD": drop_threshold(p)}
    if not p:
        constants |= {"seed": None} | ({"dx": None} if x == stream else {})
    kernel, (rows, block, warps) = {
        "forward": (norm_rows.forward_kernel, norm_launch._tile(columns)),
        "backward": (norm_rows.backward_kernel, norm_launch._tile(columns)),
        "long_forward": (norm_long_rows.long_forward_kernel, (1, norm_launch._LONG_BLOCK, norm_launch._LONG_WARPS)),
        "long_backward": (norm_long_rows.long_backward_kernel, (1, norm_launch._LONG_BLOCK, norm_launch._LONG_WARPS)),
        "columns": (norm_long_rows.columns_kernel, norm_launch._COLUMNS_TILE),
        "finish": (norm_rows.finish_kernel, norm_launch._FINISH_TILE),
    }[form]
    constants |= {"ROWS": rows, "BLOCK": block, "STAGES": norm_launch._STAGES}
    dynamic = ("rows", "count", *(() if aligned else strides))
    built = norm_tools.compiled(kernel, architecture, warps, types, constants, dynamic)
    print(form, architecture, x, stream, columns, p, built.registers, "registers", built.shared, "bytes shared")
    return built


#: Of a large and a small row, dtypes, dropout: all on one architecture, one on the others.
VARIANTS = [
    (90, BF16, BF16, 0.0, 1024), (90, F16, F32, 0.1, 1024), (90, F32, F32, 0.1, 1024),
    (90, BF16, BF16, 0.1, 8192), (90, F16, F32, 0.0, 8192), (90, F32, F32, 0.1, 8192),
    (80, F16, F32, 0.1, 4096), (100, F16, F32, 0.1, 4096), (100, BF16, BF16, 0.1, 1024),
]  # fmt: skip


@kernel_tools.compiles
@pytest.mark.parametrize(("architecture", "x", "stream", "p", "columns"), VARIANTS)
@pytest.mark.parametrize("form", ["forward", "backward"])
def test_tiles_are_read_and_written_16_bytes_at_a_time_and_nothing_spills(
    architecture: int, x: torch.dtype, stream: torch.dtype, p: float, form: str, columns: int
) -> None:
    columns *= 2 if form == "forward" and columns == 8192 else 1
    kernel = compiled(form, architecture, x, stream, columns, p)
    assert kernel.spills == 0 and kernel.registers <= (152 if kernel_tools.triton_release() < (3, 8) else 162)
    assert not re.search(r"\b(atom|red)\.", kernel.ptx), "an order of its own every time"
    # Narrow is what a row has once (its statistics, in the backward's loop and before it) or a call (the seed).
    assert len(kernel.narrow()) <= (2 if form == "forward" else 8) + (p > 0)
    narrow = "".join(kernel.narrow())
    assert "b16" not in narrow and "0x2" not in narrow, "no element of a tile by itself"
    assert kernel.shared <= 101376, "what the smallest have"


@kernel_tools.compiles
@pytest.mark.parametrize(
    ("architecture", "x", "stream", "p"), [(90, BF16, BF16, 0.0), (80, F16, F32, 0.1), (100, F32, F32, 0.1)]
)
@pytest.mark.parametrize("form", ["long_forward", "long_backward", "columns", "finish"])
def test_long_rows_spill_nothing(architecture: int, x: torch.dtype, stream: torch.dtype, p: float, form: str) -> None:
    kernel = compiled(form, architecture, x, stream, 131072, p)
    assert kernel.spills == 0 and kernel.registers <= 128
    if form != "columns":  # which reads the statistics of many rows
        assert len(kernel.narrow()) <= 4


@kernel_tools.compiles
@pytest.mark.parametrize("form", ["forward", "backward"])
def test_no_alignment_is_claimed_where_there_is_none(form: str) -> None:
    kernel = compiled(form, 90, F16, F16, 1021, 0.1, aligned=False)
    tile = norm_launch._tile(1021)
    assert kernel.spills == 0
    assert not re.search(r"[ld|st]\.global[.\w:]*\.v\d\.b16|st\.global[.\w:]*v[248]", kernel.ptx)
    assert kernel.moved(*tile[:2]) == ((4, 4) if form == "forward" else (6, 4))


@kernel_tools.compiles
@pytest.mark.parametrize(("x", "stream", "p"), [(BF16, BF16, 0.0), (BF16, F32, 0.0), (F16, F16, 0.1), (F16, F32, 0.1)])
def test_the_bytes_that_are_promised_are_those_of_the_kernels(x: torch.dtype, stream: torch.dtype, p: float) -> None:
    promised = bytes_moved(10_000, 1024, x, residual=stream, dropout=p > 0)
    for form, number in (("forward", promised[0]), ("backward", promised[1])):
        loads, stores = compiled(form, 90, x, stream, 1024, p).moved(*norm_launch._tile(1024)[:2])
        assert number == (loads + stores) * 10_000 * 1024 + 10_000 * 8
    with_parameters = bytes_moved(10_000, 1024, x, residual=stream, parameters=(F32, F32), dropout=p > 0)
    assert (with_parameters[0] - promised[0], with_parameters[1] - promised[1]) == (8 * 1024, 16 * 1024)


def test_bytes_of_a_plain_norm_and_of_long_rows() -> None:
    assert bytes_moved(10, 64, BF16) == (4 * 640 + 80, 6 * 640 + 80)
    assert bytes_moved(10, 64, BF16, y=F32) == (6 * 640 + 80, 8 * 640 + 80)
    long = bytes_moved(1, 16384, BF16, parameters=(F32,))[1] - bytes_moved(1, 16384, BF16)[1]
    assert long == 4 * 16384 + 8 * 16384, "dy and s once more"
