"""rope and rope_qk: every layout, both kinds of pairs, partial rotation; the backward turns back, as often as asked."""

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
from fxprec.kernels.nn import rope as rope_file
from fxprec.kernels.nn.rope import reference, rope, rope_qk

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
#: The kernel in Triton's interpreter and on a device, and what runs without Triton.
FORMS = [*kernel_tools.DEVICES, *([] if kernel_tools.INTERPRETING else [pytest.param("cpu", id="plain")])]
every_form = pytest.mark.parametrize("device", FORMS)
every_pair = pytest.mark.parametrize("interleaved", [False, True])
#: D, columns of cos, rotary_dim, and what turns
WIDTHS = [(8, 8, None, 8), (8, 4, None, 8), (12, 6, 6, 6), (20, 8, None, 8), (10, 3, 6, 6), (2, 1, None, 2)]


def table(
    positions: int, rotary: int, width: int, interleaved: bool, batch: int | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin as models make them: one entry a pair, repeated where cos is as wide as what turns."""
    steps = torch.arange(positions) if batch is None else torch.arange(batch)[:, None] * 3 + torch.arange(positions)
    angle = steps[..., None] * 10.0 ** -(torch.arange(rotary // 2) / (rotary // 2))
    if width == rotary:
        angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor, rotary: int, interleaved: bool) -> Tensor:
    """By complex numbers, in float64: an account of its own of what rope does."""
    c, s = cos.double(), sin.double()
    if c.shape[-1] == rotary:
        c, s = (t[..., ::2] if interleaved else t[..., : rotary // 2] for t in (c, s))
    if c.dim() == 3 and x.dim() == 4:
        c, s = c[:, None], s[:, None]
    a = x[..., :rotary].double()
    pairs = a.unflatten(-1, (-1, 2)) if interleaved else a.unflatten(-1, (2, -1)).mT
    result = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(c, s))
    flat = result.flatten(-2) if interleaved else result.mT.flatten(-2)
    return torch.cat((flat, x[..., rotary:].double()), dim=-1)


def eager(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As models write it, in x's dtype; x is as wide as cos."""
    if interleaved:
        half = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        half = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)
    return x * cos.to(x.dtype) + half * sin.to(x.dtype)


def error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).abs().max().item()


def slack(dtype: torch.dtype) -> float:
    """Twice a relative rounding error of the dtype."""
    return {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@every_form
@pytest.mark.parametrize("batched", [None, 1, 2])
@pytest.mark.parametrize("widths", WIDTHS)
@every_pair
def test_pairs_turn_by_their_angles(
    interleaved: bool, widths: tuple[int, int, int | None, int], batched: int | None, device: str
) -> None:
    dim, width, rotary_dim, rotary = widths
    cos, sin = (t.to(device) for t in table(5, rotary, width, interleaved, batched))
    for dtype, shape in ((torch.float32, (2, 3, 5, dim)), (torch.float16, (2, 5, dim)), (torch.bfloat16, (5, dim))):
        if batched is not None and len(shape) == 2:
            continue
        x = torch.randn(shape).to(device, dtype).requires_grad_()
        y = rope(x, cos, sin, interleaved=interleaved, rotary_dim=rotary_dim)
        exact = turned(x.detach(), cos, sin, rotary, interleaved)
        assert y.dtype == dtype and y.shape == shape
        assert error(y, exact) <= slack(dtype) * x.abs().max().item() * 2**0.5
        assert torch.equal(y[..., rotary:], x[..., rotary:])
        dy = torch.randn(shape).to(device, dtype)
        (dx,) = torch.autograd.grad(y, x, dy)
        back = turned(dy, cos, -sin, rotary, interleaved)
        assert dx.dtype == dtype and error(dx, back) <= slack(dtype) * dy.abs().max().item() * 2**0.5


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16])
@every_pair
def test_values_and_gradients_are_as_near_to_float64_as_eagers(
    interleaved: bool, tables: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    cos, sin = (t.to(device, tables) for t in table(17, 24, 24, interleaved))
    x = torch.randn(2, 3, 17, 24).to(device, dtype).requires_grad_()
    dy = torch.randn(2, 3, 17, 24).to(device, dtype)
    low = eager(x, cos, sin, interleaved)
    wide = x.detach().double().requires_grad_()
    exact = eager(wide, cos.double(), sin.double(), interleaved)
    found = rope(x, cos, sin, interleaved=interleaved)
    gradients = [torch.autograd.grad(y, v, dy.to(y.dtype))[0] for y, v in ((found, x), (low, x), (exact, wide))]
    for ours, eagers, truth in ((found, low, exact), gradients):
        cut = dtype == torch.bfloat16 and kernel_tools.INTERPRETING  # it cuts what bfloat16 rounds
        assert error(ours, truth) <= 2 * error(eagers, truth) + 2.0 ** (-7 if cut else -22) * truth.abs().max().item()


@every_form
@every_pair
def test_the_two_columns_of_a_pair_may_have_entries_of_their_own(interleaved: bool, device: str) -> None:
    cos, sin = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)
    x = torch.randn(2, 4, 6, device=device).requires_grad_()
    y, expected = rope(x, cos, sin, interleaved=interleaved), eager(x, cos, sin, interleaved)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy))


@every_form
@every_pair
def test_any_layout_comes_back_in_its_own(interleaved: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_file, "_PROGRAMS", 1)  # one program goes over all heads
    cos, sin = (t.to(device) for t in table(5, 8, 4, interleaved, 2))
    packed = torch.randn(2, 5, 3, 3, 8, device=device)  # a projection of q, k and v
    layouts = {
        "transposed": (torch.randn(2, 5, 3, 8, device=device).transpose(1, 2), (120, 8, 24, 1)),
        "heads last": (torch.randn(5, 3, 2, 8, device=device).permute(2, 1, 0, 3), (8, 16, 48, 1)),
        "a part": (packed[:, :, 1].transpose(1, 2), (120, 8, 24, 1)),
        "expanded": (torch.randn(2, 1, 5, 8, device=device).expand(2, 3, 5, 8), None),
        "columns apart": (torch.randn(2, 3, 5, 16, device=device)[..., ::2], None),
        "columns first": (torch.randn(2, 3, 8, 5, device=device).mT, (120, 40, 1, 5)),
    }
    for name, (x, strides) in layouts.items():
        y = rope(x, cos, sin, interleaved=interleaved)
        assert y.stride() == torch.empty_like(x).stride(), name
        assert strides is None or y.stride() == strides, name
        torch.testing.assert_close(y.double(), turned(x, cos, sin, 8, interleaved), rtol=1e-5, atol=1e-5, msg=name)
        leaf = x.detach().requires_grad_()
        dy = torch.randn(2, 5, 3, 8, device=device).transpose(1, 2)
        for grad in (dy, dy[:1, :1].expand(2, 3, 5, 8)):
            (dx,) = torch.autograd.grad(rope(leaf, cos, sin, interleaved=interleaved), leaf, grad)
            torch.testing.assert_close(dx.double(), turned(grad, cos, -sin, 8, interleaved), rtol=1e-5, atol=1e-5)
    apart = torch.stack((cos, sin), dim=-1)
    again = rope(packed[:, :, 0].transpose(1, 2), apart[..., 0], apart[..., 1], interleaved=interleaved)
    assert torch.equal(again, rope(packed[:, :, 0].transpose(1, 2), cos, sin, interleaved=interleaved))


@every_form
@pytest.mark.parametrize("programs", [1, 528, 10**6])
@pytest.mark.parametrize("heads", [(4, 1), (3, 8), (2, 2)])
def test_queries_and_keys_in_one_launch_are_the_two_apart(
    heads: tuple[int, int], programs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope_file, "_PROGRAMS", programs)  # how the heads are spread over programs
    cos, sin = (t.to(device) for t in table(70, 32, 16, False))
    q = torch.randn(2, 70, heads[0], 40, device=device).transpose(1, 2).requires_grad_()
    k = torch.randn(2, heads[1], 71, 40, device=device).half()[:, :, 1:].requires_grad_()
    both = rope_qk(q, k, cos, sin, rotary_dim=32)
    apart = rope(q, cos, sin, rotary_dim=32), rope(k, cos, sin, rotary_dim=32)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(both, apart, strict=True))
    torch.testing.assert_close(both[0].double(), turned(q.detach(), cos, sin, 32, False), rtol=1e-5, atol=1e-5)
    grads = tuple(torch.randn_like(y) for y in both)
    found, expected = (torch.autograd.grad(ys, (q, k), grads) for ys in (both, apart))
    assert all(kernel_tools.same_bits(a, b) for a, b in zip(found, expected, strict=True))
    (alone,) = torch.autograd.grad(rope_qk(q, k, cos, sin, rotary_dim=32)[1], k, grads[1])
    assert torch.equal(alone, expected[1]), "and only one of them is used"


@every_form
@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8)])
def test_empty_tensors(shape: tuple[int, ...], device: str) -> None:
    cos, sin = (t.to(device) for t in table(shape[2], 8, 8, False))
    x = torch.zeros(shape, device=device).requires_grad_()
    rope(x, cos, sin).sum().backward()
    assert x.grad is not None and x.grad.shape == shape


@every_form
def test_nan_and_inf_reach_their_pair_only(device: str) -> None:
    cos, sin = (t.to(device) for t in table(4, 8, 8, False))
    x = torch.randn(3, 4, 8, device=device)
    x[0, 1, 2], x[1, 2, 7] = math.nan, math.inf
    torch.testing.assert_close(rope(x, cos, sin), eager(x, cos, sin, False), equal_nan=True)
    assert (~rope(x, cos, sin).isfinite()).nonzero().tolist() == [[0, 1, 2], [0, 1, 6], [1, 2, 3], [1, 2, 7]]


# What autograd and tracers make of it


def test_only_cos_and_sin_are_saved() -> None:
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.data_ptr())
        return x

    cos, sin = table(5, 8, 8, False)
    q, k = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(2, 1, 5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        rope(q, cos, sin)
        rope_qk(q, k, cos, sin)
    assert saved == [cos.data_ptr(), sin.data_ptr()] * 2


@every_pair
@pytest.mark.parametrize("inverse", [False, True])
def test_opcheck(interleaved: bool, inverse: bool) -> None:
    cos, sin = table(5, 6, 6, interleaved, 1)
    q = torch.randn(2, 5, 3, 8).transpose(1, 2).requires_grad_()
    k = torch.randn(2, 1, 5, 8, dtype=torch.float16, requires_grad=True)
    torch.library.opcheck(torch.ops.fxprec.rope.default, (q, cos, sin, 6, interleaved, inverse, False))
    torch.library.opcheck(torch.ops.fxprec.rope_qk.default, (q, k, cos, sin, 6, interleaved, inverse, False))


def ops(graph: torch.fx.Graph) -> list[str]:
    return [node.target._opname for node in graph.nodes if getattr(node.target, "namespace", None) == "fxprec"]


def test_compile_export_and_checkpoint() -> None:
    cos, sin = table(5, 8, 4, False)
    x = torch.randn(2, 5, 3, 8, requires_grad=True)

    class Scores(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k = rope_qk(x.transpose(1, 2), x[:, :, :1].transpose(1, 2), cos, sin)
            return q @ k.mT + rope(2 * x.transpose(1, 2), cos, sin, interleaved=True).sum()

    def results(function: Any) -> list[Tensor]:
        y = function(x)
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    module = Scores()
    expected = results(module)
    torch.testing.assert_close(results(torch.compile(module, fullgraph=True, backend="aot_eager")), expected)
    torch.testing.assert_close(results(lambda x: checkpoint(module, x, use_reentrant=False)), expected)
    leaf = x.detach().requires_grad_()
    checkpoint(module, leaf, use_reentrant=True).square().sum().backward()
    torch.testing.assert_close(leaf.grad, expected[1])
    program = torch.export.export(module, (x.detach(),))
    assert sorted(ops(program.graph)) == ["rope", "rope_qk"]
    torch.testing.assert_close(program.module()(x), expected[0])


@every_pair
def test_double_backward_and_func_grad_are_eagers(interleaved: bool) -> None:
    cos, sin = table(5, 8, 8, interleaved)
    q, k = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 5, 8, requires_grad=True)
    weight = torch.randn(2, 5, 8, requires_grad=True)

    def ours(q: Tensor, k: Tensor) -> Tensor:
        a, b = rope_qk(q, k, cos, sin, interleaved=interleaved)
        return a.square() * b * rope(q, cos, sin, interleaved=interleaved)

    def theirs(q: Tensor, k: Tensor) -> Tensor:
        a, b = eager(q, cos, sin, interleaved), eager(k, cos, sin, interleaved)
        return a.square() * b * a

    def derivatives(function: Any) -> list[Tensor]:
        first = torch.autograd.grad((function(q, k) * weight).sum(), (q, k), create_graph=True)
        second = torch.autograd.grad(torch.stack(first).square().sum(), (q, k, weight), create_graph=True)
        third = torch.autograd.grad(torch.stack(second).square().sum(), (q, k, weight))
        return [*first, *second, *third]

    torch.testing.assert_close(derivatives(ours), derivatives(theirs), rtol=1e-4, atol=1e-3)
    both = [torch.func.grad(lambda q, k, f=f: (f(q, k) * weight).sum(), (0, 1))(q, k) for f in (ours, theirs)]
    torch.testing.assert_close(*both)


# Errors and figures


def test_bad_inputs_are_refused() -> None:
    cos, sin = table(5, 8, 8, False)
    x = torch.randn(2, 3, 5, 8)
    with pytest.raises(TypeError, match=r"got torch.float64"):
        rope(x.double(), cos, sin)
    with pytest.raises(TypeError, match=r"got torch.float64"):
        rope(x, cos.double(), sin)
    with pytest.raises(ValueError, match="takes tensors of one device"):
        rope(x, cos.to("meta"), sin)
    for c, s in ((cos.clone().requires_grad_(), sin), (cos, sin.clone().requires_grad_())):
        with pytest.raises(ValueError, match="no gradient of cos and sin: detach them"):
            rope(x, c, s)
        with torch.no_grad():
            assert torch.equal(rope(x, c, s), rope(x, cos, sin))
    for bad in (x[0, 0, 0], x[None]):
        with pytest.raises(ValueError, match=r"takes \[B, H, T, D\]"):
            rope(bad, cos, sin)
    for c, s in ((cos[:4], sin[:4]), (cos, sin[:, :4]), (cos[0], sin[0]), (cos[None, None], sin[None, None])):
        with pytest.raises(ValueError, match=r"with T = 5, as in \(2, 3, 5, 8\)"):
            rope(x, c, s)
    for bad, c in ((x, cos.expand(3, 5, 8)), (x[0, 0], cos[None])):
        with pytest.raises(ValueError, match="does not broadcast"):
            rope(bad, c, c)
    for width, rotary in ((8, 6), (3, None), (8, 16), (2, 8), (0, None), (4, 10)):
        with pytest.raises(ValueError, match=rf"cos has {width} columns"):
            rope(x, cos[:, :width], sin[:, :width], rotary_dim=rotary)
    for k in (x[:1], x[..., :6], x[0], x[:, :, :4]):
        with pytest.raises(ValueError, match="differ in heads only"):
            rope_qk(x, k, cos, sin)


def test_the_bytes_that_move() -> None:
    cos = torch.empty(5, 4)
    q, k = torch.empty(2, 3, 5, 8, dtype=torch.bfloat16), torch.empty(2, 1, 5, 8)
    assert kernel_bytes.rope(q, cos=cos, sin=cos) == 4 * 240 + 160
    assert kernel_bytes.rope(q, k, cos=cos, sin=cos) == 4 * 240 + 8 * 80 + 160


def test_the_reference_is_the_rotation() -> None:
    cos, sin = table(5, 6, 3, True)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(
        reference(x, cos, sin, 6, True).double(), turned(x, cos, sin, 6, True), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(reference(reference(x, cos, sin, 6), cos, sin, 6, inverse=True), x)


# What the compiler makes of it

#: D, rotary, cos as wide as that, interleaved, with keys
VARIANTS = [
    (128, 128, True, False, True),
    (64, 64, False, False, False),
    (128, 128, False, True, True),
    (128, 128, True, True, False),
    (80, 32, True, False, True),
]


@kernel_tools.compiles
@pytest.mark.parametrize(
    ("architecture", "element", "variant"),
    [
        *[(90, element, variant) for element in ("bf16", "fp32") for variant in VARIANTS],
        *[(architecture, "bf16", VARIANTS[0]) for architecture in (80, 100)],
    ],
)
def test_the_kernel_moves_16_bytes_at_a_time_and_spills_nothing(
    architecture: int, element: str, variant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton.compiler

    dim, rotary, wide, interleaved, keys = variant
    names = rope_file.rope_kernel.arg_names
    strides = [name for name in names if re.fullmatch(r"(q|qo|k|ko|cos|sin)_[bht]", name)]
    types = dict.fromkeys([*strides, *rope_file._ANY], "i32")
    types |= dict.fromkeys(("q", "q_out", "k", "k_out"), f"*{element}") | {"cos": "*fp32", "sin": "*fp32"}
    constants = rope_file._shape(4096, dim, rotary)
    constants |= {"HALF": rotary // 2, "DIM": dim, "WIDE": wide, "INTERLEAVED": interleaved, "INVERSE": False}
    constants |= {} if keys else {"k": None, "k_out": None}
    aligned = {*types} - {*rope_file._ANY}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned}
    monkeypatch.setattr(triton.compiler, "ASTSource", functools.partial(triton.compiler.ASTSource, attrs=attrs))
    built = kernel_tools.compiled(rope_file.rope_kernel, architecture, rope_file._WARPS, types, constants)
    print(f"rope_kernel {variant} {element} sm_{architecture}: {built.registers} registers")
    assert built.spills == 0 and built.registers <= 128
    widths = set(re.findall(r"(?:ld|st)\.global\.(\S+)", built.ptx))
    # Of 16 pairs a row, a warp's share of one half is 8 bytes a thread.
    assert widths <= ({"v4.b32", "v8.b32"} if rotary > 32 else {"v4.b32", "v8.b32", "v2.b32"})
    assert "v4.b32" in widths
