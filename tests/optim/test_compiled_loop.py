"""Loops: any lengths and offset, several threads, defaults and modes of the caller, and clear errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxprec.kernels.cpu import cpp
from fxprec.kernels.launch.triton_support import HAS_TRITON
from fxprec.optim import SGD, AdamW, kernel_updates
from fxprec.optim.kernel_updates import compiled, macros
from fxprec.optim.parts import why_no_loop

PLAIN = macros({}, torch.bfloat16, None)


@pytest.fixture
def threads() -> Iterator[int]:
    """Two, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_any_lengths_at_any_offsets_by_several_threads(threads: int):
    run = compiled(PLAIN)
    generator = torch.Generator().manual_seed(0)
    members, expected, wholes = [], [], []
    for length in (1, 0, 15, 16, 17, 1000, 0, (1 << 14) - 1, 1 << 14, (1 << 16) + 5, 0):
        around = torch.randn(length + 7, generator=generator)
        gradients = torch.randn(length + 7, generator=generator).bfloat16()
        after = around.clone()
        rate = 0.1 + 0.01 * len(members)
        after[3 : 3 + length] -= rate * (0.5 * gradients[3 : 3 + length].float())
        scalars = torch.tensor([0.5, 0.0, 0.0, 1.0, rate])
        members.append({"params": around[3 : 3 + length], "grads": gradients[3 : 3 + length], "scalars": scalars})
        expected.append(after)
        wholes.append(around)
    run({name: [member[name] for member in members] for name in members[0]})
    for around, after in zip(wholes, expected, strict=True):
        torch.testing.assert_close(around, after, rtol=1e-6, atol=1e-7)
        assert torch.equal(around[:3], after[:3]) and torch.equal(around[-4:], after[-4:])
    run({name: [members[1][name]] for name in members[1]})  # nothing at all


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shadow", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_of_gradient_and_shadow_is_rounded_once(gradient: torch.dtype, shadow: torch.dtype):
    loop = macros({"L2": True}, gradient, shadow)
    params = torch.randn(1003)
    params[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40])
    before, grads, low = params.double(), torch.randn(1003).to(gradient), torch.zeros(1003, dtype=shadow)
    scalars = torch.tensor([2.0, 0.25, 0.0, 1.0, 0.125])
    compiled(loop)({"params": [params], "grads": [grads], "shadow": [low], "scalars": [scalars]})
    exact = before - 0.125 * (2 * grads.double() + 0.25 * before)
    torch.testing.assert_close(params, exact.float(), rtol=3e-7, atol=1e-7, equal_nan=True)
    assert torch.equal(low.nan_to_num(7.0), params.to(shadow).nan_to_num(7.0))


def test_a_step_by_several_threads(threads: int):
    params = [nn.Parameter(torch.ones(70_000)), nn.Parameter(torch.ones(3))]
    optimizer = SGD(params, lr=0.5, compiled=True)
    for param in params:
        param.grad = torch.arange(param.numel(), dtype=torch.float32)
    assert optimizer.implementations() == {"compiled, one pass": 2}
    optimizer.step()
    for param in params:
        assert torch.equal(param.detach(), 1 - 0.5 * torch.arange(param.numel(), dtype=torch.float32))


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around", ["dtype", "device", "mode"])
def test_defaults_and_modes_of_the_caller_do_not_matter(around: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_updates, "compiled", compiled.__wrapped__)  # found here, not before
    param = nn.Parameter(torch.ones(200))
    param.grad = torch.full((200,), 3.0)
    optimizer = SGD([param], lr=0.5, compiled=True)
    mode = Counting()
    if around == "dtype":
        torch.set_default_dtype(torch.float64)
        try:
            optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        with torch.device("meta") if around == "device" else mode:
            optimizer.step()
    assert torch.equal(param.detach(), torch.full((200,), -0.5))
    assert not any("sub" in name or "lerp" in name for name in mode.seen)


@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_without_a_compiler_it_says_so_at_once(cls: type[AdamW | SGD], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpp, "_compiler", lambda: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"wants a C\+\+ compiler for parameters on a CPU \(no C\+\+ .*g\+\+.*CXX"):
        cls([nn.Parameter(torch.ones(3))], lr=0.1, compiled=True)
    optimizer = cls([nn.Parameter(torch.ones(3, device="meta"))], lr=0.1, compiled=True)
    [(kernel, count)] = optimizer.implementations().items()
    assert kernel == ("torch (on meta)" if HAS_TRITON else "torch (Triton is not installed)") and count == 1


def test_what_has_no_loop():
    def reason(param: torch.Tensor, gradient: torch.Tensor | None = None) -> str | None:
        return why_no_loop(param, torch.ones_like(param) if gradient is None else gradient)

    param = torch.ones(8, 2)
    assert reason(param) is None and reason(param, param.half()) is None and reason(param.t()) is None
    assert reason(param.double()) == "torch.float64 with a gradient of torch.float64"
    assert reason(param, param.to_sparse()) == "sparse gradient"
    assert reason(param.to("meta")) == "on meta"
    assert reason(param[:, 0]) == "not dense in memory"
    with FakeTensorMode():
        assert reason(torch.ones(3)) == "a FakeTensor, which has no memory of its own"
