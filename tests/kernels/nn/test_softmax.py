"""softmax: values and gradients as near to float64 as eager's, what it saves, and its masks, dropout and long rows."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernel_tools
from benchmarks.workloads import kernel_bytes
from fxprec.kernels.launch.philox import draw_seeds, keep_mask
from fxprec.kernels.nn import softmax as softmax_file
from fxprec.kernels.nn import softmax_kernels as kernels
from fxprec.kernels.nn.softmax import reference, softmax

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
#: The kernels in Triton's interpreter and on a device, and what runs without Triton.
FORMS = [*kernel_tools.DEVICES, *([] if kernel_tools.INTERPRETING else [pytest.param("cpu", id="plain")])]
every_form = pytest.mark.parametrize("device", FORMS)
SHAPES = [(2, 3, 5, 37), (7, 64), (5, 1), (33,), (2, 300)]
MASKS = [("none", False), ("none", True), ("bool", False), ("bool", True), ("additive", False), ("row", True)]
MASKS += [("column", False)]


def make_mask(kind: str, shape: tuple[int, ...], device: str) -> Tensor | None:
    """A mask of x's shape, or that broadcasts; none of the boolean ones masks a whole row."""
    if kind == "bool":
        mask = torch.rand(shape[-2:] if len(shape) > 1 else shape) > 0.4
        mask[..., 0] = True
        return mask.to(device)
    if kind == "additive":
        return torch.randn(shape).to(device)
    if kind == "row":
        return torch.randn(shape[-1]).to(device, torch.bfloat16)
    if kind == "column" and len(shape) > 1:
        return torch.randn(shape[-2], 1).to(device, torch.float16)
    return None


def eager(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """softmax by eager ops in x's dtype, each rounded."""
    z = x * scale
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask.to(z.dtype)
    if causal:
        z = z.masked_fill(torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).triu(1), -math.inf)
    return torch.softmax(z, dim=-1)


def error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).abs().max().item()


def slack(dtype: torch.dtype) -> float:
    """The relative rounding error of float32; in the interpreter, which cuts what bfloat16 rounds, that of bfloat16."""
    return 2.0 ** (-7 if dtype == torch.bfloat16 and kernel_tools.INTERPRETING else -23)


def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@every_form
@pytest.mark.parametrize(("kind", "causal"), MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_as_near_to_float64_as_eagers(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, causal: bool, device: str
) -> None:
    if causal and len(shape) == 1:
        shape = (1, *shape)
    x = (3 * torch.randn(shape)).to(device, dtype).requires_grad_()
    mask, dy = make_mask(kind, shape, device), torch.randn(shape).to(device, dtype)
    found = softmax(x, scale=0.7, mask=mask, causal=causal)
    assert found.dtype == dtype and found.shape == x.shape and found.is_contiguous()
    low = eager(x, mask, 0.7, causal)
    wide = x.detach().double().requires_grad_()
    exact = eager(wide, mask, 0.7, causal)
    gradients = [torch.autograd.grad(y, v, dy.to(y.dtype))[0] for y, v in ((found, x), (low, x), (exact, wide))]
    assert gradients[0].dtype == dtype
    # A gradient is a difference of terms of the size of y * dy.
    for (ours, eagers, truth), size in (((found, low, exact), 1.0), (gradients, dy.abs().max().item())):
        largest = exact.max().item() * size
        assert error(ours, truth) <= 2 * error(eagers, truth) + slack(dtype) * largest


@every_form
@pytest.mark.parametrize(("dtype", "out"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)])
def test_the_output_has_a_dtype_of_its_own(dtype: torch.dtype, out: torch.dtype, device: str) -> None:
    x = torch.randn(4, 50).to(device, dtype).requires_grad_()
    y = softmax(x, output_dtype=out)
    exact = torch.softmax(x.double(), dim=-1)
    assert y.dtype == out and error(y, exact) <= exact.max().item() * torch.finfo(out).eps
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx.dtype == dtype


@every_form
@pytest.mark.parametrize("shape", [(1, 1, 6, 9), (2, 1, 1, 9), (1, 3, 6, 1), (2, 3, 1, 9), (6, 9), (1,), (3, 1, 9)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_a_mask_broadcasts_by_its_strides(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(2, 3, 6, 9, device=device)
    mask = torch.randn(shape).to(device)
    mask = mask > -0.7 if dtype == torch.bool else mask.to(dtype)
    expected = reference(x, mask, None, 1.0, False, 0.0, torch.float32)
    torch.testing.assert_close(softmax(x, mask=mask), expected, equal_nan=True)
    apart = mask.new_zeros((*shape[:-1], 2 * shape[-1]))[..., ::2].copy_(mask)
    turned = mask.mT.contiguous().mT if mask.dim() > 1 else mask
    for same in (apart, turned):
        torch.testing.assert_close(softmax(x, mask=same), expected, equal_nan=True)


def test_a_mask_is_never_expanded() -> None:
    mask = torch.zeros(2, 1, 1, 9, dtype=torch.bool)
    given, kind, heads, strides = kernels._mask(mask, torch.Size((2, 3, 6, 9)))
    assert given is not None and given.data_ptr() == mask.data_ptr() and given.untyped_storage().nbytes() == 18
    assert (kind, heads, strides) == (kernels._BOOL, 3, (9, 0, 0, 1))


@every_form
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 1), (5,), (2, 1, 1, 5)])
def test_an_additive_mask_has_the_gradient_of_eager(shape: tuple[int, ...], p: float, device: str) -> None:
    x = torch.randn(2, 3, 4, 5, device=device, dtype=torch.float16).requires_grad_()
    mask = torch.randn(shape, device=device).requires_grad_()
    torch.manual_seed(3)
    y = softmax(x, scale=0.0, mask=mask, causal=True, dropout_p=p)  # nothing is divided by the scale
    torch.manual_seed(3)
    seed = draw_seeds(1, x.device) if p else None
    expected = reference(x, mask, seed, 0.0, True, p, torch.float16)
    dy = torch.randn_like(y)
    for found, wanted in zip(
        torch.autograd.grad(y, (x, mask), dy), torch.autograd.grad(expected, (x, mask), dy), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=2e-3)
    (alone,) = torch.autograd.grad(softmax(x.detach(), mask=mask).sum(), mask)
    assert alone.dtype == torch.float32 and alone.shape == shape


@every_form
@pytest.mark.parametrize("p", [0.1, 0.75])
@pytest.mark.parametrize("shape", [(3, 4, 7, 10), (5, 64), (9,)])
def test_dropout_keeps_what_the_seed_says(shape: tuple[int, ...], p: float, device: str) -> None:
    x = torch.randn(shape, device=device, dtype=torch.float16).requires_grad_()
    mask = torch.randn(shape[-1], device=device)
    torch.manual_seed(11)
    y = softmax(x, scale=0.5, mask=mask, dropout_p=p)
    torch.manual_seed(11)
    seed = draw_seeds(1, x.device)
    keep = keep_mask(seed, x.numel() // shape[-1], shape[-1], p).view(shape)
    assert torch.equal(y != 0, keep) and 0 < keep.sum() < keep.numel()
    exact = torch.softmax(x.double() * 0.5 + mask.double(), -1) * keep / (1 - p)
    assert error(y, exact) <= 2.0**-10 * exact.max().item()
    dy = torch.randn_like(y)
    truth, found = torch.autograd.grad(exact, x, dy.double())[0], torch.autograd.grad(y, x, dy)[0]
    assert error(found, truth.double()) <= 2.0**-9 * truth.abs().max().item()


@every_form
def test_dropout_is_off_outside_of_training_and_another_each_time_in_it(device: str) -> None:
    x = torch.randn(8, 32, device=device)
    state = torch.get_rng_state()
    assert torch.equal(softmax(x, dropout_p=0.5, training=False), softmax(x))
    assert torch.equal(state, torch.get_rng_state()), "no seed was drawn"
    first, second = softmax(x, dropout_p=0.5), softmax(x, dropout_p=0.5)
    assert not torch.equal(first == 0, second == 0)


@every_form
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_what_is_not_finite_goes_where_it_goes_in_eager(p: float, device: str) -> None:
    x = torch.randn(6, 20, device=device)
    x[0] = -math.inf
    x[1, 3] = math.nan
    x[2, 4] = math.inf
    x[3, :19] = -math.inf
    x[4, 5] = -math.inf
    expected = torch.softmax(x, -1)
    x.requires_grad_()
    y = softmax(x, dropout_p=p)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(dx.isnan(), expected.isnan())
    assert y.isnan().any(1).tolist() == [True] * 3 + [False] * 3
    if not p:
        torch.testing.assert_close(y, expected, equal_nan=True)
    nowhere = softmax(x.detach(), mask=torch.zeros(20, dtype=torch.bool, device=device), dropout_p=p)
    assert nowhere.isnan().all()
    torch.testing.assert_close(softmax(x.detach(), causal=True)[0].isnan(), torch.ones(20, device=device) > 0)


@every_form
def test_a_causal_mask_reads_nothing_behind_it(device: str) -> None:
    x = torch.randn(40, 50, device=device)
    expected = softmax(x, causal=True)
    x[torch.ones_like(x).triu(1) > 0] = math.nan
    assert torch.equal(softmax(x, causal=True), expected)
    assert expected[0].tolist() == [1.0] + [0.0] * 49


@every_form
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_do_not_fit_go_by_blocks(
    causal: bool, p: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = (4 * torch.randn(13, 133)).to(device)
    x[5:9, :64] = -math.inf  # whole blocks of nothing come first
    x[9] = -math.inf
    x[10, 100] = math.inf
    mask, dy = torch.randn(133, device=device), torch.randn(13, 133, device=device)
    results = []
    for whole in (16384, 64):
        monkeypatch.setattr(kernels, "_WHOLE", whole)
        monkeypatch.setattr(kernels, "_PART", 32)
        monkeypatch.setattr(kernels, "_TILE", 32)  # one row a program, so that a causal one stops early
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y = softmax(leaf, scale=0.5, mask=mask, causal=causal, dropout_p=p)
        results.append((y, *torch.autograd.grad(y, leaf, dy)))
    torch.testing.assert_close(results[1], results[0], equal_nan=True)
    assert results[0][0].isnan().sum() == 133 * (5 if causal else 2)


@every_form
def test_a_row_of_20000_columns(device: str) -> None:
    x = torch.randn(2, 20000, device=device).requires_grad_()
    y = softmax(x)
    torch.testing.assert_close(y, torch.softmax(x, -1))
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(torch.softmax(x, -1), x, dy)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), expected, rtol=1e-4, atol=1e-9)


@every_form
def test_strided_and_expanded_tensors(device: str) -> None:
    big = torch.randn(6, 3, 80, device=device)
    for x in (big[:, 1, 5:60], big[:, :, ::3], big[..., 7], big[:1].expand(4, 3, 80), big.mT):
        leaf = x.detach().requires_grad_()
        y = softmax(leaf)
        assert torch.equal(y, softmax(x.contiguous())) and y.is_contiguous()
        weights = torch.randn(x.shape[-1], device=device)
        for dy in (weights.expand(x.shape), torch.randn((*x.shape, 2), device=device)[..., 1]):
            expected = torch.autograd.grad(torch.softmax(leaf, -1), leaf, dy)
            torch.testing.assert_close(torch.autograd.grad(softmax(leaf), leaf, dy), expected)


@every_form
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3, 4)])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_empty_tensors(p: float, shape: tuple[int, ...], device: str) -> None:
    x = torch.zeros(shape, device=device).requires_grad_()
    y = softmax(x, dropout_p=p, mask=torch.zeros(shape, device=device))
    y.sum().backward()
    assert y.shape == shape and x.grad is not None and x.grad.shape == shape


@every_form
def test_the_same_bits_every_time(device: str) -> None:
    x, dy = torch.randn(9, 200, device=device).requires_grad_(), torch.randn(9, 200, device=device)
    runs = []
    for _ in range(2):
        torch.manual_seed(4)
        y = softmax(x, dropout_p=0.3)
        runs.append((y, *torch.autograd.grad(y, x, dy)))
    assert all(kernel_tools.same_bits(a, b) for a, b in zip(*runs, strict=True))


# What autograd and tracers make of it


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_what_is_saved(p: float) -> None:
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    x = torch.randn(4, 6, 32, dtype=torch.bfloat16).requires_grad_()
    mask = torch.ones(32, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = softmax(x, mask=mask, dropout_p=p)
    if p:
        assert [t.data_ptr() for t in saved[:2]] == [x.data_ptr(), mask.data_ptr()]
        assert [(t.shape, t.dtype) for t in saved[2:]] == [((1,), torch.int64), ((2, 24), torch.float32)]
    else:
        assert [t.data_ptr() for t in saved] == [y.data_ptr()]


def cases() -> list[Any]:
    bool_mask, additive = torch.rand(2, 1, 4, 6) > 0.3, torch.randn(4, 6)
    bool_mask[..., 0] = True
    return [{}, {"scale": 0.3, "mask": bool_mask}, {"mask": additive, "causal": True, "output_dtype": torch.float16}]


@pytest.mark.parametrize("case", range(3))
def test_opcheck(case: int) -> None:
    given = {"scale": 1.0, "mask": None, "causal": False, "output_dtype": torch.float32, **cases()[case]}
    scale, mask, causal, dtype = given["scale"], given["mask"], given["causal"], given["output_dtype"]
    x = torch.randn(2, 3, 4, 6, requires_grad=True)
    if mask is not None and mask.dtype != torch.bool:
        mask.requires_grad_()
    torch.library.opcheck(torch.ops.fxprec.softmax.default, (x, mask, scale, causal, dtype))
    y = torch.softmax(x.detach(), -1)
    torch.library.opcheck(torch.ops.fxprec.softmax_backward.default, (y, y, scale, causal, dtype))
    seed = draw_seeds(1, x.device)
    inputs = (x, mask, seed, scale, causal, 0.5, dtype)
    torch.library.opcheck(torch.ops.fxprec.softmax_dropout.default, inputs)
    statistics = softmax_file._SOFTMAX_DROPOUT.launch(*inputs)[1]
    detached = (y, x.detach(), None if mask is None else mask.detach(), seed, statistics, scale, causal, 0.5, scale)
    torch.library.opcheck(torch.ops.fxprec.softmax_dropout_backward.default, (*detached, dtype))


def ops(graph: torch.fx.Graph) -> list[str]:
    return [node.target._opname for node in graph.nodes if getattr(node.target, "namespace", None) == "fxprec"]


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_compile_export_and_checkpoint(p: float) -> None:
    x, mask = torch.randn(2, 3, 4, 6, requires_grad=True), cases()[1]["mask"]

    class Attend(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return softmax(x * 2, scale=0.5, mask=mask, causal=True, dropout_p=p)

    def results(function: Any) -> list[Tensor]:
        torch.manual_seed(7)
        y = function(x)
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    module = Attend()
    expected = results(module)
    assert not p or (expected[0] == 0).sum() > (softmax(x, mask=mask, causal=True) == 0).sum()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled), expected)
    for reentrant in (False, True):
        torch.testing.assert_close(results(lambda x: checkpoint(module, x, use_reentrant=False)), expected)
        leaf = x.detach().requires_grad_()
        torch.manual_seed(7)
        checkpoint(module, leaf, use_reentrant=reentrant).square().sum().backward()
        torch.testing.assert_close(leaf.grad, expected[1])
    program = torch.export.export(module, (x.detach(),))
    assert ops(program.graph) == ["softmax_dropout" if p else "softmax"]
    torch.manual_seed(7)
    torch.testing.assert_close(program.module()(x), expected[0])


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_double_backward_and_func_grad_are_eagers(p: float) -> None:
    x, mask = torch.randn(3, 4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    weight = torch.randn(3, 4, 6, requires_grad=True)

    def ours(x: Tensor, mask: Tensor) -> Tensor:
        torch.manual_seed(2)
        return softmax(x, scale=0.5, mask=mask, causal=True, dropout_p=p)

    def theirs(x: Tensor, mask: Tensor) -> Tensor:
        torch.manual_seed(2)
        seed = draw_seeds(1, x.device) if p else None
        return reference(x, mask, seed, 0.5, True, p, torch.float32)

    def derivatives(function: Any) -> list[Tensor]:
        first = torch.autograd.grad((function(x, mask) * weight).sum(), (x, mask), create_graph=True)
        total = first[0].square().sum() + first[1].sin().sum()
        return [*first, *torch.autograd.grad(total, (x, mask, weight))]

    torch.testing.assert_close(derivatives(ours), derivatives(theirs))
    both = [torch.func.grad(lambda x, m, f=f: (f(x, m) * weight).sum(), (0, 1))(x, mask) for f in (ours, theirs)]
    torch.testing.assert_close(*both)


# Errors and figures


def test_bad_inputs_are_refused() -> None:
    x = torch.randn(2, 3, 4, 6)
    for bad, out in ((x.double(), None), (x, torch.float64)):
        with pytest.raises(TypeError, match=r"computes in float32\. Use torch.softmax"):
            softmax(bad, output_dtype=out)
    with pytest.raises(TypeError, match=r"mask of bool.*got torch.int64"):
        softmax(x, mask=torch.ones(6, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"mask of bool.*got torch.float64"):
        softmax(x, mask=torch.ones(6).double())
    for shape in [(5,), (3, 6), (1, 2, 3, 4, 6), (2, 2, 4, 6)]:
        with pytest.raises(ValueError, match=r"does not broadcast to x's \(2, 3, 4, 6\)"):
            softmax(x, mask=torch.ones(shape))
    with pytest.raises(ValueError, match="at most 4 dimensions, got 5"):
        softmax(x[None], mask=torch.ones(6))
    with pytest.raises(ValueError, match="move the mask"):
        softmax(x, mask=torch.ones(6, device="meta"))
    with pytest.raises(ValueError, match="2 or more dimensions, got 1"):
        softmax(x[0, 0, 0], causal=True)
    with pytest.raises(ValueError, match="1 or more dimensions, got 0"):
        softmax(torch.tensor(1.0))
    for p in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"p in \[0, 1\)"):
            softmax(x, dropout_p=p)


def test_the_bytes_that_move() -> None:
    x = torch.empty(2, 3, 8, 16, dtype=torch.bfloat16)
    n = x.numel()
    assert kernel_bytes.softmax(x) == (4 * n, 6 * n)
    assert kernel_bytes.softmax(x, output_dtype=torch.float32) == (6 * n, 10 * n)
    mask = torch.empty(8, 16, dtype=torch.bool)
    assert kernel_bytes.softmax(x, mask=mask, dropout_p=0.1) == (4 * n + 128, 6 * n + 128)
    seen = 6 * (8 * 9 // 2)
    assert kernel_bytes.softmax(x, causal=True) == (2 * seen + 2 * n, 4 * seen + 2 * n)


# What the compiler makes of it

_TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
_INTEGERS = "rows columns queries heads x_row dy_row mask_b mask_h mask_q mask_k"
#: name: (columns, form of the mask, causal, dropout)
VARIANTS = {
    "short": (64, kernels._NONE, False, False),
    "training": (1024, kernels._ADDITIVE, True, True),
    "whole": (16384, kernels._BOOL, False, True),
    "loop": (20000, kernels._ADDITIVE, True, True),
    "plain loop": (20000, kernels._NONE, True, False),
}


@kernel_tools.compiles
@pytest.mark.parametrize(
    ("architecture", "dtype", "variant"),
    [
        *[(90, dtype, variant) for dtype in ("bfloat16", "float32") for variant in VARIANTS],
        *[(architecture, "bfloat16", variant) for architecture in (80, 100) for variant in ("short", "training")],
    ],
)
def test_the_kernels_move_16_bytes_at_a_time_and_spill_nothing(
    architecture: int, dtype: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton.compiler

    columns, mask, causal, dropout = VARIANTS[variant]
    shape = kernels._shape(4096, columns)[1]
    element = _TYPES[dtype]
    types = {**dict.fromkeys(_INTEGERS.split(), "i32"), **dict.fromkeys(("x", "y", "dy", "dx"), element)}
    types |= {"mask": "*u8" if mask == kernels._BOOL else element, "seed": "*i64", "statistics": "*fp32"}
    constants: dict[str, Any] = {"MASK": mask, "CAUSAL": causal, "THRESHOLD": 1 << 28 if dropout else 0}
    constants |= {name: shape[name] for name in ("ROWS", "BLOCK", "LOOP")}
    constants |= {"mask_k": 1} if mask else {"mask": None}
    constants |= {} if dropout else {"seed": None, "statistics": None}
    source = triton.compiler.ASTSource
    for kernel, absent in ((kernels.softmax_kernel, ()), (kernels.backward_kernel, ("y",) if dropout else ("x",))):
        names = [*"x y dy dx mask statistics columns x_row dy_row mask_b mask_h mask_q".split()]
        attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in names}
        monkeypatch.setattr(triton.compiler, "ASTSource", functools.partial(source, attrs=attrs))
        built = kernel_tools.compiled(
            kernel, architecture, shape["num_warps"], types, constants | dict.fromkeys(absent)
        )
        print(f"{kernel.__name__} {variant} {dtype} sm_{architecture}: {built.registers} registers")
        assert built.spills == 0 and built.registers <= 168
        widths = re.findall(r"(?:ld|st)\.global\.(\S+)", built.ptx)
        # What is no 16 bytes is a number a row (statistics) or the seed.
        single = [width for width in widths if width not in ("v4.b32", "v8.b32")]
        assert set(single) <= ({"b32", "b64", "v2.b32"} if dropout else set())
        assert len(single) <= (6 if dropout else 0) and len(widths) > len(single)
