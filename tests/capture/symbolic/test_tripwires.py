"""Temporary replacements: always taken back, and only this thread trips."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled, nn

import fxprec
from fxprec.capture.capturing import replaced
from fxprec.capture.symbolic.opaque_code import TRIPWIRES, tripwires


class Declined(Exception):
    pass


def decline(what: str) -> None:
    raise Declined(what)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


double = Double.apply  # as torch's notes on extending autograd have it


@pytest.mark.parametrize("error", [Declined, KeyboardInterrupt, None])
def test_taken_back_whatever_is_raised(error: type[BaseException] | None) -> None:
    before = [vars(owner).get(name) for owner, name, _ in TRIPWIRES]
    if error is None:
        with replaced([*tripwires(decline), (nn.Module, "__getattribute__", object.__getattribute__)]):
            assert "__getattribute__" in vars(nn.Module)
    else:
        with pytest.raises(error), replaced([*tripwires(decline), (nn.Module, "__getattribute__", None)]):
            raise error
    assert [vars(owner).get(name) for owner, name, _ in TRIPWIRES] == before
    assert "__getattribute__" not in vars(nn.Module)


def test_taken_back_if_a_replacement_fails() -> None:
    with pytest.raises(TypeError), replaced([(nn.Module, "added", 1), (int, "added", 1)]):
        pass
    assert not hasattr(nn.Module, "added")


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.no_grad().__enter__(),
        lambda: torch.enable_grad().__enter__(),
        lambda: torch.set_grad_enabled(False),
        lambda: torch.inference_mode().__enter__(),
        lambda: torch.is_grad_enabled(),
        lambda: torch.autocast("cpu").__enter__(),
        lambda: Double.apply(torch.ones(1)),
        lambda: double(torch.ones(1)),
    ],
)
def test_trips_before_anything_changes(call: Any) -> None:
    with replaced(tripwires(decline)), pytest.raises(Declined):
        call()
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")


def test_other_threads_do_not_trip() -> None:
    seen: list[Any] = []

    def work() -> None:
        with torch.no_grad():
            seen.append(torch.is_grad_enabled())
        x = torch.ones(1, requires_grad=True)
        Double.apply(x).backward()
        seen.append(x.grad.item())

    with replaced(tripwires(decline)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [False, 2.0]


class Layers(nn.Module):
    """A layer, and something that ends or asks for gradients by a name that was bound before the trace."""

    def __init__(self, way: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.held, self.way = nn.Linear(3, 3), Double.apply, way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, self.layer(x))


@pytest.mark.parametrize(
    "way",
    [
        lambda self, h: double(h * 1.0),
        lambda self, h: self.held(h),
        lambda self, h: h * 2 if is_grad_enabled() else h,
        lambda self, h: h if is_inference_mode_enabled() else h * 2,
    ],
)
def test_names_that_were_bound_before_the_trace(way: Any) -> None:
    x = torch.randn(2, 3)
    model = Layers(way)
    modes = (torch.enable_grad, torch.no_grad, torch.inference_mode)

    def results() -> list[Tensor]:
        found = []
        for mode in modes:
            with mode():
                found.append(model(x).float())
        model.zero_grad()
        found[0].sum().backward()
        assert model.layer.bias.grad is not None
        return [*found, model.layer.bias.grad.clone()]

    expected = results()
    fxprec.convert(model)
    torch.testing.assert_close(results(), expected, rtol=0.02, atol=0.02, check_dtype=False)
