"""A linear of a few outputs more than are asked for: torch's values and gradients, in rows that lie apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_tools
from fxprec.kernels.nn.aligned_linear import aligned_linear, pitch_of

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not kernel_tools.CUDA, reason="no CUDA device")]),
]
LOW = torch.bfloat16


def operands(classes: int, device: str, bias: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(3, 5, 24), (classes, 24), (classes,)][: 2 + bias]
    return [torch.randn(shape).to(device, LOW).requires_grad_() for shape in shapes]


def gradients(function: Any, given: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    y = function(*given)
    return [y.detach(), *torch.autograd.grad(y, given, cotangent)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("classes", [1, 7, 8, 37, 1003])
def test_values_and_gradients_are_as_near_to_float64_as_torchs(device: str, classes: int, bias: bool) -> None:
    given = operands(classes, device, bias)
    cotangent = torch.randn(3, 5, classes).to(device, LOW)
    own = gradients(aligned_linear, given, cotangent)
    theirs = gradients(F.linear, given, cotangent)
    exact = gradients(F.linear, [x.detach().double().requires_grad_() for x in given], cotangent.double())
    for mine, other, right in zip(own, theirs, exact, strict=True):
        assert mine.shape == other.shape and mine.dtype is LOW
        off, theirs_off = ((x.double() - right).abs().max().item() for x in (mine, other))
        assert off <= 2 * theirs_off + 2.0**-9 * right.abs().max().item()
    assert own[0].stride(-2) == pitch_of(classes, 2) and own[0].stride(-2) * 2 % 16 == 0


def test_it_is_differentiated_twice_and_written_in_place() -> None:
    given = [x.detach().double().requires_grad_() for x in operands(7, "cpu")]
    assert torch.autograd.gradgradcheck(aligned_linear, given)
    x, weight, bias = operands(7, "cpu")
    y = aligned_linear(x, weight, bias).mul_(2)
    assert torch.equal(y, F.linear(x, weight, bias) * 2)
    y.sum().backward()
    assert bias.grad is not None and bias.grad.tolist() == [30.0] * 7


def test_only_what_lacks_something_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    padded: list[Any] = []
    pad = F.pad
    monkeypatch.setattr(F, "pad", lambda x, widths: padded.append((*x.shape, *widths)) or pad(x, widths))
    for classes in (8, 37):
        y = aligned_linear(*operands(classes, "cpu"))
        y.backward(torch.ones_like(y))
    assert padded == [(37, 24, 0, 0, 0, 3), (37, 0, 3), (15, 37, 0, 3), (37, 24, 0, 0, 0, 3)]


def test_nothing_is_recorded_where_nothing_is_wanted() -> None:
    given = operands(7, "cpu")
    with torch.no_grad():
        assert aligned_linear(*given).grad_fn is None
    assert aligned_linear(*(x.detach() for x in given)).grad_fn is None
