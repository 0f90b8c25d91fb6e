"""Batch norm with residual and relu: torch's results and running statistics, in fewer passes, and as a torch op."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kernel_tools
from benchmarks.workloads import kernel_bytes
from fxprec.kernels.launch.triton_support import Bound
from fxprec.kernels.nn import batch_norm as module
from fxprec.kernels.nn import batch_norm_tiles as tiles_module
from fxprec.kernels.nn.batch_norm import APPLY, batch_norm
from fxprec.kernels.nn.batch_norm_backward import BACKWARD
from fxprec.kernels.nn.batch_norm_statistics import STATISTICS

on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)
on_a_cpu = pytest.mark.skipif(kernel_tools.INTERPRETING, reason="plain torch, which kernels replace here")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Shape and whether channels come last in memory: few and many channels, several parts, loops over rows and columns.
LAYOUTS = [
    ((3, 5, 7, 9), True),
    ((2, 16, 50, 50), True),
    ((2, 70, 3, 3, 3), True),
    ((5, 3, 11), True),
    ((700, 24), False),
    ((3, 130, 1, 1), False),
    ((4, 1, 33, 70), False),
    ((9, 2, 25, 44), False),
    ((9, 5, 25, 44), False),
]
SMALL = ((4, 6, 5, 3), True)


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


def laid_out(shape: tuple[int, ...], last: bool, dtype: torch.dtype, device: str, shift: float = 0.0) -> Tensor:
    x = (torch.randn(shape) * 2 + shift).to(device, dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


class Case:
    """One set of operands, and what F.batch_norm, a sum and relu, or our function, makes of it."""

    def __init__(
        self, shape: tuple[int, ...], last: bool, dtype: torch.dtype, device: str, residual: bool, affine: bool = True
    ) -> None:
        channels = shape[1]
        self.x = laid_out(shape, last, dtype, device, shift=3.0)
        self.weight = (torch.rand(channels) + 0.5).to(device) if affine else None
        self.bias = torch.randn(channels).to(device) if affine else None
        self.running = [torch.randn(channels).to(device), (torch.rand(channels) + 0.5).to(device)]
        self.residual = laid_out(shape, last, dtype, device) if residual else None
        self.dy = laid_out(shape, last, dtype, device)

    def run(self, function: Any, relu: bool, training: bool, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """All results; float64 ones with ``dtype=torch.float64``."""

        def own(tensor: Tensor) -> Tensor:
            return tensor.detach().clone() if dtype is None else tensor.detach().to(dtype)

        leaves = {"x": self.x, "weight": self.weight, "bias": self.bias, "residual": self.residual}
        leaves = {k: own(v).requires_grad_() for k, v in leaves.items() if v is not None}
        running = [own(r) for r in self.running]
        y = function(
            leaves["x"], *running, leaves.get("weight"), leaves.get("bias"), training=training, momentum=0.3,
            residual=leaves.get("residual"), relu=relu,
        )  # fmt: skip
        found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), self.dy.to(y.dtype)), strict=True))
        return {"y": y.detach(), "running_mean": running[0], "running_var": running[1]} | {
            f"d{name}": gradient for name, gradient in found.items()
        }


def eager(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Any,
    bias: Any,
    *,
    residual: Any = None,
    relu: bool = False,
    **rest: Any,
) -> Tensor:
    y = F.batch_norm(x, mean, var, weight, bias, **rest)
    y = y if residual is None else y + residual
    return y.relu() if relu else y


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm().clamp_min(1e-30))


def assert_as_accurate_as_eager(case: Case, relu: bool, training: bool) -> None:
    truth = case.run(eager, relu, training, torch.float64)
    low = case.run(eager, relu, training)
    ours = case.run(batch_norm, relu, training)
    assert ours.keys() == low.keys()
    # The interpreter cuts bfloat16 off where hardware rounds: twice the error.
    factor = 4 if kernel_tools.INTERPRETING and case.x.dtype == torch.bfloat16 else 2
    for name, expected in low.items():
        assert ours[name].dtype == expected.dtype and ours[name].shape == expected.shape, name
        assert error(ours[name], truth[name]) <= factor * error(expected, truth[name]) + 1e-6, name
    assert ours["y"].stride() == case.x.stride() and ours["dx"].stride() == case.x.stride()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "last"), LAYOUTS)
def test_results_are_as_near_to_float64_as_eagers(
    device: str, shape: tuple[int, ...], last: bool, dtype: torch.dtype
) -> None:
    assert_as_accurate_as_eager(Case(shape, last, dtype, device, residual=True), relu=True, training=True)


@on_devices
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_so_they_are_in_every_form(device: str, training: bool, relu: bool, residual: bool, affine: bool) -> None:
    shape, last = ((3, 20, 7, 9), True) if affine == relu else ((3, 4, 7, 9), False)
    assert_as_accurate_as_eager(Case(shape, last, torch.float16, device, residual, affine), relu, training)


@on_a_cpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "last"), LAYOUTS)
def test_so_they_are_without_triton(shape: tuple[int, ...], last: bool, dtype: torch.dtype, training: bool) -> None:
    assert_as_accurate_as_eager(Case(shape, last, dtype, "cpu", residual=True), relu=True, training=training)
    assert_as_accurate_as_eager(Case(shape, last, dtype, "cpu", residual=False), relu=True, training=training)


def mixed(device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Operands of many dtypes, and the same in float32."""
    x = laid_out((2, 16, 5, 7), True, torch.float16, device, shift=1.0)
    others = [torch.randn(16), torch.rand(16) + 0.5, torch.rand(16), torch.randn(16)]
    kinds = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    operands = [x, *(t.to(device, kind) for t, kind in zip(others, kinds, strict=True))]
    operands.append(laid_out((2, 16, 5, 7), False, torch.float32, device))
    for position in (0, 3, 4, 5):
        operands[position].requires_grad_()
    return operands, [t.detach().float().requires_grad_(t.requires_grad) for t in operands]


@on_devices
def test_operands_may_be_of_different_dtypes_and_layouts(device: str) -> None:
    ours, plain = mixed(device)
    gradients = []
    for (x, mean, var, weight, bias, residual), function in ((ours, batch_norm), (plain, eager)):
        y = function(x, mean, var, weight, bias, training=True, residual=residual, relu=True)
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).half().view(y.shape).to(y.dtype))
        gradients.append([y, mean, var, x.grad, weight.grad, bias.grad, residual.grad])
    for found, expected, operand in zip(*gradients, [ours[i] for i in (0, 1, 2, 0, 3, 4, 5)], strict=True):
        assert found.dtype == operand.dtype
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=2**-6, atol=2e-3)


@on_devices
def test_other_strides_are_copied(device: str) -> None:
    whole = laid_out((3, 6, 8, 10), True, torch.float16, device)
    for x in (whole[:, :, ::2], whole[:, :, :, 1:], whole.contiguous()[..., ::2]):
        expected = batch_norm(x.contiguous(), None, None, training=True)
        y = batch_norm(x, None, None, training=True)
        torch.testing.assert_close(y, expected, rtol=2**-10, atol=1e-3)
        assert y.is_contiguous(memory_format=torch.channels_last) == (x.stride(1) == 1)
    # Values per channel with gaps between them, or one for all.
    values = torch.rand(4, 12, device=device).add_(0.5)[:, ::2]
    apart = [values[0], values[1], values[2].requires_grad_(), values[3, :1].expand(6)]
    together = [t.detach().clone() for t in apart]
    for training in (True, False):
        found = []
        for mean, var, weight, bias in (apart, together):
            x = whole.clone().requires_grad_()
            y = batch_norm(x, mean, var, weight, bias, training=training, relu=True)
            found += [y.detach(), *torch.autograd.grad(y.square().sum(), x)]
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    gaps = torch.zeros(12, device=device)[::2]
    batch_norm(whole, gaps, None, training=True, momentum=1.0)
    torch.testing.assert_close(gaps, whole.float().mean((0, 2, 3)), rtol=1e-4, atol=1e-4)
    # A gradient that is one number, seen at every place.
    mean, var = torch.zeros(6, device=device), torch.ones(6, device=device)
    x = whole.clone().requires_grad_()
    batch_norm(x, mean, var, training=False).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 1.0 / (1.0 + 1e-5) ** 0.5))


@on_devices
@pytest.mark.parametrize("last", [True, False])
def test_the_same_operands_give_the_same_bits(device: str, last: bool) -> None:
    case = Case((4, 6, 5, 3), last, torch.float16, device, residual=True)
    first, second = (case.run(batch_norm, True, True) for _ in range(2))
    assert all(kernel_tools.same_bits(first[name], second[name]) for name in first)


@on_devices
@pytest.mark.parametrize("residual", [True, False])
def test_no_gradient_passes_where_the_stored_output_is_zero(device: str, residual: bool) -> None:
    """Also where float16 made a zero of what FP32 said was positive, and where the saved y is what says it."""
    case = Case(*SMALL, torch.float16, device, residual)
    assert case.weight is not None and case.bias is not None
    case.weight[:3] = 1e-9
    case.bias[:3] = 0.0
    if case.residual is not None:
        case.residual[:, :3] = 0.0
    found = case.run(batch_norm, True, True)
    assert not found["y"][:, :3].any() and not found["dbias"][:3].any() and not found["dx"][:, :3].any()
    mask = found["y"] > 0
    assert 0 < int(mask.sum()) < mask.numel() // 2
    if residual:
        assert torch.equal(found["dresidual"], case.dy * mask)
    torch.testing.assert_close(found["dbias"], (case.dy.float() * mask).sum((0, 2, 3)), rtol=1e-5, atol=1e-5)


@on_devices
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_channel_and_survives_relu(device: str, bad: float) -> None:
    x = laid_out(*SMALL, torch.float32, device)
    x[1, 2, 3, 1] = bad
    mean, var = torch.zeros(6, device=device), torch.ones(6, device=device)
    y = batch_norm(x, mean, var, training=True, relu=True)
    assert y[:, 2].isnan().all() and not var[2].isfinite() and not mean[2].isfinite()
    others = [0, 1, 3, 4, 5]
    assert y[:, others].isfinite().all() and mean[others].isfinite().all() and var[others].isfinite().all()
    y = batch_norm(x, torch.zeros_like(mean), torch.ones_like(mean), training=False, relu=True)
    assert int((~y.isfinite()).sum()) == 1 and y[1, 2, 3, 1].isnan() == (bad != bad)


@on_devices
@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch_gives_empty_results_and_changes_nothing(device: str, training: bool) -> None:
    for shape in [(0, 3, 2, 2), (0, 3), (2, 3, 0, 2)]:
        x = torch.zeros(shape, device=device, requires_grad=True)
        weight, bias = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
        mean, var = torch.full((3,), 2.0, device=device), torch.full((3,), 5.0, device=device)
        y = batch_norm(x, mean, var, weight, bias, training=training, residual=x, relu=True)
        y.sum().backward()
        assert y.shape == x.shape and x.grad is not None and x.grad.shape == x.shape
        assert torch.equal(mean, torch.full_like(mean, 2.0)) and torch.equal(var, torch.full_like(var, 5.0))
        assert weight.grad is not None and bias.grad is not None and not weight.grad.any() and not bias.grad.any()


@on_devices
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("wanted", ["x", "weight", "residual", "x bias", "x residual", "bias residual"])
def test_only_what_is_wanted_is_computed_and_alike(device: str, wanted: str, relu: bool, training: bool) -> None:
    case = Case(*SMALL, torch.float16, device, residual=True)
    every = case.run(batch_norm, relu, training)
    leaves = {"x": case.x, "weight": case.weight, "bias": case.bias, "residual": case.residual}
    leaves = {k: v.detach().clone().requires_grad_(k in wanted.split()) for k, v in leaves.items() if v is not None}
    mean, var = (r.clone() for r in case.running)
    y = batch_norm(
        leaves["x"],
        mean,
        var,
        leaves["weight"],
        leaves["bias"],
        training=training,
        residual=leaves["residual"],
        relu=relu,
    )
    y.backward(case.dy)
    for name, leaf in leaves.items():
        if name in wanted.split():
            assert leaf.grad is not None and torch.equal(leaf.grad, every[f"d{name}"])
        else:
            assert leaf.grad is None


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str]]]:
    """Every kernel launched in the test, and which tensors it was handed by name."""
    found: list[tuple[str, set[str]]] = []
    launch = Bound.__call__

    def counted(bound: Any, *given: Any) -> None:
        names = bound._kernel.arg_names
        operands = {name for name, each in zip(names, given, strict=False) if each is not None}
        found.append((bound._kernel.fn.__name__, operands & {"x", "y", "dy", "dx", "dresidual"}))
        launch(bound, *given)

    monkeypatch.setattr(Bound, "__call__", counted)
    return found


@on_devices
def test_a_bottleneck_takes_three_kernels_and_six_backward_besides_statistics(
    device: str, launches: list[tuple[str, set[str]]]
) -> None:
    """And besides its convolutions; a frozen one three forward and three backward."""
    x = laid_out((2, 4, 3, 3), True, torch.float16, device).requires_grad_()
    weight, bias = (torch.ones(4, device=device, requires_grad=True) for _ in range(2))
    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)

    def names() -> list[str]:
        found = [name for name, _ in launches]
        launches.clear()
        return found

    def bottleneck(training: bool, weight: Tensor, bias: Tensor) -> Tensor:
        y = batch_norm(x, mean, var, weight, bias, training=training, relu=True)
        y = batch_norm(y, mean, var, weight, bias, training=training, relu=True)
        return batch_norm(y, mean, var, weight, bias, training=training, relu=True, residual=x)

    y = bottleneck(True, weight, bias)
    assert names() == ["statistics_kernel", "finish_kernel", "apply_kernel"] * 3
    y.sum().backward()
    read = [operands for _, operands in launches]
    assert read[:2] == [{"x", "y", "dy", "dresidual"}, {"x", "dy", "dx"}], "dy masked once, where there is a residual"
    assert read[2:] == [{"x", "dy"}, {"x", "dy", "dx"}] * 2, "and the mask computed from x where there is none"
    assert names() == ["sums_kernel", "inputs_kernel"] * 3
    y = bottleneck(False, weight.detach(), bias.detach())
    assert names() == ["apply_kernel"] * 3
    y.sum().backward()
    assert names() == ["inputs_kernel"] * 3


@on_devices
@pytest.mark.parametrize("last", [True, False])
def test_many_partials_are_all_added_up(device: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one kernel adds up at a time."""
    monkeypatch.setattr(tiles_module, "_programs", lambda device: 128)
    shape = (2, 16, 90, 50) if last else (3, 1, 150, 310)
    x = laid_out(shape, last, torch.float16, device)
    assert tiles_module.cut(*tiles_module.cut_arguments(x, tiles_module.BACKWARD_BYTES)).parts > 32
    case = Case(shape, last, torch.float16, device, residual=True)
    assert_as_accurate_as_eager(case, relu=True, training=True)


# As a torch op


@on_a_cpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_the_ops_pass_opcheck(training: bool, residual: bool) -> None:
    x = laid_out(*SMALL, torch.float32, "cpu")
    torch.library.opcheck(STATISTICS.op, (x, torch.zeros(6), torch.ones(6), 0.1, 1e-5))
    torch.library.opcheck(STATISTICS.op, (x, None, None, 0.1, 1e-5))
    mean, rstd = STATISTICS(x, None, None, 0.1, 1e-5)
    weight, bias = torch.rand(6), torch.randn(6)
    other = torch.randn_like(x) if residual else None
    operands = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias, other)]
    torch.library.opcheck(APPLY.op, (operands[0], mean, rstd, *operands[1:], 1e-5, True, training))
    y = APPLY(x, mean, rstd, weight, bias, other, 1e-5, True, training) if residual else None
    settings = (1e-5, True, training, True, True, residual)
    torch.library.opcheck(BACKWARD.op, (torch.randn_like(x), x, y, mean, rstd, weight, None, *settings))
    torch.library.opcheck(BACKWARD.op, (x, x, y, mean, rstd, None, bias, 1e-5, False, training, False, False, False))


class Block(torch.nn.Module):
    """A convolution, batch norm, the sum with the input, relu; by our function or by torch's."""

    def __init__(self, function: Any = batch_norm) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.bn = torch.nn.BatchNorm2d(4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        bn = self.bn
        return self.function(
            self.conv(x),
            bn.running_mean,
            bn.running_var,
            bn.weight,
            bn.bias,
            training=self.training,
            residual=x,
            relu=True,
        )


def compare(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Gradients and running statistics."""
    for (name, p), (_, q) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=name)
    for (_, p), (_, q) in zip(found.named_buffers(), expected.named_buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@on_a_cpu
@pytest.mark.parametrize("training", [True, False])
def test_it_compiles_without_a_graph_break_and_updates_the_running_statistics(training: bool) -> None:
    block = Block().train(training)
    twin = copy.deepcopy(block)
    twin.function = eager
    x = torch.randn(5, 4, 6, 7).to(memory_format=torch.channels_last)
    y, expected = torch.compile(block, fullgraph=True, backend="aot_eager")(x), twin(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    y.square().sum().backward()
    expected.square().sum().backward()
    compare(block, twin)
    assert bool(block.bn.running_mean.any()) == training  # type: ignore[union-attr]


@on_a_cpu
@pytest.mark.parametrize("training", [True, False])
def test_it_exports_with_a_dynamic_batch(training: bool) -> None:
    block = Block().train(training)
    program = torch.export.export(
        block, (torch.randn(5, 4, 6, 7),), dynamic_shapes=({0: torch.export.Dim("n", min=2)},)
    )
    mutated = sorted(program.run_decompositions().graph_signature.buffers_to_mutate.values())
    assert mutated == (["bn.running_mean", "bn.running_var"] if training else [])
    x, exported, twin = torch.randn(3, 4, 6, 7), program.module(), copy.deepcopy(block)
    twin.function = eager
    torch.testing.assert_close(exported(x), twin(x), rtol=1e-5, atol=1e-5)
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(dict(exported.named_buffers())[name], buffer, rtol=1e-5, atol=1e-6)


@on_a_cpu
def test_a_checkpointed_block_does_what_torchs_does() -> None:
    block = Block()
    twin = copy.deepcopy(block)
    twin.function = eager
    x = torch.randn(5, 4, 6, 7)
    for each in (block, twin):
        output = checkpoint(each, x, use_reentrant=False)
        assert isinstance(output, Tensor)
        output.square().sum().backward()
    compare(block, twin)


@on_a_cpu
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_derivatives_of_derivatives_are_eagers(training: bool, residual: bool) -> None:
    """By create_graph, and by torch.func.grad of torch.func.grad."""
    x, weight, bias = torch.randn(4, 3, 5, 2), torch.rand(3) + 0.5, torch.randn(3)
    operands = (x, weight, bias, torch.randn(4, 3, 5, 2) if residual else torch.zeros(()))
    cotangent = torch.randn_like(x)
    found: list[list[Tensor]] = []
    for function in (batch_norm, eager):
        running = [torch.zeros(3), torch.ones(3)]

        def loss(
            x: Tensor, w: Tensor, b: Tensor, r: Tensor, function: Any = function, running: Any = running
        ) -> Tensor:
            other = r if residual else None
            y = function(x, *running, w, b, training=training, residual=other, relu=True)
            return (y.sin() * cotangent).sum()

        leaves = [t.clone().requires_grad_() for t in (operands if residual else operands[:3])]
        full = leaves if residual else [*leaves, operands[3]]
        first = torch.autograd.grad(loss(*full), leaves, create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), leaves)  # type: ignore[arg-type]
        found.append([*first, *second, *torch.func.grad(loss, (0, 1, 2))(*operands)])

        def nested(x: Tensor, w: Tensor, loss: Any = loss) -> Tensor:
            return torch.func.grad(loss)(x, w, *operands[2:]).square().sum()

        found[-1] += [*torch.func.grad(nested, (0, 1))(x, weight), *running]
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@on_a_cpu
def test_statistics_changed_between_forward_and_backward_are_an_error_not_a_wrong_gradient() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    mean, var = torch.zeros(3), torch.ones(3)
    y = batch_norm(x, mean, var, training=False)
    batch_norm(x, mean, var, training=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@on_a_cpu
def test_it_runs_under_inference_mode_and_without_running_statistics() -> None:
    x = torch.randn(4, 3)
    with torch.inference_mode():
        mean = torch.zeros(3)
        y = batch_norm(x, mean, None, training=True, momentum=1.0)
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(y, F.batch_norm(x, None, None, training=True))


@on_a_cpu
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"x": torch.zeros(4, 3, dtype=torch.float64)},
            TypeError,
            "x in float32, float16 or bfloat16, got torch.float64",
        ),
        ({"weight": torch.zeros(3, dtype=torch.float64)}, TypeError, "takes weight .*float64.* torch's own"),
        ({"x": None}, TypeError, "takes x .*got NoneType"),
        ({"bias": 1.0}, TypeError, "takes bias .*got float"),
        ({"momentum": None}, TypeError, "1 / num_batches_tracked"),
        ({"x": torch.zeros(3)}, ValueError, r"x as \[N, C, \*\], got the shape \(3,\)"),
        ({"weight": torch.zeros(4)}, ValueError, r"weight must have one value a channel, \[3\] .*got \(4,\)"),
        ({"running_var": torch.zeros(1, 3)}, ValueError, r"running_var must have .*got \(1, 3\)"),
        ({"residual": torch.zeros(1, 3)}, ValueError, r"x's shape \(4, 3\), got \(1, 3\)"),
        (
            {"residual": torch.zeros(4, 3, device="meta")},
            ValueError,
            "one device, got x on 'cpu' and residual on 'meta'",
        ),
        ({"training": False, "running_mean": None}, ValueError, "needs running_mean and running_var"),
        ({"eps": 0.0}, ValueError, "positive eps"),
        ({"eps": -1.0, "training": False}, ValueError, "positive eps"),
        ({"x": torch.zeros(1, 3)}, ValueError, r"Expected more than 1 value per channel .*\[1, 3\]"),
        ({"x": torch.zeros(1, 3, 1, 1)}, ValueError, "Expected more than 1 value per channel"),
    ],
)
def test_bad_operands_are_named(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    operands = {"x": torch.zeros(4, 3), "running_mean": torch.zeros(3), "running_var": torch.ones(3), "training": True}
    with pytest.raises(kind, match=message):
        batch_norm(**(operands | change))  # type: ignore[arg-type]


@on_a_cpu
def test_one_value_a_channel_is_enough_where_statistics_are_given() -> None:
    x = torch.randn(1, 3, 1, 1)
    y = batch_norm(x, torch.zeros(3), torch.ones(3), training=False, eps=0.0)
    assert torch.equal(y, x)


@on_a_cpu
def test_the_bytes_of_the_docstring() -> None:
    forms = [{}, {"relu": True}, {"relu": True, "residual": True}]
    moved = [kernel_bytes.batch_norm(torch.bfloat16, training=True, **form) for form in forms]  # type: ignore[arg-type]
    assert moved == [(6, 10), (6, 10), (8, 14)]
    assert kernel_bytes.batch_norm(torch.float32, training=False, residual=True) == (12, 20)
    assert module.__doc__ is not None
    for line, (forward, backward) in zip(
        module.__doc__.split("eager, backward\n")[1].splitlines(), moved, strict=False
    ):
        assert line.split()[-4:-2] == [str(forward), str(backward)]


@pytest.mark.gpu
@pytest.mark.skipif(not kernel_tools.CUDA, reason="no CUDA device")
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.randn(2_100_000, 1024, device="cuda", dtype=torch.float16)
    mean, var = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    y = batch_norm(x, mean, var, training=True, momentum=1.0)
    assert float((mean.abs() - 0.01).max()) < 0 and float(((var - 1).abs() - 0.01).max()) < 0
    torch.testing.assert_close(y[-5:].float(), (x[-5:].float() - mean) * var.rsqrt(), rtol=2e-3, atol=2e-3)
