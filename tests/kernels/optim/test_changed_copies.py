"""Copies that are made on the device when a weight's elements are others than those that were noted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernel_tools
from fxprec.kernels.cpu.words import SAMPLES, sampled_addresses
from fxprec.kernels.optim import changed_copies
from fxprec.kernels.optim.changed_copies import ChangedCopies

SHAPES = [(5, 3), (), (8192,), (20001,), (300, 7)]
by_device = pytest.mark.parametrize("device", kernel_tools.DEVICES)


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


def made(device: str, dtype: torch.dtype, offset: int = 0) -> tuple[list[Tensor], list[Tensor], ChangedCopies, Tensor]:
    torch.manual_seed(0)
    weights = []
    for shape in SHAPES:
        count = torch.Size(shape).numel()
        weights.append(torch.randn(count + offset, device=device)[offset:].view(shape))
    copies = [weight.to(dtype) for weight in weights]
    rows = [3, 0, 4, 1, 2]
    found = ChangedCopies(weights, copies, [sampled_addresses(weight) for weight in weights], rows)
    return weights, copies, found, torch.zeros(5 * SAMPLES, dtype=torch.int32, device=device)


def fresh(weights: list[Tensor], copies: list[Tensor]) -> list[bool]:
    # Triton's interpreter does not round bfloat16 to nearest: 1 ulp.
    ulp = 2.0**-7 if kernel_tools.INTERPRETING and copies[0].dtype == torch.bfloat16 else 0.0
    return [
        torch.allclose(w, copy.float(), rtol=ulp, atol=0) if ulp else torch.equal(w.to(copy.dtype), copy)
        for w, copy in zip(weights, copies, strict=True)
    ]


@by_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_a_write_to_any_weight_has_all_copied(device: str, dtype: torch.dtype, offset: int) -> None:
    weights, copies, looks, values = made(device, dtype, offset)
    looks.note(values)
    for position, weight in enumerate(weights):
        weight.mul_(3)
        others = weights[position - 1]
        others.view(-1)[others.numel() // 5] += 1  # no sample where there are more elements than samples
        assert not all(fresh(weights, copies))
        looks.launch(values)
        assert all(fresh(weights, copies))


@by_device
def test_nothing_is_copied_while_the_samples_stay(device: str) -> None:
    weights, copies, looks, values = made(device, torch.bfloat16)
    looks.note(values)
    for copy in copies:
        copy.zero_()
    for _ in range(2):
        looks.launch(values)
        assert all(not copy.any() for copy in copies)
    weights[0].mul_(2)
    looks.note(values)  # as after a copy: it is no change
    looks.launch(values)
    assert all(not copy.any() for copy in copies)
    weights[0].mul_(2)
    looks.launch(values)
    assert all(fresh(weights, copies))
    for copy in copies:
        copy.zero_()
    looks.launch(values)
    assert all(not copy.any() for copy in copies)


@by_device
def test_bits_are_compared(device: str) -> None:
    weights, copies, looks, values = made(device, torch.bfloat16)
    weights[2].fill_(float("nan"))
    looks.note(values)
    copies[0].zero_()
    looks.launch(values)  # NaN is what it was
    assert not copies[0].any()
    weights[2].zero_()
    looks.note(values)
    weights[2].neg_()
    looks.launch(values)
    assert torch.signbit(copies[2]).all() and copies[0].any()


@kernel_tools.compiles
@pytest.mark.parametrize("architecture", kernel_tools.ARCHITECTURES)
def test_the_kernels_compile(architecture: int) -> None:
    pointers = {"addresses": "*i64", "places": "*i32", "values": "*i32", "changed": "*i32", "count": "i32"}
    look = kernel_tools.compiled(
        changed_copies.look_kernel, architecture, 4, pointers, {"NOTE_ONLY": False, "BLOCK": changed_copies._LOOK_BLOCK}
    )
    pointers = {"chunks": "*i32", "entries": "*i64", "arrivals": "*i32", "changed": "*i32"}
    from fxprec.kernels.launch.triton_support import tl

    constants = {"COPY_DTYPE": tl.bfloat16, "ALIGNED": True, "CHUNK": 8192, "BLOCK": changed_copies._COPY_BLOCK}
    copy = kernel_tools.compiled(changed_copies.copy_kernel, architecture, 4, pointers, constants)
    assert look.spills == copy.spills == 0
