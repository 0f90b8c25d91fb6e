"""Loops of their own: any length and offset, several threads, defaults and modes of the caller, and clear errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

from fxprec.kernels.launch.triton_support import HAS_TRITON
from fxprec.optim import SGD, AdamW, compiled_loop, compiled_update
from fxprec.optim.compiled_loop import LEAST, Loop, compiled, why_no_loop

PLAIN = Loop("sgd", "", False, (("params", torch.float32), ("grads", torch.bfloat16)))


@pytest.fixture
def threads() -> Iterator[int]:
    """Two, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_any_length_at_any_offset_by_several_threads(threads: int):
    run = compiled(PLAIN, threads)
    scalars = torch.tensor([0.5, 0.0, 0.0, 1.0, 0.1])
    generator = torch.Generator().manual_seed(0)
    for length in (1, 15, 16, 17, 1000, LEAST + 5):
        around = torch.randn(length + 7, generator=generator)
        gradients = torch.randn(length + 7, generator=generator).bfloat16()
        expected = around.clone()
        expected[3:-4] -= 0.1 * (0.5 * gradients[3:-4].float())
        run(scalars, around[3:-4], gradients[3:-4])
        torch.testing.assert_close(around, expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(around[:3], expected[:3]) and torch.equal(around[-4:], expected[-4:])


def test_it_is_one_loop_that_goes_through_each_tensor_once():
    """What the docstring's 28 bytes stand on, and that no store comes before a load of the same element."""
    names = ("params", "grads", "exp_avg", "exp_avg_sq", "shadow")
    low = {"grads", "shadow"}
    dtypes = tuple((name, torch.bfloat16 if name in low else torch.float32) for name in names)
    metrics.reset()
    compiled.__wrapped__(Loop("adam", "decoupled", False, dtypes), torch.get_num_threads())
    assert metrics.generated_kernel_count == 1


def test_a_step_by_several_threads(threads: int):
    params = [nn.Parameter(torch.ones(LEAST + 5)), nn.Parameter(torch.ones(LEAST - 1))]
    optimizer = SGD(params, lr=0.5, compiled=True)
    for param in params:
        param.grad = torch.arange(param.numel(), dtype=torch.float32)
    assert optimizer.implementations() == {"compiled, one pass": 1, f"torch (fewer than {LEAST} elements)": 1}
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
    monkeypatch.setattr(compiled_loop, "LEAST", 100)
    monkeypatch.setattr(compiled_update, "compiled", compiled.__wrapped__)  # compiled here, not before
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
    def none() -> str:
        raise RuntimeError("no g++")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    with pytest.raises(RuntimeError, match=r"wants a C\+\+ compiler for parameters on a CPU \(no g\+\+\).*CXX"):
        cls([nn.Parameter(torch.ones(3))], lr=0.1, compiled=True)
    optimizer = cls([nn.Parameter(torch.ones(3, device="meta"))], lr=0.1, compiled=True)
    [(kernel, count)] = optimizer.implementations().items()
    assert kernel == ("torch (on meta)" if HAS_TRITON else "torch (Triton is not installed)") and count == 1


def test_what_has_no_loop():
    def reason(param: torch.Tensor, gradient: torch.Tensor | None = None) -> str | None:
        return why_no_loop(param, torch.ones_like(param) if gradient is None else gradient)

    param = torch.ones(LEAST)
    assert reason(param) is None and reason(param, param.half()) is None
    assert reason(param[1:]) == f"fewer than {LEAST} elements"
    assert reason(param.double()) == "torch.float64 with a gradient of torch.float64"
    assert reason(param, param.to_sparse()) == "sparse gradient"
    assert reason(param.to("meta")) == "on meta"
    assert reason(torch.ones(LEAST, 2)[:, 0]) == "not dense in memory"
    assert reason(torch.ones(256, 256).t()) is None
