"""One-pass SGD: torch's numbers, a momentum buffer that begins by itself, a skip that leaves every bit."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernel_tools
import optim_references
from fxprec.kernels.optim import sgd
from fxprec.kernels.optim.sgd import SgdSettings
from fxprec.kernels.optim.tables import UPDATE_WARPS, Gradients, MultiTensorPlan

fused_multiply_add = kernel_tools.fused_multiply_add

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(5, 3), (0,), (), (1024,), (9001,), (511,), (512,)]
FORMS = [
    pytest.param(optim_references.sgd, "cpu", id="reference"),
    *[pytest.param(sgd.launch, *param.values, id=param.id, marks=param.marks) for param in kernel_tools.DEVICES],
]
every_form = pytest.mark.parametrize(("run", "device"), FORMS)
on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)
MOMENTUM = SgdSettings(momentum=0.9, dampening=0.3)
VARIANTS = [
    SgdSettings(),
    SgdSettings(weight_decay=0.1, maximize=True),
    MOMENTUM,
    SgdSettings(momentum=0.9, nesterov=True, weight_decay=0.1),
    SgdSettings(momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True),
]


@dataclass
class Problem:
    """Parameters, their buffers (None: no momentum), and a gradient for each."""

    params: list[Tensor]
    buffers: list[Tensor] | None
    shadows: list[Tensor | None] | None
    gradients: list[Tensor | None]

    def bind(self) -> Gradients:
        states = [] if self.buffers is None else [self.buffers]
        return MultiTensorPlan(self.params, states=states, shadows=self.shadows).bind(self.gradients)

    def written(self) -> Iterator[Tensor]:
        shadows = [shadow for shadow in self.shadows or [] if shadow is not None]
        return itertools.chain(self.params, self.buffers or [], shadows)


def problem(
    device: str = "cpu",
    *,
    momentum: bool = True,
    shapes: list[tuple[int, ...]] = SHAPES,
    gradient: torch.dtype = F32,
    param: torch.dtype = F32,
    state: torch.dtype = F32,
    shadow: torch.dtype | None = None,
    scale: float = 1.0,
) -> Problem:
    """The same numbers for the same arguments."""
    torch.manual_seed(0)

    def tensors(dtype: torch.dtype, factor: float = 1.0) -> list[Tensor]:
        return [(torch.randn(shape) * factor).to(dtype).to(device) for shape in shapes]

    params, buffers, gradients = tensors(param), tensors(state), tensors(gradient, scale)
    shadows = None if shadow is None else [torch.full_like(p, math.nan, dtype=shadow) for p in params]
    shadows = shadows and [None if i % 3 == 0 else s for i, s in enumerate(shadows)]
    return Problem(params, buffers if momentum else None, shadows, [*gradients])


def float64(case: Problem, settings: SgdSettings, lr: float, first: bool, factor: float = 1.0) -> list[Tensor]:
    """Parameters after the step in float64, by torch's documented algorithm."""
    results = []
    for i, (p, g) in enumerate(zip(case.params, case.gradients, strict=True)):
        assert g is not None
        p, g = p.double(), g.double() * factor * (-1 if settings.maximize else 1)
        g = g + settings.weight_decay * p
        if case.buffers is not None:
            b = g if first else settings.momentum * case.buffers[i].double() + (1 - settings.dampening) * g
            g = g + settings.momentum * b if settings.nesterov else b
        results.append(p - lr * g)
    return results


def torchs(case: Problem, settings: SgdSettings, lr: float, first: bool) -> None:
    """The step by torch's fused CPU kernel."""
    gradients = [g.clone() for g in case.gradients if g is not None]
    torch._fused_sgd_(
        case.params, gradients, case.buffers or [], lr=lr, momentum=settings.momentum, dampening=settings.dampening,
        weight_decay=settings.weight_decay, nesterov=settings.nesterov, maximize=settings.maximize,
        is_first_step=first,
    )  # fmt: skip


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


# The numbers


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="wants a CPU whose kernels use FMA"
)
@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("first", [False, True])
def test_the_reference_is_torchs_fused_kernel_to_the_bit(settings: SgdSettings, first: bool) -> None:
    # torch's CPU kernel takes 16 elements at a time, and a rest one by one with other roundings.
    ours, theirs = (problem(shapes=[(4096,), (32, 16)], momentum=settings.momentum > 0) for _ in range(2))
    optim_references.sgd(ours.bind(), settings, lr=0.3, first=first)
    torchs(theirs, settings, lr=0.3, first=first)
    assert max(kernel_tools.ulps(a, b) for a, b in zip(ours.written(), theirs.written(), strict=True)) == 0


@every_form
@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("first", [False, True])
def test_odd_sizes_are_as_near_to_float64_as_torchs_fused_kernel(
    run: Any, device: str, settings: SgdSettings, first: bool, fused_multiply_add: None
) -> None:
    case, theirs = (problem(on, momentum=settings.momentum > 0) for on in (device, "cpu"))
    truth = float64(theirs, settings, lr=0.3, first=first)
    run(case.bind(), settings, lr=0.3, first=first)
    torchs(theirs, settings, lr=0.3, first=first)
    for p, q, exact in zip(case.params, theirs.params, truth, strict=True):
        if p.numel():
            allowed = (q.double() - exact).abs().max() * 2 + 2.0**-24 * exact.abs().max()
            assert (p.cpu().double() - exact).abs().max() <= allowed


@on_devices
@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("first", [True, False])
def test_the_kernel_is_the_reference_to_the_bit(
    device: str, settings: SgdSettings, first: bool, fused_multiply_add: None
) -> None:
    options: dict[str, Any] = {"gradient": F16, "shadow": F16, "scale": 1024.0}
    case, expected = (problem(on, momentum=settings.momentum > 0, **options) for on in (device, "cpu"))
    scale = torch.tensor(1024.0)
    optim_references.sgd(expected.bind(), settings, lr=0.3, first=first, grad_scale=scale)
    sgd.launch(case.bind(), settings, lr=0.3, first=first, grad_scale=scale.to(device))
    for ours, theirs in zip(case.written(), expected.written(), strict=True):
        assert kernel_tools.same_bits(ours.cpu(), theirs)


@every_form
@pytest.mark.parametrize("settings", [SgdSettings(), MOMENTUM])
@pytest.mark.parametrize("shadow", [None, F16, BF16])
def test_low_gradients_are_read_and_shadows_written_in_the_same_pass(
    run: Any, device: str, settings: SgdSettings, shadow: torch.dtype | None
) -> None:
    case = problem(device, momentum=settings.momentum > 0, gradient=F16, shadow=shadow, scale=100.0)
    kept = [g.clone() for g in case.gradients if g is not None]
    truth = float64(case, settings, lr=0.3, first=False, factor=1 / 3)
    run(case.bind(), settings, lr=0.3, grad_scale=torch.tensor(3.0, device=device))
    for i, (p, exact) in enumerate(zip(case.params, truth, strict=True)):
        torch.testing.assert_close(p.double(), exact, rtol=3e-7, atol=2e-6)
        gradient, written = case.gradients[i], None if case.shadows is None else case.shadows[i]
        assert gradient is not None and torch.equal(gradient, kept[i])
        if written is not None:
            # Triton's interpreter does not round bfloat16 to nearest: 1 ulp.
            tolerance = 2.0**-7 if device == "cpu" and run is sgd.launch and shadow == BF16 else 0
            torch.testing.assert_close(written.float(), p.to(written.dtype).float(), rtol=tolerance, atol=0)


@every_form
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_low_parameters_and_buffers_are_computed_in_float32(run: Any, device: str, dtype: torch.dtype) -> None:
    case = problem(device, gradient=dtype, param=dtype, state=BF16)
    truth = float64(case, MOMENTUM, lr=0.3, first=False)
    run(case.bind(), MOMENTUM, lr=0.3, first=False)
    for p, exact in zip(case.params, truth, strict=True):
        ulp = torch.finfo(dtype).eps * (2 if dtype == BF16 else 1)
        torch.testing.assert_close(p.double(), exact, rtol=ulp / 2 + 1e-6, atol=2e-6)


@every_form
def test_a_learning_rate_may_be_a_tensor(run: Any, device: str) -> None:
    case, expected = problem(device), problem(device)
    run(case.bind(), MOMENTUM, lr=torch.tensor(0.125, device=device), first=False)
    run(expected.bind(), MOMENTUM, lr=0.125, first=False)
    assert all(torch.equal(a, b) for a, b in zip(case.written(), expected.written(), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not kernel_tools.CUDA, reason="no CUDA device")
@pytest.mark.parametrize("settings", [VARIANTS[0], VARIANTS[2], VARIANTS[3]])
def test_steps_on_a_device_go_with_torchs_fused_optimizer(settings: SgdSettings) -> None:
    case, theirs = (problem("cuda", momentum=settings.momentum > 0) for _ in range(2))
    optimizer = torch.optim.SGD(
        theirs.params, lr=0.01, momentum=settings.momentum, dampening=settings.dampening, nesterov=settings.nesterov,
        weight_decay=settings.weight_decay, fused=True,
    )  # fmt: skip
    for count in range(20):
        case.gradients = [torch.randn_like(p) for p in case.params]
        for p, gradient in zip(theirs.params, case.gradients, strict=True):
            assert gradient is not None
            p.grad = gradient.clone()
        optimizer.step()
        sgd.launch(case.bind(), settings, lr=0.01, first=count == 0)
    for ours, p in zip(case.params, theirs.params, strict=True):
        torch.testing.assert_close(ours, p, rtol=1e-5, atol=2e-6)


# The first step, and what is left alone


@every_form
def test_the_first_step_does_not_read_the_buffer(run: Any, device: str) -> None:
    case = problem(device)
    assert case.buffers is not None
    for buffer in case.buffers:
        buffer.fill_(math.nan)
    run(case.bind(), MOMENTUM, lr=0.3, first=True)
    for buffer, gradient in zip(case.buffers, case.gradients, strict=True):
        assert gradient is not None and torch.equal(buffer, gradient), "without dampening, as torch has it"


@every_form
def test_found_inf_leaves_every_bit(run: Any, device: str) -> None:
    case = problem(device, state=BF16, shadow=F16)
    before = [t.clone() for t in case.written()]
    run(case.bind(), MOMENTUM, lr=0.3, found_inf=torch.tensor(1.0, device=device))
    assert all(kernel_tools.same_bits(a, b) for a, b in zip(case.written(), before, strict=True))


@every_form
def test_a_parameter_without_a_gradient_is_left_alone(run: Any, device: str) -> None:
    case = problem(device, shadow=F16)
    assert case.buffers is not None and case.shadows is not None
    case.gradients[4] = None
    before = [t.clone() for t in case.written()]
    run(case.bind(), MOMENTUM, lr=0.3)
    alone = {id(group[4]) for group in (case.params, case.buffers, case.shadows)}
    for tensor, old in zip(case.written(), before, strict=True):
        assert kernel_tools.same_bits(tensor, old) == (id(tensor) in alone or tensor.numel() == 0)


# How it runs


@on_devices
@pytest.mark.parametrize(("offset", "count"), [(0, 300), (1, 30)])
def test_hundreds_of_tensors_of_as_many_sizes_are_one_launch(
    device: str, offset: int, count: int, monkeypatch: pytest.MonkeyPatch, fused_multiply_add: None
) -> None:
    shapes = [(3 * i,) for i in range(count)]
    case, expected = (problem(on, shapes=shapes, shadow=F16) for on in (device, "cpu"))
    case.params = [torch.cat([p.new_zeros(offset), p])[offset:] for p in case.params]
    grids, kind = [], type(sgd.sgd_kernel)
    original = kind.__getitem__
    monkeypatch.setattr(kind, "__getitem__", lambda self, grid: grids.append(grid) or original(self, grid))
    bound = case.bind()
    assert bound.aligned == (offset == 0)
    sgd.launch(bound, MOMENTUM, lr=0.3)
    assert grids == [(count,)]
    optim_references.sgd(expected.bind(), MOMENTUM, lr=0.3)
    assert all(kernel_tools.same_bits(a.cpu(), b) for a, b in zip(case.written(), expected.written(), strict=True))


@pytest.mark.skipif(not kernel_tools.INTERPRETING, reason="looks into the interpreter")
@pytest.mark.parametrize("which", ["nothing", "gradients", "params", "buffers", "shadows"])
def test_each_tensor_promises_what_its_own_addresses_hold(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem("cpu", shapes=[(8,), (8,), (8,)], shadow=F16)
    if which != "nothing":
        tensors = getattr(case, which)
        tensors[1] = torch.cat([torch.zeros(1, dtype=tensors[1].dtype), tensors[1]])[1:]
    chosen, chunk = [], sgd.sgd_chunk
    monkeypatch.setattr(sgd, "sgd_chunk", lambda *given: chosen.append(given[-3:-1]) or chunk(*given))
    sgd.launch(case.bind(), MOMENTUM, lr=0.3)
    odd = {"nothing": (True, True), "gradients": (False, True)}.get(which, (False, False))
    assert chosen == [(True, True), odd, (True, True)]


# What is refused


@pytest.mark.parametrize("scalar", ["found_inf", "grad_scale"])
def test_a_scalar_that_is_none_is_refused_and_nothing_changes(scalar: str) -> None:
    case = problem("cpu")
    before = [t.clone() for t in case.written()]
    bad = torch.tensor(1.0, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"{scalar} must be one float32"):
        sgd.launch(case.bind(), MOMENTUM, lr=0.3, first=True, **{scalar: bad})
    assert all(kernel_tools.same_bits(a, b) for a, b in zip(case.written(), before, strict=True))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"momentum": -0.1}, "momentum must be finite and not negative"),
        ({"momentum": math.nan}, "momentum must be finite"),
        ({"weight_decay": math.inf}, "weight_decay must be finite"),
        ({"dampening": math.nan}, "dampening must be finite"),
        ({"nesterov": True}, "nesterov needs momentum and no dampening"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov needs momentum and no dampening"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SgdSettings(), **wrong)


# What the compiler makes of it


def compiled(
    architecture: int = 90,
    *,
    gradient: torch.dtype = F16,
    param: torch.dtype = F32,
    state: torch.dtype | None = F32,
    shadow: torch.dtype | None = F16,
    **flags: Any,
) -> Any:
    from fxprec.kernels.launch.triton_support import triton_dtype

    pointers = {"chunks": "*i32", "entries": "*i64", "gradients": "*i64"}
    pointers |= dict.fromkeys(("lr", "grad_scale", "found_inf"), "*fp32")
    constants = {
        "GRADIENT_DTYPE": triton_dtype(gradient), "PARAM_DTYPE": triton_dtype(param),
        "STATE_DTYPE": triton_dtype(state), "SHADOW_DTYPE": triton_dtype(shadow), "DECAY": True, "NESTEROV": True,
        "MAXIMIZE": False, "FIRST": False, "ALIGNED": True, "CHUNK": 8192, "BLOCK": sgd._BLOCK, **flags,
    }  # fmt: skip
    return kernel_tools.compiled(sgd.sgd_kernel, architecture, UPDATE_WARPS, pointers, constants)


@kernel_tools.compiles
@pytest.mark.parametrize("architecture", kernel_tools.ARCHITECTURES)
def test_float32_moves_16_bytes_at_a_time_and_nothing_spills(architecture: int) -> None:
    kernel = compiled(architecture)
    assert len(re.findall(r"ld\.global[.\w]*v4\.b32", kernel.ptx)) == 2, "parameter and buffer"
    assert len(re.findall(r"st\.global[.\w]*v4\.b32", kernel.ptx)) == 2
    assert len(re.findall(r"(?:ld|st)\.global[.\w]*v2\.b32", kernel.ptx)) == 2, "gradient and shadow, 8 bytes"
    assert kernel.spills == 0 and kernel.registers <= 64


@kernel_tools.compiles
def test_beside_odd_addresses_each_tensor_goes_by_its_own() -> None:
    """Three loops: all aligned, all but the gradient, and none of it."""
    kernel = compiled(ALIGNED=False)
    assert len(re.findall(r"(?:ld|st)\.global[.\w]*v4\.b32", kernel.ptx)) == 2 * 2 + 2 * 2
    assert len(re.findall(r"(?:ld|st)\.global[.\w]*v2\.b32", kernel.ptx)) == 2 + 1
    assert kernel.spills == 0 and kernel.registers <= 64


@kernel_tools.compiles
@pytest.mark.parametrize(
    ("dtypes", "first", "total"),
    [
        ({"gradient": F16, "shadow": F16}, False, 20),
        ({"gradient": F16, "shadow": F16}, True, 16),
        ({"gradient": F16, "state": None, "shadow": F16}, False, 12),
        ({"gradient": F32, "state": BF16, "shadow": None}, False, 16),
        ({"gradient": BF16, "param": BF16, "state": None, "shadow": None}, False, 6),
    ],
)
def test_the_bytes_of_the_update_are_those_of_its_loop(dtypes: dict[str, Any], first: bool, total: int) -> None:
    flags = {"FIRST": first, "NESTEROV": dtypes.get("state", F32) is not None}
    loads, stores = compiled(**dtypes, **flags).moved_in_the_loop()
    assert loads + stores == total


@kernel_tools.compiles
def test_there_is_no_atomic() -> None:
    assert not re.search(r"\batom\.", compiled().ptx)
