"""One-pass Adam and AdamW: torch's numbers, a skip that leaves every bit, one launch for all, 28 bytes a parameter."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernel_tools
import optim_references
from fxprec.kernels.optim import adam, tables
from fxprec.kernels.optim.adam import AdamSettings
from fxprec.kernels.optim.tables import UPDATE_WARPS, MultiTensorPlan

fused_multiply_add = kernel_tools.fused_multiply_add

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(5, 3), (0,), (), (1024,), (9001,), (511,), (512,)]
FORMS = [
    pytest.param(optim_references.adam, "cpu", id="reference"),
    *[pytest.param(adam.launch, *param.values, id=param.id, marks=param.marks) for param in kernel_tools.DEVICES],
]
every_form = pytest.mark.parametrize(("run", "device"), FORMS)
on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)


@dataclass
class Problem:
    """Parameters in the middle of a training run, and a gradient for each."""

    params: list[Tensor]
    states: list[list[Tensor]]
    steps: list[Tensor]
    shadows: list[Tensor | None] | None
    gradients: list[Tensor | None]

    def plan(self, **options: Any) -> MultiTensorPlan:
        lists = {"states": self.states, "steps": self.steps, "shadows": self.shadows}
        return MultiTensorPlan(self.params, **lists, **options)  # type: ignore[arg-type]

    def written(self) -> list[Tensor]:
        shadows = [shadow for shadow in self.shadows or [] if shadow is not None]
        return [*self.params, *itertools.chain(*self.states), *self.steps, *shadows]


def problem(
    device: str = "cpu",
    *,
    shapes: list[tuple[int, ...]] = SHAPES,
    gradient: torch.dtype = F32,
    param: torch.dtype = F32,
    state: torch.dtype = F32,
    shadow: torch.dtype | None = None,
    amsgrad: bool = False,
    step: int = 6,
    scale: float = 1.0,
) -> Problem:
    """The same numbers for the same arguments, on every device. Shadows are full of NaN; every third has none."""
    torch.manual_seed(0)

    def tensors(dtype: torch.dtype, factor: float, positive: bool = False) -> list[Tensor]:
        values = [torch.randn(shape) * factor for shape in shapes]
        return [(value.abs() if positive else value).to(dtype).to(device) for value in values]

    params = tensors(param, 1.0)
    states = [tensors(state, 0.1), *[tensors(state, 0.01, positive=True) for _ in range(1 + amsgrad)]]
    shadows = None if shadow is None else [torch.full_like(p, math.nan, dtype=shadow) for p in params]
    shadows = shadows and [None if i % 3 == 0 else s for i, s in enumerate(shadows)]
    steps = [torch.tensor(float(step), device=device) for _ in shapes]
    return Problem(params, states, steps, shadows, [g for g in tensors(gradient, 0.1 * scale)])


def float64(case: Problem, settings: AdamSettings, lr: float, factor: float = 1.0) -> list[Tensor]:
    """Parameters after the step in float64, straight from the paper's formulas."""
    results = []
    for i, (p, g) in enumerate(zip(case.params, case.gradients, strict=True)):
        assert g is not None
        t = case.steps[i].item() + 1
        (beta1, beta2), p, g = settings.betas, p.double(), g.double() * factor * (-1 if settings.maximize else 1)
        m, v, *largest = (state[i].double() for state in case.states)
        if settings.decoupled:
            p = p - lr * settings.weight_decay * p
        else:
            g = g + settings.weight_decay * p
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        v = torch.maximum(v, largest[0]) if settings.amsgrad else v
        results.append(p - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + settings.eps))
    return results


def torchs(case: Problem, settings: AdamSettings, lr: float) -> None:
    """The step by torch's fused CPU kernel, which wants the step counted before."""
    for step in case.steps:
        step += 1
    function = torch._fused_adamw_ if settings.decoupled else torch._fused_adam_
    function(
        case.params, [g.clone() for g in case.gradients if g is not None], case.states[0], case.states[1],
        case.states[2] if settings.amsgrad else [], case.steps, lr=lr, beta1=settings.betas[0],
        beta2=settings.betas[1], weight_decay=settings.weight_decay, eps=settings.eps, amsgrad=settings.amsgrad,
        maximize=settings.maximize,
    )  # fmt: skip


VARIANTS = [
    AdamSettings(),
    AdamSettings(weight_decay=0.1),
    AdamSettings(weight_decay=0.1, decoupled=False),
    AdamSettings(weight_decay=0.1, amsgrad=True),
    AdamSettings(weight_decay=0.1, decoupled=False, maximize=True, amsgrad=True),
    AdamSettings(betas=(0.3, 0.95), eps=1e-3, maximize=True),
    AdamSettings(betas=(0.0, 0.0)),
]


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


# The numbers


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="wants a CPU whose kernels use FMA"
)
@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("step", [0, 6, 100_000])
def test_the_reference_is_torchs_fused_kernel_to_the_bit(settings: AdamSettings, step: int) -> None:
    # torch's CPU kernel takes 16 elements at a time, and a rest one by one with other roundings.
    shapes = [(4096,), (32, 16)]
    ours, theirs = (problem(shapes=shapes, amsgrad=settings.amsgrad, step=step) for _ in range(2))
    optim_references.adam(ours.plan().bind(ours.gradients), settings, lr=3e-3)
    torchs(theirs, settings, lr=3e-3)
    pairs = zip(ours.written(), theirs.written(), strict=True)
    assert max(kernel_tools.ulps(a, b) for a, b in pairs) == 0


@every_form
@pytest.mark.parametrize("settings", VARIANTS)
def test_odd_sizes_are_as_near_to_float64_as_torchs_fused_kernel(
    run: Any, device: str, settings: AdamSettings, fused_multiply_add: None
) -> None:
    case, theirs = problem(device, amsgrad=settings.amsgrad), problem(amsgrad=settings.amsgrad)
    truth = float64(theirs, settings, lr=3e-3)
    run(case.plan().bind(case.gradients), settings, lr=3e-3)
    torchs(theirs, settings, lr=3e-3)
    for p, q, exact in zip(case.params, theirs.params, truth, strict=True):
        if p.numel():
            allowed = (q.double() - exact).abs().max() * 2 + 2.0**-24 * exact.abs().max()
            assert (p.cpu().double() - exact).abs().max() <= allowed


@on_devices
@pytest.mark.parametrize("settings", VARIANTS)
def test_the_kernel_is_the_reference_to_the_bit(device: str, settings: AdamSettings, fused_multiply_add: None) -> None:
    options: dict[str, Any] = {"amsgrad": settings.amsgrad, "gradient": F16, "shadow": F16, "scale": 1024.0}
    case, expected = problem(device, **options), problem(**options)
    scale = torch.tensor(1024.0)
    optim_references.adam(expected.plan().bind(expected.gradients), settings, lr=3e-3, grad_scale=scale)
    adam.launch(case.plan().bind(case.gradients), settings, lr=3e-3, grad_scale=scale.to(device))
    for ours, theirs in zip(case.written(), expected.written(), strict=True):
        assert kernel_tools.same_bits(ours.cpu(), theirs)


@every_form
@pytest.mark.parametrize("step", [0, 6])
def test_steps_are_counted_once_for_each_tensor(run: Any, device: str, step: int) -> None:
    case = problem(device, step=step)
    plan = case.plan()
    for count in (1, 2):
        run(plan.bind(case.gradients), AdamSettings(), lr=1e-3)
        assert [s.item() for s in case.steps] == [step + count] * len(SHAPES), "empty and large tensors alike"


@every_form
@pytest.mark.parametrize("gradient", [F16, BF16, F32])
@pytest.mark.parametrize("shadow", [None, F16, BF16])
def test_low_gradients_are_read_and_shadows_written_in_the_same_pass(
    run: Any, device: str, gradient: torch.dtype, shadow: torch.dtype | None
) -> None:
    case = problem(device, gradient=gradient, shadow=shadow)
    truth = float64(case, AdamSettings(weight_decay=0.1), lr=3e-3)
    run(case.plan().bind(case.gradients), AdamSettings(weight_decay=0.1), lr=3e-3)
    for i, (p, exact) in enumerate(zip(case.params, truth, strict=True)):
        torch.testing.assert_close(p.double(), exact, rtol=3e-7, atol=3e-7)
        written = None if case.shadows is None else case.shadows[i]
        if written is not None:
            # Triton's interpreter does not round bfloat16 to nearest: 1 ulp.
            tolerance = 2.0**-7 if device == "cpu" and run is adam.launch and shadow == BF16 else 0
            torch.testing.assert_close(written.float(), p.to(written.dtype).float(), rtol=tolerance, atol=0)


@every_form
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_low_parameters_are_computed_in_float32_and_rounded_once(run: Any, device: str, dtype: torch.dtype) -> None:
    case = problem(device, gradient=dtype, param=dtype)
    truth = float64(case, AdamSettings(), lr=0.1)
    run(case.plan().bind(case.gradients), AdamSettings(), lr=0.1)
    for p, exact in zip(case.params, truth, strict=True):
        ulp = torch.finfo(dtype).eps * (2 if dtype == BF16 else 1)
        torch.testing.assert_close(p.double(), exact, rtol=ulp / 2 + 1e-6, atol=1e-6)


@every_form
@pytest.mark.parametrize("scale", [65536.0, 3.0])
def test_gradients_are_unscaled_and_left_as_they_are(run: Any, device: str, scale: float) -> None:
    case = problem(device, gradient=F16, scale=100.0)
    kept = [g.clone() for g in case.gradients if g is not None]
    truth = float64(case, AdamSettings(), lr=3e-3, factor=1 / scale)
    divisor = torch.tensor(scale, device=device)
    run(case.plan().bind(case.gradients), AdamSettings(), lr=3e-3, grad_scale=divisor)
    for p, exact, gradient, before in zip(case.params, truth, case.gradients, kept, strict=True):
        torch.testing.assert_close(p.double(), exact, rtol=3e-7, atol=3e-7)
        assert gradient is not None and torch.equal(gradient, before)


@every_form
def test_a_learning_rate_may_be_a_tensor(run: Any, device: str) -> None:
    case, expected = problem(device), problem(device)
    run(case.plan().bind(case.gradients), AdamSettings(weight_decay=0.1), lr=torch.tensor(0.125, device=device))
    run(expected.plan().bind(expected.gradients), AdamSettings(weight_decay=0.1), lr=0.125)
    for a, b in zip(case.written(), expected.written(), strict=True):
        assert torch.equal(a, b)


@every_form
def test_nan_in_a_gradient_stays_in_its_elements(run: Any, device: str) -> None:
    case = problem(device, amsgrad=True)
    gradient = case.gradients[4]
    assert gradient is not None
    gradient[17] = math.nan
    run(case.plan().bind(case.gradients), AdamSettings(amsgrad=True), lr=1e-3)
    for written in (case.params[4], *(state[4] for state in case.states)):
        assert written.isnan().nonzero().tolist() == [[17]]


@pytest.mark.gpu
@pytest.mark.skipif(not kernel_tools.CUDA, reason="no CUDA device")
@pytest.mark.parametrize("settings", VARIANTS[:4])
def test_steps_on_a_device_go_with_torchs_fused_optimizer(settings: AdamSettings) -> None:
    """Not to the bit: torch's CUDA kernel rounds betas to FP32 before it subtracts them from 1."""
    case, theirs = problem("cuda", amsgrad=settings.amsgrad, step=0), problem("cuda", step=0)
    for state in case.states:
        torch._foreach_zero_(state)
    options = {"lr": 3e-3, "weight_decay": settings.weight_decay, "amsgrad": settings.amsgrad, "fused": True}
    optimizer = (torch.optim.AdamW if settings.decoupled else torch.optim.Adam)(theirs.params, **options)
    plan = case.plan()
    for _ in range(20):
        gradients = [torch.randn_like(p) for p in case.params]
        for p, gradient in zip(theirs.params, gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        adam.launch(plan.bind(gradients), settings, lr=3e-3)
    for ours, p in zip(case.params, theirs.params, strict=True):
        torch.testing.assert_close(ours, p, rtol=1e-6, atol=1e-6)


# What is left alone


@every_form
@pytest.mark.parametrize("found", [1.0, 2.0])
def test_found_inf_leaves_every_bit(run: Any, device: str, found: float) -> None:
    case = problem(device, state=BF16, shadow=F16, amsgrad=True, step=0)
    before = [t.clone() for t in case.written()]
    settings = AdamSettings(weight_decay=0.1, amsgrad=True, rounding_seed=3)
    plan = case.plan()
    run(plan.bind(case.gradients), settings, lr=1e-3, found_inf=torch.tensor(found, device=device))
    assert all(kernel_tools.same_bits(a, b) for a, b in zip(case.written(), before, strict=True))
    # And the step after is the one that would have been without the skipped one, its random bits included.
    run(plan.bind(case.gradients), settings, lr=1e-3, found_inf=torch.tensor(0.0, device=device))
    other = problem(device, state=BF16, shadow=F16, amsgrad=True, step=0)
    run(other.plan().bind(other.gradients), settings, lr=1e-3)
    assert all(kernel_tools.same_bits(a, b) for a, b in zip(case.written(), other.written(), strict=True))


@every_form
def test_a_parameter_without_a_gradient_is_left_alone(run: Any, device: str) -> None:
    case = problem(device, shadow=F16)
    case.gradients[3] = case.gradients[4] = None
    before = [t.clone() for t in case.written()]
    run(case.plan().bind(case.gradients), AdamSettings(), lr=1e-3)
    assert case.shadows is not None
    groups = [case.params, *case.states, case.steps, case.shadows]
    alone = {id(group[i]) for group in groups for i in (3, 4)}
    for tensor, old in zip(case.written(), before, strict=True):
        assert kernel_tools.same_bits(tensor, old) == (id(tensor) in alone or tensor.numel() == 0)
    run(case.plan().bind([None] * len(SHAPES)), AdamSettings(), lr=1e-3)


# How it runs


@on_devices
@pytest.mark.parametrize(("offset", "count"), [(0, 300), (1, 30)])
def test_hundreds_of_tensors_of_as_many_sizes_are_one_launch(
    device: str, offset: int, count: int, monkeypatch: pytest.MonkeyPatch, fused_multiply_add: None
) -> None:
    shapes = [(3 * i,) for i in range(count)]
    case, expected = problem(device, shapes=shapes, shadow=F16), problem(shapes=shapes, shadow=F16)
    # At odd addresses too, where no wide access is allowed.
    case.params = [torch.cat([p.new_zeros(offset), p])[offset:] for p in case.params]
    launches = []
    monkeypatch.setattr(type(adam.adam_kernel), "__getitem__", counting(type(adam.adam_kernel), launches))
    bound = case.plan().bind(case.gradients)
    assert bound.aligned == (offset == 0)
    adam.launch(bound, AdamSettings(), lr=1e-3)
    assert launches == [(count,)]
    optim_references.adam(expected.plan().bind(expected.gradients), AdamSettings(), lr=1e-3)
    for a, b in zip(case.written(), expected.written(), strict=True):
        assert kernel_tools.same_bits(a.cpu(), b)


@pytest.mark.skipif(not kernel_tools.INTERPRETING, reason="looks into the interpreter")
@pytest.mark.parametrize("which", ["nothing", "gradients", "params", "states", "shadows"])
def test_each_tensor_promises_what_its_own_addresses_hold(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem("cpu", shapes=[(8,), (8,), (8,)], shadow=F16)
    lists = {"gradients": case.gradients, "params": case.params, "states": case.states[1], "shadows": case.shadows}
    if which != "nothing":
        lists[which][1] = torch.cat([torch.zeros(1, dtype=lists[which][1].dtype), lists[which][1]])[1:]
    chosen, chunk = [], adam.adam_chunk
    monkeypatch.setattr(adam, "adam_chunk", lambda *given: chosen.append(given[-3:-1]) or chunk(*given))
    adam.launch(case.plan().bind(case.gradients), AdamSettings(), lr=1e-3)
    odd = {"nothing": (True, True), "gradients": (False, True)}.get(which, (False, False))
    assert chosen == [(True, True), odd, (True, True)]


def counting(kind: Any, grids: list[Any]) -> Any:
    original = kind.__getitem__

    def launch(self: Any, grid: Any) -> Any:
        grids.append(grid)
        return original(self, grid)

    return launch


@on_devices
def test_a_channels_last_parameter_is_updated_in_its_own_order(device: str) -> None:
    case = problem(device, shapes=[(2, 8, 4, 4)])
    lists = [case.params, *case.states]
    for tensors in lists:
        tensors[0] = tensors[0].to(memory_format=torch.channels_last)
    truth = float64(case, AdamSettings(), lr=1e-3)
    adam.launch(case.plan().bind(case.gradients), AdamSettings(), lr=1e-3)  # the gradient is contiguous
    torch.testing.assert_close(case.params[0].double(), truth[0], rtol=3e-7, atol=3e-7)


# bfloat16 states


@every_form
@pytest.mark.parametrize("amsgrad", [False, True])
def test_low_states_are_rounded_to_nearest_and_the_parameter_does_not_see_it(
    run: Any, device: str, amsgrad: bool
) -> None:
    settings = AdamSettings(weight_decay=0.1, amsgrad=amsgrad)
    case = problem(device, state=BF16, amsgrad=amsgrad)
    wide = problem("cpu", state=BF16, amsgrad=amsgrad)
    wide.states = [[t.float() for t in state] for state in wide.states]
    truth = float64(case, settings, lr=3e-3)
    run(case.plan().bind(case.gradients), settings, lr=3e-3)
    optim_references.adam(wide.plan().bind(wide.gradients), settings, lr=3e-3)
    tolerance = 2.0**-7 if run is adam.launch and device == "cpu" else 2.0**-8
    for i, exact in enumerate(truth):
        torch.testing.assert_close(case.params[i].double(), exact, rtol=3e-7, atol=3e-7)
        for low, high in zip(case.states, wide.states, strict=True):
            torch.testing.assert_close(low[i].float().cpu(), high[i], rtol=tolerance, atol=1e-6)


@every_form
def test_stochastic_rounding_of_states_has_no_bias_and_depends_on_seed_step_and_index(run: Any, device: str) -> None:
    def after(seed: int | None, step: int = 5, indices: tuple[int, ...] = (0, 1)) -> Problem:
        case = problem(device, shapes=[(8192,), (4096,)], state=BF16, step=step)
        for tensors in (case.params, *case.states, case.gradients):
            for tensor in tensors:
                assert tensor is not None
                tensor.fill_(0.1)  # every element is the same: only chance tells them apart
        run(case.plan(indices=indices).bind(case.gradients), AdamSettings(rounding_seed=seed), lr=1e-3)
        return case

    one = after(7)
    start = torch.tensor(0.1).bfloat16().item()
    exact_m, exact_v = 0.9 * start + 0.1 * 0.1, 0.999 * start + 0.001 * 0.01
    for tensor, exact in ((one.states[0][0], exact_m), (one.states[1][0], exact_v)):
        values = tensor.double().unique()
        assert len(values) == 2 and values[0] < exact < values[1], "its two neighbours"
        deviation = (values[1] - values[0]).item() / 2 / math.sqrt(8192)
        assert abs(tensor.double().mean().item() - exact) < 5 * deviation
    (m, v), up = (one.states[0][0], one.states[1][0]), lambda x: (x.double() > x.double().mean()).double()
    agreement = (up(m) - up(m).mean()).mul(up(v) - up(v).mean()).mean() / (up(m).std() * up(v).std())
    assert abs(agreement.item()) < 0.06, "the two states round independently"
    same, *others = [after(7), after(8), after(7, step=6), after(7, indices=(1, 0)), after((1 << 62) + 7)]
    assert torch.equal(one.states[1][0], same.states[1][0])
    assert not any(torch.equal(one.states[1][0], other.states[1][0]) for other in others)
    # Parameters are the same whatever was drawn: they see the states before rounding.
    assert torch.equal(one.params[0], after(None).params[0])


@on_devices
def test_chunks_and_blocks_draw_by_element(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def after(chunk: int) -> Tensor:
        case = problem(device, shapes=[(16384 + 700,)], state=BF16)
        monkeypatch.setattr(tables, "chunk_size", lambda _: chunk)
        adam.launch(case.plan().bind(case.gradients), AdamSettings(rounding_seed=1), lr=1e-3)
        return case.states[0][0]

    assert torch.equal(after(8192), after(16384))


# What is refused


@pytest.mark.parametrize("scalar", ["found_inf", "grad_scale"])
def test_a_scalar_that_is_none_is_refused_and_nothing_changes(scalar: str) -> None:
    case = problem()
    before = [t.clone() for t in case.written()]
    bad = torch.tensor(1.0, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"{scalar} must be one float32"):
        adam.launch(case.plan().bind(case.gradients), AdamSettings(), lr=1e-3, **{scalar: bad})
    assert all(kernel_tools.same_bits(a, b) for a, b in zip(case.written(), before, strict=True))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"betas": (1.0, 0.9)}, r"betas must be in \[0, 1\)"),
        ({"betas": (0.9, -0.1)}, r"betas must be in \[0, 1\)"),
        ({"betas": (0.9, math.nan)}, r"betas must be in \[0, 1\)"),
        ({"eps": -1e-8}, "eps must be finite and not negative"),
        ({"eps": math.nan}, "eps must be finite"),
        ({"weight_decay": math.inf}, "weight_decay must be finite"),
        ({"rounding_seed": -1}, "rounding_seed must be in"),
        ({"rounding_seed": 1 << 63}, "rounding_seed must be in"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(AdamSettings(), **wrong)


# What the compiler makes of it


def compiled(
    architecture: int = 90,
    *,
    gradient: torch.dtype = F16,
    param: torch.dtype = F32,
    state: torch.dtype = F32,
    shadow: torch.dtype | None = F16,
    **flags: bool,
) -> Any:
    from fxprec.kernels.launch.triton_support import triton_dtype

    pointers = {"chunks": "*i32", "entries": "*i64", "gradients": "*i64", "arrivals": "*i32", "seed": "i64"}
    pointers |= dict.fromkeys(("lr", "grad_scale", "found_inf"), "*fp32")
    constants = {
        "GRADIENT_DTYPE": triton_dtype(gradient), "PARAM_DTYPE": triton_dtype(param),
        "STATE_DTYPE": triton_dtype(state), "SHADOW_DTYPE": triton_dtype(shadow), "DECAY": True, "DECOUPLED": True,
        "AMSGRAD": False, "MAXIMIZE": False, "STOCHASTIC": False, "FROM_GRADIENT": False, "ALIGNED": True,
        "CHUNK": 8192, "BLOCK": adam._BLOCK, **flags,
    }  # fmt: skip
    return kernel_tools.compiled(adam.adam_kernel, architecture, UPDATE_WARPS, pointers, constants)


@kernel_tools.compiles
@pytest.mark.parametrize("architecture", kernel_tools.ARCHITECTURES)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_float32_moves_16_bytes_at_a_time_and_nothing_spills(architecture: int, amsgrad: bool) -> None:
    kernel = compiled(architecture, AMSGRAD=amsgrad)
    wide = 4 if amsgrad else 3  # parameter and states; halves go 8 bytes at a time, of the same four elements
    assert len(re.findall(r"ld\.global[.\w]*v4\.b32", kernel.ptx)) == wide
    assert len(re.findall(r"st\.global[.\w]*v4\.b32", kernel.ptx)) == wide
    assert len(re.findall(r"(?:ld|st)\.global[.\w]*v2\.b32", kernel.ptx)) == 2
    assert kernel.spills == 0 and kernel.registers <= 80


@kernel_tools.compiles
@pytest.mark.parametrize("amsgrad", [False, True])
def test_beside_odd_addresses_each_tensor_goes_by_its_own(amsgrad: bool) -> None:
    """Three loops: all aligned, all but the gradient, and none of it."""
    kernel, wide = compiled(ALIGNED=False, AMSGRAD=amsgrad), 4 if amsgrad else 3
    assert len(re.findall(r"(?:ld|st)\.global[.\w]*v4\.b32", kernel.ptx)) == 2 * wide + 2 * wide
    assert len(re.findall(r"(?:ld|st)\.global[.\w]*v2\.b32", kernel.ptx)) == 2 + 1
    assert kernel.spills == 0 and kernel.registers <= 96


@kernel_tools.compiles
@pytest.mark.parametrize(
    ("dtypes", "amsgrad", "total"),
    [
        ({"gradient": F16, "shadow": F16}, False, 28),
        ({"gradient": BF16, "shadow": BF16}, False, 28),
        ({"gradient": F32, "shadow": None}, False, 28),
        ({"gradient": F16, "state": BF16, "shadow": F16}, False, 20),
        ({"gradient": BF16, "param": BF16, "state": BF16, "shadow": None}, False, 14),
        ({"gradient": F16, "shadow": F16}, True, 36),
    ],
)
def test_the_bytes_of_the_update_are_those_of_its_loop(dtypes: dict[str, Any], amsgrad: bool, total: int) -> None:
    loads, stores = compiled(**dtypes, AMSGRAD=amsgrad).moved_in_the_loop()
    assert loads + stores == total


@kernel_tools.compiles
def test_arithmetic_is_rounded_as_ieee_says_and_nothing_is_approximate() -> None:
    ptx = compiled().ptx
    assert not re.search(r"approx|(?<!\babs)\.ftz|div\.full", ptx)  # abs.ftz: a comparison in libdevice's float64 exp
    assert "sqrt.rn.f32" in ptx and "div.rn.f32" in ptx and "fma.rn.f32" in ptx


@kernel_tools.compiles
def test_the_step_is_counted_after_every_thread_has_read_it() -> None:
    ptx = compiled().ptx
    assert len(re.findall(r"\batom\.", ptx)) == 1, "one a program"
    barrier, arrival = ptx.index("bar.sync"), ptx.index("atom.global.gpu.acq_rel")
    assert barrier < arrival and not re.search(r"ld\.global.*\n.*\bld\.global", ptx[barrier:arrival])


@kernel_tools.compiles
def test_random_words_stay_in_their_threads_and_four_elements_share_a_draw() -> None:
    plain, stochastic = compiled(state=BF16), compiled(state=BF16, STOCHASTIC=True)
    assert stochastic.ptx.count("ld.shared") == plain.ptx.count("ld.shared") and "shfl" not in stochastic.ptx
    draws = (stochastic.ptx.count("mul.hi.u32") - plain.ptx.count("mul.hi.u32")) / 20  # two a round, ten rounds
    assert 0 < draws <= 2, "one in the loop and one in the tail, for the four elements of a thread"
    assert stochastic.spills == 0
