"""Group norm with SiLU: as accurate as eager in both memory formats, in one, two or shared passes, and a torch op."""

from __future__ import annotations

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
from fxprec.kernels.nn import group_norm as module
from fxprec.kernels.nn import group_norm_kernels, group_norm_slabs
from fxprec.kernels.nn.group_norm import group_norm, reference

error, gradients, near = norm_tools.error, norm_tools.gradients, norm_tools.near

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [F32, F16, BF16]
#: Shape and groups.
SIZES = [((2, 6, 5, 7), 3), ((3, 8), 2), ((2, 12, 9), 12), ((1, 10, 3, 2, 5), 1), ((4, 4, 1, 1), 2)]
#: Plain torch, Triton's interpreter, a device.
PLACES = [pytest.param("cpu", id="plain"), *kernel_tools.DEVICES]
every_place = pytest.mark.parametrize("device", PLACES)


def laid(x: Tensor, last: bool) -> Tensor:
    """channels_last where the shape has it."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.to(memory_format=formats[x.dim()]) if last and x.dim() in formats else x


def inputs(shape: tuple[int, ...], device: str, dtype: torch.dtype, last: bool = False) -> list[Tensor]:
    """x, weight, bias; parameters are FP32 with values that x's dtype holds."""
    x = laid((torch.randn(shape) * 2 + 1).to(device, dtype), last)
    parameters = [(torch.randn(shape[1]) + shift).to(dtype).float().to(device) for shift in (1, 0)]
    return [t.detach().requires_grad_() for t in (x, *parameters)]


def plain(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, silu: bool, eps: float = 1e-5) -> Tensor:
    z = F.group_norm(x, groups, weight, bias, eps)
    return F.silu(z) if silu else z


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups be of more than one tile from 33 elements on, and shared where there are fewer than 8."""
    monkeypatch.setattr(module, "FORWARD_ELEMENTS", 32)
    monkeypatch.setattr(module, "BACKWARD_ELEMENTS", 32)
    monkeypatch.setattr(module, "_TILE", 32)
    monkeypatch.setattr(module, "_SLAB_BYTES", 128)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 2)


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@every_place
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), SIZES)
@pytest.mark.parametrize(("last", "silu"), [(False, False), (False, True), (True, True)])
def test_results_and_gradients_are_as_near_to_float64_as_eagers(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], groups: int, last: bool, silu: bool
) -> None:
    own = x, weight, bias = inputs(shape, device, dtype, last)
    cotangent = [laid(torch.randn(shape).to(device, dtype), last)]
    y = group_norm(x, groups, weight, bias, silu=silu)
    mine = [y, *gradients(y, own, cotangent)]
    forms = []
    for kind in (torch.float64, dtype):
        leaves = [t.detach().to(kind).requires_grad_() for t in own]
        result = plain(leaves[0], groups, leaves[1], leaves[2], silu)
        forms.append([result, *gradients(result, leaves, [cotangent[0].to(kind)])])
    # The interpreter cuts where it should round to bfloat16.
    slack = 2**-7 if kernel_tools.INTERPRETING and dtype == BF16 else 2**-20
    for got, truth, low in zip(mine, *forms, strict=True):
        assert error(got, truth) <= 2 * error(low, truth) + slack * max(truth.abs().max().item(), 1.0)
    assert [t.dtype for t in mine] == [dtype, dtype, F32, F32]
    if 1 not in shape:  # whose strides say nothing
        assert mine[0].stride() == mine[1].stride() == x.stride(), "of x's memory format"


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
@pytest.mark.parametrize(
    ("shape", "groups", "last", "silu"),
    [
        ((1, 6, 23, 7), 2, False, True),  # two groups, shared by programs
        ((1, 6, 23, 7), 2, True, True),
        ((1, 6, 23, 7), 2, True, False),
        ((5, 6, 2, 7), 2, False, True),  # ten, one program each
        ((5, 6, 2, 7), 2, True, True),
        ((1, 40, 5, 3), 1, False, True),  # more channels than a tile has
        ((1, 40, 5, 3), 1, True, True),
        ((2, 4, 90), 1, False, False),
        ((2, 70, 5, 3), 7, True, True),  # slabs of 32 channels, of several groups and of parts of others
        ((1, 5, 4, 3, 11), 5, True, False),
    ],
)
@pytest.mark.parametrize(("mean", "spread"), [(50, 1), (0, 1e-3)], ids=["far from zero", "less than eps"])
def test_groups_of_many_tiles_are_as_those_of_one(
    device: str, shape: tuple[int, ...], groups: int, last: bool, silu: bool, mean: float, spread: float, looped: None
) -> None:
    own = x, weight, bias = inputs(shape, device, F32, last)
    x.data.mul_(spread).add_(mean)
    cotangent = [torch.randn(shape, device=device)]
    y = group_norm(x, groups, weight, bias, silu=silu) if silu else group_norm(x, groups)
    wanted = own if silu else [x]
    forms = []
    for kind in (torch.float64, F32):
        leaves = [t.detach().to(kind).requires_grad_() for t in own]
        scale, shift = leaves[1:] if silu else (None, None)
        result = plain(leaves[0].contiguous(), groups, scale, shift, silu)
        forms.append([result, *gradients(result, leaves if silu else leaves[:1], [cotangent[0].to(kind)])])
    for got, truth, eager in zip([y, *gradients(y, wanted, cotangent)], *forms, strict=True):
        assert error(got, truth) <= 2 * error(eager, truth) + 2**-20 * max(truth.abs().max().item(), 1.0)


def test_few_large_groups_are_shared_and_many_are_not(looped: None) -> None:
    cpu = torch.device("cpu")
    assert module._shares(2, 161, 4, cpu) == 4 and module._shares(100, 161, 4, cpu) == 1
    assert module._shares(1, 10**6, 4, cpu) == 8 and module._shares(1, 20, 4, cpu) == 1
    assert module._tile(3, 8, False, 32)[:3] == (True, 4, 8) and module._tile(3, 9, False, 32)[:3] == (False, 2, 16)
    assert module._tile(3, 9, True, 32)[:3] == (False, 4, 8) and module._tile(40, 9, True, 32)[:3] == (False, 32, 1)


@every_place
@pytest.mark.parametrize(("last", "value", "many"), [(False, math.nan, True), (True, math.inf, False)])
def test_what_is_not_finite_stays_in_its_group(
    device: str, last: bool, value: float, many: bool, request: pytest.FixtureRequest
) -> None:
    if many:
        request.getfixturevalue("looped")
    x, weight, bias = inputs((2, 6, 5, 7), device, F32, last)
    x.data[1, 3, 2, 1] = value
    y = group_norm(x, 3, weight, bias, silu=True)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    for t in (y, dx):
        assert t[1, 2:4].isnan().all() and t[0].isfinite().all() and t[1, [0, 1, 4, 5]].isfinite().all()
    assert dweight[2:4].isnan().all() and dweight[[0, 1, 4, 5]].isfinite().all()


@every_place
def test_large_values_of_silu_do_not_overflow(device: str) -> None:
    x = torch.tensor([[-1.0, 1.0]], device=device).requires_grad_()
    weight = torch.full((2,), 200.0, device=device)
    y = group_norm(x, 1, weight, silu=True)
    assert y[0, 0].item() == 0 and y[0, 1].item() == pytest.approx(200, rel=1e-4)
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@every_place
def test_other_layouts_are_copied(device: str) -> None:
    wide = torch.randn(2, 6, 8, 10, device=device)
    for x in (wide[:, :, 1:6, 2:9], wide.transpose(2, 3), wide[:, :, :1].expand(2, 6, 8, 10), wide[:, ::2]):
        assert not x.is_contiguous()
        own, same = (t.detach().requires_grad_() for t in (x, x.contiguous()))
        ours, expected = group_norm(own, 3, silu=True), group_norm(same, 3, silu=True)
        assert torch.equal(ours, expected) and ours.is_contiguous()
        cotangent = torch.randn(x.shape, device=device).transpose(0, 1).contiguous().transpose(0, 1)
        found = torch.autograd.grad(ours, own, cotangent), torch.autograd.grad(expected, same, cotangent)
        assert torch.equal(found[0][0], found[1][0])


@every_place
@pytest.mark.parametrize("shape", [(0, 6, 4), (2, 6, 0), (2, 0, 4)])
def test_empty_tensors(device: str, shape: tuple[int, ...]) -> None:
    own = x, weight, bias = inputs(shape, device, F32)
    y = group_norm(x, 2, weight, bias, silu=True)
    assert y.shape == shape
    found = gradients(y, own, [torch.ones_like(y)])
    assert [g.shape for g in found] == [t.shape for t in own] and not found[1].any() and not found[2].any()


@every_place
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2), (0, 2)])
@pytest.mark.parametrize("many", [False, True])
def test_gradients_of_some_inputs(
    device: str, wanted: tuple[int, ...], many: bool, request: pytest.FixtureRequest
) -> None:
    if many:
        request.getfixturevalue("looped")
    made = inputs((1, 4, 5, 11), device, F16)
    low = [t if i == 0 else t.half() for i, t in enumerate(made)]
    own = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(low)]
    leaves = [own[i] for i in wanted]
    cotangent = [torch.randn(1, 4, 5, 11, device=device).half()]
    ours = group_norm(own[0], 2, own[1], own[2], silu=True)
    expected = reference(own[0], own[1], own[2], 2, silu=True)
    near(gradients(ours, leaves, cotangent), gradients(expected, leaves, cotangent), F16)


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
def test_the_same_bits_every_time(device: str, looped: None) -> None:
    own = x, weight, bias = inputs((1, 4, 5, 11), device, F32)
    cotangent = [torch.randn(1, 4, 5, 11, device=device)]
    runs = []
    for _ in range(2):
        y = group_norm(x, 2, weight, bias, silu=True)
        runs.append([y, *gradients(y, own, cotangent)])
    assert all(map(kernel_tools.same_bits, *runs))


# As a torch op


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_opcheck(last: bool, dtype: torch.dtype) -> None:
    x, weight, bias = inputs((2, 6, 5, 7), "cpu", dtype, last)
    torch.library.opcheck(module._group_norm.op, (x, weight, bias, 3, 1e-5, True))
    torch.library.opcheck(module._group_norm.op, (x, None, None, 3, 1e-5, False))
    dy, y, w, b = (t.detach() for t in (torch.randn_like(x), x, weight, bias))
    statistics = torch.rand(2, 6) + 0.5
    inner = (dy, y, w, b, statistics, 3, True, [True, False, True])
    torch.library.opcheck(module._group_norm_backward.op, inner)


def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return group_norm(group_norm(x, 3, weight, bias, silu=True), 2).sin().float().sum()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_sees_one_graph(last: bool, dynamic: bool) -> None:
    own = inputs((2, 6, 5, 7), "cpu", BF16, last)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = torch.autograd.grad(loss(*own), own)
    assert all(map(torch.equal, torch.autograd.grad(compiled(*own), own), expected))
    assert all(g.any() for g in expected)


def test_export_checkpoint_and_func_grad() -> None:
    class Block(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return loss(*inputs)

    own = inputs((2, 6, 5, 7), "cpu", F32)
    plain = tuple(t.detach() for t in own)
    program = torch.export.export(Block(), plain)
    assert any("fxprec.group_norm" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(*plain), loss(*plain))
    expected = torch.autograd.grad(loss(*own), own)
    again = checkpoint(loss, *own, use_reentrant=False)
    assert isinstance(again, Tensor)
    assert all(map(torch.equal, torch.autograd.grad(again, own), expected))
    near([g / 8 for g in torch.func.grad(loss, (0, 1, 2))(*plain)], [g / 8 for g in expected])


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_double_backward_is_eagers(silu: bool, last: bool) -> None:
    own = inputs((2, 6, 4, 3), "cpu", F32, last)
    cotangent = torch.randn(2, 6, 4, 3)
    directions = [torch.randn_like(t) for t in own]
    found = []
    for kind in (F32, torch.float64):
        leaves = [t.detach().to(kind).requires_grad_() for t in own]
        grad = cotangent.to(kind).requires_grad_()
        x, weight, bias = leaves
        form = group_norm(x, 3, weight, bias, silu=silu) if kind == F32 else plain(x, 3, weight, bias, silu)
        first = gradients(form, leaves, [grad], create_graph=True)
        total = sum((g * d.to(kind)).sum() for g, d in zip(first, directions, strict=True))
        assert isinstance(total, Tensor)
        second = torch.autograd.grad(total, [*leaves[: 2 + silu], grad])
        assert all(g.any() for g in second)
        found.append([*first, *second])
    for ours, truth in zip(*found, strict=True):
        assert error(ours, truth.detach()) <= 1e-5 * max(1.0, truth.abs().max().item())


def test_nothing_but_x_is_saved() -> None:
    x, weight, bias = inputs((2, 64, 8, 8), "cpu", BF16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        group_norm(x, 4, weight, bias, silu=True)
    assert [t.data_ptr() for t in saved if t.numel() >= x.numel()] == [x.data_ptr()]


X = torch.zeros(4, 8, 3)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((X.double(), 2), TypeError, r"takes x in .*got torch.float64.*torch's own"),
        ((X, 2, X[0, :, 0].double()), TypeError, r"takes weight in .*got torch.float64"),
        ((X, 3), ValueError, r"equal groups, got 8 channels, num_groups=3"),
        ((X, 0), ValueError, r"equal groups.*num_groups=0"),
        ((X[0, 0], 1), ValueError, r"shape \[N, C, \*\], got \(3,\)"),
        ((X, 2, X), ValueError, r"weight of shape \(8,\), got \(4, 8, 3\)"),
        ((X, 2, None, X[0, 1:, 0]), ValueError, r"bias of shape \(8,\), got \(7,\)"),
        ((X, 2, torch.zeros(8, device="meta")), ValueError, r"one device, got x on 'cpu' and weight on 'meta'"),
    ],
)
def test_bad_arguments(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"(?s)group_norm.*{message}"):
        group_norm(*arguments)


# What the compiler makes of it


def compiled(
    backward: bool, architecture: int, dtype: torch.dtype, channels: int, pixels: int, last: bool, phase: int
) -> tuple[Any, bool, tuple[int, int]]:
    """The kernel, whether a group is one tile, and the shape of a tile."""
    elements = module.BACKWARD_ELEMENTS if backward else module.FORWARD_ELEMENTS
    whole, ct, pt, warps = module._tile(channels, pixels, last, elements)
    kernel = group_norm_kernels.group_backward_kernel if backward else group_norm_kernels.group_forward_kernel
    types: dict[str, Any] = dict.fromkeys(("x", "y", "dy", "dx"), dtype)
    types |= dict.fromkeys(("weight", "bias", "statistics", "parts", "dweights", "dbiases"), F32)
    types |= {"groups": "i32", "pixels": "i32"}
    constants = {"CPG": channels, "LAST": last, "SILU": True, "WHOLE": whole, "PHASE": phase, "PARTS": 8}
    built = norm_tools.compiled(kernel, architecture, warps, types, constants | {"CT": ct, "PT": pt}, ("groups",))
    print(kernel.fn.__name__, architecture, dtype, channels, pixels, last, phase, built.registers, "registers")
    return built, whole, (pt, ct) if last else (ct, pt)


@kernel_tools.compiles
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("architecture", "dtype", "channels", "pixels", "phase"),
    [
        (90, BF16, 16, 256, 0),
        (80, F16, 8, 65536, 0),
        (90, F32, 8, 65536, 1),
        (100, F16, 8, 65536, 2),
        (90, BF16, 8, 65536, 1),
        (100, F32, 32, 64, 0),
        (90, BF16, 10, 4096, 0),
    ],
)
def test_nothing_spills_and_tiles_move_16_bytes_at_a_time(
    architecture: int, dtype: torch.dtype, channels: int, pixels: int, phase: int, last: bool, backward: bool
) -> None:
    kernel, whole, tile = compiled(backward, architecture, dtype, channels, pixels, last, phase)
    # Of 255 registers Triton 3.8's ptxas takes 128, for more warps at one time, and keeps two numbers in memory.
    assert kernel.spills <= (8 if kernel.registers <= 128 else 0)
    assert not re.search(r"\b(atom|red)\.", kernel.ptx), "an order of its own every time"
    passes = 1 if whole or phase else 2
    loads, stores = (1 + backward) * dtype.itemsize * passes, 0 if phase == 1 else dtype.itemsize
    assert kernel.moved(*tile) == (loads, stores)
    aligned = not last or channels % 8 == 0
    wide = len(re.findall(r"(?:ld|st)\.global[.\w:]*v4\.b32", kernel.ptx))
    per_thread = math.prod(tile) // (32 * int(re.findall(r"\.reqntid (\d+)", kernel.ptx)[0]) // 32)
    assert wide >= (loads + stores) * per_thread // 16 or not aligned


#: Kernel of slabs -> tiles that it loads and stores.
SLABS = {
    group_norm_slabs.channel_statistics_kernel: (1, 0), group_norm_slabs.normalize_kernel: (1, 1),
    group_norm_slabs.channel_sums_kernel: (2, 0), group_norm_slabs.input_gradient_kernel: (2, 1),
}  # fmt: skip


@kernel_tools.compiles
@pytest.mark.parametrize(("architecture", "dtype"), [(80, BF16), (90, BF16), (90, F32), (100, F16)])
@pytest.mark.parametrize("kernel", SLABS, ids=lambda kernel: getattr(kernel, "fn", kernel).__name__)
def test_slabs_are_read_16_bytes_at_a_time_ahead_of_what_is_computed(
    kernel: Any, architecture: int, dtype: torch.dtype
) -> None:
    """Of ten channels a group, of 320."""
    x = torch.empty((2, 320, 64, 64), dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    cut = module._slabs(x, 32, torch.channels_last, module.FORWARD_ELEMENTS)
    assert cut is not None and cut.ct == 64 and cut.pt * 64 * dtype.itemsize == module._SLAB_BYTES
    types: dict[str, Any] = dict.fromkeys(("x", "y", "dy", "dx"), dtype)
    types |= dict.fromkeys(("weight", "bias", "statistics", "levels", "sums", "partials"), F32)
    types |= dict.fromkeys(("channels", "pixels", "total", "rows"), "i32")
    constants = {"CPG": cut.each, "SILU": True, "VECTOR": cut.vector, "CT": cut.ct, "PT": cut.pt}
    built = norm_tools.compiled(kernel, architecture, cut.tile()["num_warps"], types, constants, ("rows", "total"))
    print(kernel.fn.__name__, architecture, dtype, built.registers, "registers", built.shared, "bytes shared")
    assert built.spills == 0 and built.registers <= 128 and built.shared <= 99 * 1024
    assert not re.search(r"\b(atom|red)\.", built.ptx), "an order of its own every time"
    loads, stores = SLABS[kernel]
    assert built.moved(cut.pt, cut.ct) == (loads * dtype.itemsize, stores * dtype.itemsize)
    copies = re.findall(r"cp\.async\.c[ga]\.shared\.global [^;]*?, (0x[0-9a-f]+|\d+)", built.ptx)
    assert len(copies) >= 2 * loads and {int(size, 0) for size in copies} == {16}
    assert len(re.findall(r"st\.global\.v4\.b32", built.ptx)) == 2 * stores, "16 bytes a thread, twice"


def test_small_groups_of_whole_runs_are_no_slabs() -> None:
    def slabs(channels: int, groups: int, side: int, layout: torch.memory_format = torch.channels_last) -> Any:
        x = torch.empty((2, channels, side, side), dtype=BF16, device="meta").to(memory_format=layout)
        return module._slabs(x, groups, layout, module.BACKWARD_ELEMENTS)

    assert slabs(320, 32, 16) is None, "one tile"
    assert slabs(320, 32, 64, torch.contiguous_format) is None
    assert slabs(1280, 32, 16) is None and slabs(1280, 32, 32) is not None and slabs(1312, 32, 16) is not None


@kernel_tools.compiles
def test_the_bytes_that_are_promised_are_those_of_the_kernels() -> None:
    shape = (4, 64, 16, 16)
    for number, backward in zip(kernel_bytes.group_norm(shape, BF16), (False, True), strict=True):
        kernel, whole, tile = compiled(backward, 90, BF16, 16, 256, False, 0)
        assert whole and number == sum(kernel.moved(*tile)) * math.prod(shape)
    assert kernel_bytes.group_norm(shape, F32, (F32, F16)) == (8 * 65536 + 6 * 64, 12 * 65536 + 12 * 64)
