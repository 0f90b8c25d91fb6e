"""The pass over the gradients: the sum of squares, what counts as found, and that every gradient is read once."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import kernel_tools
import optim_references
from fxprec.kernels.optim import norm
from fxprec.kernels.optim.tables import Gradients, MultiTensorPlan

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(5, 3), (0,), (), (8192,), (20001,), (2047,), (2048,)]
#: The pass in plain torch, in Triton's interpreter and on a device: (function, device).
FORMS = [
    pytest.param(optim_references.norm, "cpu", id="reference"),
    *[pytest.param(norm.launch, *param.values, id=param.id, marks=param.marks) for param in kernel_tools.DEVICES],
]
every_form = pytest.mark.parametrize(("run", "device"), FORMS)


def bind(gradients: list[Tensor | None]) -> Gradients:
    device = next((g.device for g in gradients if g is not None), "cpu")
    params = [torch.zeros(3 if g is None else g.shape, device=device) for g in gradients]
    return MultiTensorPlan(params).bind(gradients)


def gradients(dtype: torch.dtype, device: str, scale: float = 1.0) -> list[Tensor | None]:
    return [None, *[(torch.randn(shape) * scale).to(device, dtype) for shape in SHAPES]]


def exact(tensors: list[Tensor | None], factor: float = 1.0) -> float:
    return sum((t.double() * factor).square().sum().item() for t in tensors if t is not None)


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_of_squares_is_as_near_to_float64_as_eagers(run: Any, device: str, dtype: torch.dtype) -> None:
    tensors = gradients(dtype, device)
    eager = sum(t.float().square().sum() for t in tensors if t is not None)
    assert isinstance(eager, Tensor)
    result = run(bind(tensors))
    truth = exact(tensors)
    assert result.sum_of_squares.dtype == torch.float32 and result.sum_of_squares.shape == ()
    assert abs(result.sum_of_squares.item() - truth) <= 2 * abs(eager.item() - truth) + 2.0**-23 * truth
    assert result.found_inf.item() == 0


@every_form
@pytest.mark.parametrize("scale", [65536.0, 3.0])
def test_gradients_count_as_they_are_after_unscaling(run: Any, device: str, scale: float) -> None:
    tensors = gradients(torch.float16, device)
    result = run(bind(tensors), grad_scale=torch.tensor(scale, device=device))
    assert result.sum_of_squares.item() == pytest.approx(exact(tensors, 1 / scale), rel=1e-6)


@every_form
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("tensor", "element"), [(1, 0), (3, 0), (5, 0), (5, 8191), (5, 8192), (5, 20000), (6, 2046)])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(
    run: Any, device: str, value: float, tensor: int, element: int
) -> None:
    tensors = gradients(torch.float16, device)
    tensors[tensor].view(-1)[element] = value  # type: ignore[union-attr]
    result = run(bind(tensors))
    assert result.found_inf.item() == 1 and result.found_inf.dtype == torch.float32
    assert not math.isfinite(result.sum_of_squares.item())


@every_form
def test_finite_values_whose_squares_overflow_are_not_found(run: Any, device: str) -> None:
    tensors = gradients(torch.float32, device, scale=1e30)
    result = run(bind(tensors))
    assert math.isinf(result.sum_of_squares.item())
    assert result.found_inf.item() == 0


@every_form
def test_a_value_that_overflows_in_unscaling_is_found(run: Any, device: str) -> None:
    tensors: list[Tensor | None] = [torch.full((3,), 3e38, device=device)]
    result = run(bind(tensors), grad_scale=torch.tensor(0.5, device=device))
    assert result.found_inf.item() == 1


@every_form
def test_a_scale_of_zero_finds_no_more_than_the_values_say(run: Any, device: str) -> None:
    tensors: list[Tensor | None] = [torch.ones(5, device=device), torch.zeros(0, device=device)]
    assert run(bind(tensors), grad_scale=torch.tensor(0.0, device=device)).found_inf.item() == 1


@every_form
def test_no_gradient_at_all_is_a_norm_of_zero(run: Any, device: str) -> None:
    plan = MultiTensorPlan([torch.zeros(3, device=device), torch.zeros(0, device=device)])
    result = run(plan.bind([None, None]))
    assert result.sum_of_squares.item() == 0 and result.found_inf.item() == 0


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
def test_300_tensors_are_one_pass_and_the_same_bits_every_time(device: str) -> None:
    tensors: list[Tensor | None] = [torch.randn(1 + 7 * i % 50, device=device).half() for i in range(300)]
    results = [norm.launch(bind(tensors)) for _ in range(2)]
    assert results[0].sum_of_squares.item() == pytest.approx(exact(tensors), rel=1e-6)
    assert torch.equal(results[0].sum_of_squares, results[1].sum_of_squares)


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
def test_tensors_at_odd_addresses_give_the_same(device: str) -> None:
    tensor = torch.randn(5001, device=device).half()
    odd = tensor.new_empty(5002)[1:].copy_(tensor)
    bound = bind([odd])
    assert not bound.aligned
    results = [norm.launch(b) for b in (bind([tensor]), bound)]
    assert results[0].sum_of_squares.item() == pytest.approx(results[1].sum_of_squares.item(), rel=1e-6)


@pytest.mark.skipif(not kernel_tools.INTERPRETING, reason="looks into the interpreter")
def test_each_gradient_promises_what_its_own_address_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, chunk = [], norm.chunk_squares
    monkeypatch.setattr(norm, "chunk_squares", lambda *given: chosen.append(given[-2]) or chunk(*given))
    norm.launch(bind([torch.zeros(8), torch.zeros(9)[1:], torch.zeros(8)]))
    assert chosen == [True, False, True]


def test_a_scalar_of_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grad_scale must be one float32 number.*got torch.float64"):
        norm.launch(bind([torch.zeros(3)]), grad_scale=torch.tensor(1.0, dtype=torch.float64))


# What the compiler makes of it


def compiled(architecture: int, gradient: torch.dtype, aligned: bool = True) -> Any:
    from fxprec.kernels.launch.triton_support import triton_dtype

    pointers = {"chunks": "*i32", "entries": "*i64", "gradients": "*i64", "flags": "*i32"}
    pointers |= {"grad_scale": "*fp32", "sums": "*fp32"}
    constants = {"GRADIENT": triton_dtype(gradient), "ALIGNED": aligned, "CHUNK": 8192, "BLOCK": norm._BLOCK}
    return kernel_tools.compiled(norm.norm_kernel, architecture, norm._WARPS, pointers, constants)


@kernel_tools.compiles
@pytest.mark.parametrize("architecture", kernel_tools.ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pass_reads_16_bytes_at_a_time_and_spills_nothing(architecture: int, dtype: torch.dtype) -> None:
    kernel = compiled(architecture, dtype)
    loop_loads = re.findall(r"ld\.global[.\w]*v4\.b32", kernel.ptx)
    assert len(loop_loads) == norm._BLOCK // (32 * norm._WARPS) * dtype.itemsize // 16
    assert kernel.spills == 0 and kernel.registers <= 80
    assert not re.search(r"\b(atom|red)\.", kernel.ptx), "an order of its own every time"


@kernel_tools.compiles
def test_beside_odd_addresses_each_gradient_goes_by_its_own() -> None:
    kernel, alone = (compiled(90, torch.float16, aligned=aligned) for aligned in (False, True))
    wide, narrow = r"ld\.global[.\w]*v4\.b32", r"ld\.global[.\w]*\.b16"
    assert len(re.findall(wide, kernel.ptx)) == len(re.findall(wide, alone.ptx))
    assert len(re.findall(narrow, kernel.ptx)) > len(re.findall(narrow, alone.ptx))
    assert kernel.spills == 0 and kernel.registers <= 80


@kernel_tools.compiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_of_the_pass_are_those_of_its_loop(dtype: torch.dtype) -> None:
    assert compiled(90, dtype).moved_in_the_loop() == (dtype.itemsize, 0)
