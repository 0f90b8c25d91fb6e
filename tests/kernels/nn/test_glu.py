"""swiglu and geglu: values and gradients as near to float64 as eager's, of two tensors and of one that holds both."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import kernel_tools
from benchmarks.workloads import kernel_bytes
from fxprec.kernels.nn import glu
from fxprec.kernels.nn.glu import geglu, geglu_packed, swiglu, swiglu_packed

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
#: The kernels in Triton's interpreter and on a device, and what runs without Triton.
FORMS = [*kernel_tools.DEVICES, *([] if kernel_tools.INTERPRETING else [pytest.param("cpu", id="plain")])]
every_form = pytest.mark.parametrize("device", FORMS)
SHAPES = [(5, 37), (3, 2, 64), (7,), (2, 2100), (3, 1), ()]
Two = Callable[[Tensor, Tensor], Tensor]


def tanh_geglu(gate: Tensor, up: Tensor) -> Tensor:
    return geglu(gate, up, "tanh")


def tanh_geglu_packed(x: Tensor) -> Tensor:
    return geglu_packed(x, approximate="tanh")


#: name: (of two tensors, of one, the activation in torch)
KINDS: dict[str, tuple[Two, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (swiglu, swiglu_packed, functional.silu),
    "gelu": (geglu, geglu_packed, functional.gelu),
    "gelu_tanh": (tanh_geglu, tanh_geglu_packed, functools.partial(functional.gelu, approximate="tanh")),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def packed(function: Callable[[Tensor], Tensor]) -> Two:
    return lambda gate, up: function(torch.cat((gate, up), dim=-1))


def error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).abs().max().item()


def slack(exact: Tensor, dtype: torch.dtype) -> float:
    """A unit in the last place of float32; in the interpreter, which cuts what bfloat16 rounds, one of bfloat16."""
    cut = dtype == torch.bfloat16 and kernel_tools.INTERPRETING
    return exact.abs().max().item() * 2.0 ** (-7 if cut else -22)


def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
@every_kind
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_as_near_to_float64_as_eagers(
    shape: tuple[int, ...], kind: str, dtype: torch.dtype, device: str
) -> None:
    two, one, activation = KINDS[kind]
    gate, up = ((3 * torch.randn(shape)).to(device, dtype).requires_grad_() for _ in range(2))
    dy = torch.randn(shape).to(device, dtype)
    low = activation(gate) * up
    wide = [t.detach().double().requires_grad_() for t in (gate, up)]
    exact = activation(wide[0]) * wide[1]
    eagers = [low, *torch.autograd.grad(low, (gate, up), dy)]
    truths = [exact, *torch.autograd.grad(exact, wide, dy.double())]
    for form in (two, packed(one)) if shape else (two,):
        found = form(gate, up)
        assert found.dtype == dtype and found.shape == gate.shape and found.is_contiguous()
        ours = [found, *torch.autograd.grad(found, (gate, up), dy)]
        for a, b, truth in zip(ours, eagers, truths, strict=True):
            assert a.dtype == dtype
            assert error(a, truth) <= 2 * error(b, truth) + slack(truth, dtype)


@every_form
@every_kind
def test_far_from_zero_and_near_it(kind: str, device: str) -> None:
    two, _, activation = KINDS[kind]
    values = [0.0, -0.0, 1e-30, -1e-30, 1e-4, -1e-4, 4.0, -4.0, 13.0, -13.0, 88.0, -88.0, 200.0, -200.0, 1e4, -1e4]
    gate = torch.tensor(values, device=device).requires_grad_()
    up = torch.ones_like(gate)
    wide = gate.detach().double().requires_grad_()
    y, exact = two(gate, up), activation(wide)
    (found,), (truth,) = torch.autograd.grad(y.sum(), gate), torch.autograd.grad(exact.sum(), wide)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-6)
    # 0 * a half is a zero of the same sign; in torch's own gelu on a CPU that depends on its instructions.
    own = activation(gate.detach())[:2].signbit().cpu() if device == "cpu" and not kernel_tools.INTERPRETING else None
    assert torch.equal(y.signbit()[:2].cpu(), torch.tensor([False, True]) if own is None else own)


@every_form
@every_kind
def test_what_is_not_finite_goes_where_it_goes_in_eager(kind: str, device: str) -> None:
    two, _, activation = KINDS[kind]
    first = 2.0 if kind == "gelu" else math.inf  # torch's gelu of inf is NaN on a CPU
    gate = torch.tensor([first, -math.inf, math.nan, 1.0, 1.0, 0.0], device=device).requires_grad_()
    up = torch.tensor([1.0, 1.0, 1.0, math.inf, math.nan, -math.inf], device=device).requires_grad_()
    y, expected = two(gate, up), activation(gate) * up
    torch.testing.assert_close(y, expected, equal_nan=True)
    dy = torch.ones_like(y)
    for a, b in zip(torch.autograd.grad(y, (gate, up), dy), torch.autograd.grad(expected, (gate, up), dy), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@every_form
@pytest.mark.parametrize(("gate", "up"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float16)])
def test_two_dtypes_are_promoted(gate: torch.dtype, up: torch.dtype, device: str) -> None:
    g, u = (torch.randn(4, 33).to(device, dtype).requires_grad_() for dtype in (gate, up))
    y = swiglu(g, u)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, functional.silu(g.float()) * u.float())
    dg, du = torch.autograd.grad(y.sum(), (g, u))
    assert (dg.dtype, du.dtype) == (gate, up)


@every_form
def test_rows_of_any_stride(device: str) -> None:
    big = torch.randn(6, 3, 140, device=device)
    halves = big[..., :70], big[..., 70:]
    for gate, up in (halves, (halves[1][:, 1], halves[0].transpose(0, 1)[2]), (big[..., ::2], halves[0]),
                     (big.mT, big.mT.contiguous()), (big[:1].expand(6, 3, 140), big)):  # fmt: skip
        leaves = [t.detach().requires_grad_() for t in (gate, up)]
        y = swiglu(*leaves)
        expected = functional.silu(leaves[0]) * leaves[1]
        torch.testing.assert_close(y, expected)
        for dy in (torch.randn(y.shape[-1], device=device).expand(y.shape), torch.randn_like(y.mT).mT):
            torch.testing.assert_close(
                torch.autograd.grad(swiglu(*leaves), leaves, dy), torch.autograd.grad(expected, leaves, dy, True)
            )
    x = big[:, 1, 10:110].requires_grad_()
    torch.testing.assert_close(geglu_packed(x), functional.gelu(x[:, :50]) * x[:, 50:])


@every_form
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_empty_tensors(shape: tuple[int, ...], device: str) -> None:
    x = torch.zeros(shape, device=device).requires_grad_()
    for y in (swiglu(x, x), geglu_packed(x)):
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.shape == shape
    assert geglu_packed(x).shape == (*shape[:-1], shape[-1] // 2)


@every_form
def test_the_packed_gradient_is_one_tensor_written_once(device: str) -> None:
    x, dy = torch.randn(5, 46, device=device).requires_grad_(), torch.randn(5, 23, device=device)
    (dx,) = torch.autograd.grad(swiglu_packed(x), x, dy)
    gate, up = (t.contiguous() for t in x.detach().chunk(2, dim=-1))
    dgate, dup = glu._GLU_BACKWARD(dy, gate, up, "silu")
    assert dx.is_contiguous()
    torch.testing.assert_close(dx, torch.cat((dgate, dup), dim=-1))
    again = torch.autograd.grad(swiglu_packed(x), x, dy)[0]
    assert kernel_tools.same_bits(dx, again)


# What autograd and tracers make of it


def test_only_the_inputs_are_saved() -> None:
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.data_ptr())
        return x

    gate, up, x = (torch.randn(4, 6).requires_grad_() for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        swiglu(gate, up)
        geglu_packed(x)
    assert saved == [gate.data_ptr(), up.data_ptr(), x.data_ptr()]


@every_kind
def test_opcheck(kind: str) -> None:
    gate, up, x = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 8)
    dy = torch.randn(3, 4)
    torch.library.opcheck(torch.ops.fxprec.glu_backward.default, (dy, gate, up, kind))
    torch.library.opcheck(torch.ops.fxprec.glu_packed_backward.default, (dy, x, kind))
    torch.library.opcheck(torch.ops.fxprec.glu.default, (gate.requires_grad_(), up.requires_grad_(), kind))
    torch.library.opcheck(torch.ops.fxprec.glu.default, (gate.half(), up[:, :4], kind))
    torch.library.opcheck(torch.ops.fxprec.glu_packed.default, (x.requires_grad_(), kind))


def ops(graph: torch.fx.Graph) -> list[str]:
    return [node.target._opname for node in graph.nodes if getattr(node.target, "namespace", None) == "fxprec"]


def test_compile_export_and_checkpoint() -> None:
    x = torch.randn(3, 8, requires_grad=True)

    class Gated(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return swiglu(*(2 * x).chunk(2, dim=-1)) + tanh_geglu_packed(x)

    def results(function: Any) -> list[Tensor]:
        y = function(x)
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    module = Gated()
    expected = results(module)
    eager = functional.silu(2 * x[:, :4]) * 2 * x[:, 4:] + functional.gelu(x[:, :4], approximate="tanh") * x[:, 4:]
    torch.testing.assert_close(expected, [eager, *torch.autograd.grad(eager.square().sum(), x)])
    torch.testing.assert_close(results(torch.compile(module, fullgraph=True, backend="aot_eager")), expected)
    torch.testing.assert_close(results(lambda x: checkpoint(module, x, use_reentrant=False)), expected)
    leaf = x.detach().requires_grad_()
    checkpoint(module, leaf, use_reentrant=True).square().sum().backward()
    torch.testing.assert_close(leaf.grad, expected[1])
    program = torch.export.export(module, (x.detach(),))
    assert sorted(ops(program.graph)) == ["glu", "glu_packed"]
    torch.testing.assert_close(program.module()(x), expected[0])


@every_kind
def test_double_backward_and_func_grad_are_eagers(kind: str) -> None:
    two, one, activation = KINDS[kind]
    gate, up, weight = (torch.randn(3, 4, requires_grad=True) for _ in range(3))

    def derivatives(function: Two) -> list[Tensor]:
        first = torch.autograd.grad((function(gate, up) * weight).sum(), (gate, up), create_graph=True)
        return [*first, *torch.autograd.grad(torch.stack(first).square().sum(), (gate, up, weight))]

    def eager(gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate) * up

    def transformed(function: Two) -> Any:
        return torch.func.grad(lambda g, u: (function(g, u) * weight).sum(), (0, 1))(gate, up)

    for function in (two, packed(one)):
        torch.testing.assert_close(derivatives(function), derivatives(eager))
        torch.testing.assert_close(transformed(function), transformed(eager))
    (second,) = torch.autograd.grad(torch.autograd.grad(two(gate, gate).sum(), gate, create_graph=True)[0].sum(), gate)
    (truth,) = torch.autograd.grad(torch.autograd.grad(eager(gate, gate).sum(), gate, create_graph=True)[0].sum(), gate)
    torch.testing.assert_close(second, truth)


# Errors and figures


def test_bad_inputs_are_refused() -> None:
    x = torch.randn(3, 4)
    for call in (lambda: swiglu(x.double(), x), lambda: geglu(x, x.int()), lambda: swiglu_packed(x.double())):
        with pytest.raises(TypeError, match="in float32, float16 or bfloat16, got torch"):
            call()
    with pytest.raises(ValueError, match=r"swiglu takes gate and up of one shape.*\(3, 4\).*\(4,\)"):
        swiglu(x, x[0])
    with pytest.raises(ValueError, match=r"one device.*meta"):
        geglu(x, x.to("meta"))
    for bad in (x[:, :3], x[0, 0]):
        with pytest.raises(ValueError, match="last dimension holds gate and up"):
            geglu_packed(bad)
    for call in (lambda: geglu(x, x, "sigmoid"), lambda: geglu_packed(x, "sigmoid")):
        with pytest.raises(ValueError, match='"none" or "tanh", got \'sigmoid\''):
            call()


def test_the_bytes_that_move() -> None:
    low, high = torch.empty(6, 5, dtype=torch.bfloat16), torch.empty(6, 5)
    assert kernel_bytes.glu(low, low) == (6 * 30, 10 * 30)
    assert kernel_bytes.glu(low, high) == ((2 + 4 + 4) * 30, (2 * 6 + 4) * 30)


# What the compiler makes of it


@kernel_tools.compiles
@pytest.mark.parametrize(
    ("architecture", "element", "kind", "columns"),
    [
        *[(90, element, kind, 11008) for element in ("bf16", "fp32") for kind in KINDS],
        *[(architecture, "fp16", "gelu", columns) for architecture in kernel_tools.ARCHITECTURES
          for columns in (48, 1 << 20)],
    ],
)  # fmt: skip
def test_the_kernels_move_16_bytes_at_a_time_and_spill_nothing(
    architecture: int, element: str, kind: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton.compiler

    integers = "rows columns blocks dy_row gate_row up_row out_row".split()
    tensors = "dy gate up out dgate dup".split()
    types = {**dict.fromkeys(integers, "i32"), **dict.fromkeys(tensors, f"*{element}")}
    shape = glu._shape(4096, columns)[2]
    constants = {"KIND": glu._KINDS[kind], "ROWS": shape["ROWS"], "BLOCK": shape["BLOCK"]}
    source = triton.compiler.ASTSource
    for kernel, read, written in ((glu.glu_kernel, 2, 1), (glu.backward_kernel, 3, 2)):
        names = {*tensors, *integers} - {"rows", "blocks"}
        attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in names}
        monkeypatch.setattr(triton.compiler, "ASTSource", functools.partial(source, attrs=attrs))
        built = kernel_tools.compiled(kernel, architecture, shape["num_warps"], types, constants)
        print(f"{kernel.__name__} {kind} {element} sm_{architecture}: {built.registers} registers")
        assert built.spills == 0 and built.registers <= 96
        found = re.findall(r"(ld|st)\.global\.(\S+)", built.ptx)
        assert {width for _, width in found} <= {"v4.b32", "v8.b32"}
        moved = {way: sum(4 * int(width[1]) for w, width in found if w == way) for way in ("ld", "st")}
        each = 16 * (4 if element == "fp32" else 2)  # 16 elements a thread
        assert moved == {"ld": read * each, "st": written * each}
