"""max_pool2d of channels_last: torch's results to the bit, gradients as near to float64 as eager's, one byte saved."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_tools
from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.kernels.nn import max_pool
from fxprec.kernels.nn.max_pool import max_pool2d

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LOOP = pytest.param("loop", id="loop", marks=pytest.mark.skipif(why_not() != "", reason=why_not()))
#: Plain torch, a compiled loop, Triton's interpreter, a device.
PLACES = [pytest.param("cpu", id="plain"), LOOP, *kernel_tools.DEVICES]
every_place = pytest.mark.parametrize("device", PLACES)
#: Shape; kernel_size, stride and padding.
POOLS: dict[str, tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = {
    "halves": ((2, 16, 6, 8), ((2, 2), (2, 2), (0, 0))),
    "halves of odd sizes": ((2, 5, 7, 9), ((2, 2), (2, 2), (0, 0))),
    "resnet": ((2, 5, 7, 9), ((3, 3), (2, 2), (1, 1))),
    "every pixel": ((1, 3, 5, 6), ((3, 3), (1, 1), (1, 1))),
    "uneven": ((1, 16, 8, 8), ((3, 2), (1, 3), (1, 0))),
    "gaps": ((2, 3, 6, 7), ((2, 2), (3, 4), (1, 1))),
    "one pixel": ((3, 7, 1, 1), ((1, 1), (1, 1), (0, 0))),
    "one window": ((1, 1, 5, 4), ((5, 4), (5, 4), (0, 0))),
    "the largest": ((1, 2, 12, 12), ((11, 11), (4, 4), (5, 5))),
    "many channels": ((1, 1030, 3, 3), ((2, 2), (1, 1), (0, 0))),
}


def pooled(device: str, x: Tensor, *pool: tuple[int, int]) -> Tensor:
    return max_pool2d(x, *pool, compiled=device == "loop")


def there(device: str) -> str:
    return "cpu" if device == "loop" else device


def values(shape: tuple[int, ...], device: str, dtype: torch.dtype = F32, steps: int = 0) -> Tensor:
    """channels_last; of few different numbers, where asked for: with ties."""
    x = torch.randn(shape)
    x = (x * steps).round() / steps if steps else x
    return x.to(there(device), dtype).contiguous(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param(*each.values, dtype, id=f"{each.id}-{dtype}", marks=each.marks)
        for each in PLACES
        for dtype in (F32, F16, BF16)
        if (each is not LOOP) or dtype is not F16
    ],
)
@pytest.mark.parametrize("name", POOLS)
def test_results_are_torchs_and_gradients_are_near_float64(device: str, dtype: torch.dtype, name: str) -> None:
    shape, pool = POOLS[name]
    x = values(shape, device, dtype, steps=2)
    y = pooled(device, x, *pool)
    exact, low = x.detach().double().requires_grad_(), x.detach().requires_grad_()
    right = F.max_pool2d(exact, *pool)
    assert torch.equal(y.double(), right) and y.is_contiguous(memory_format=torch.channels_last)
    cotangent = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, cotangent)
    (truth,) = torch.autograd.grad(right, exact, cotangent.double())
    (eager,) = torch.autograd.grad(F.max_pool2d(low, *pool), low, cotangent)
    slack = 2.0**-7 if kernel_tools.INTERPRETING and dtype == BF16 else 2.0**-20  # it cuts in the place of rounding
    assert (dx - truth).abs().max() <= 2 * (eager - truth).abs().max() + slack * truth.abs().max()
    assert dx.dtype == dtype and dx.is_contiguous(memory_format=torch.channels_last)


@every_place
def test_a_nan_is_a_maximum_and_takes_the_gradient(device: str) -> None:
    for place, other in itertools.product(range(4), (-math.inf, math.inf, math.nan)):
        x = torch.full((1, 1, 2, 4), other)
        x[0, 0, place // 2, place % 2] = math.nan
        own, same = (
            x.to(there(device)).contiguous(memory_format=torch.channels_last).requires_grad_() for _ in range(2)
        )
        y, right = pooled(device, own, (2, 2), (2, 2)), F.max_pool2d(same, 2)
        assert torch.equal(y.isnan(), right.isnan()) and torch.equal(y.nan_to_num(), right.nan_to_num())
        found, expected = (torch.autograd.grad(out.sum(), leaf)[0] for out, leaf in ((y, own), (right, same)))
        assert torch.equal(found, expected)


@every_place
def test_windows_of_nothing_but_negative_infinity_choose_their_first(device: str) -> None:
    """As torch's on a CPU: that for channels_last on CUDA (2.11) gives their gradients to an image's first pixel."""
    x = torch.full((1, 2, 3, 3), -math.inf).contiguous(memory_format=torch.channels_last)
    own, same = x.to(there(device), copy=True).requires_grad_(), x.requires_grad_()
    pool = ((3, 3), (2, 2), (1, 1))
    found, expected = pooled(device, own, *pool), F.max_pool2d(same, *pool)
    assert torch.equal(found.cpu(), expected)
    gradients = [torch.autograd.grad(y.sum(), leaf)[0].cpu() for y, leaf in ((found, own), (expected, same))]
    assert torch.equal(*gradients)


@every_place
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4)])
def test_empty_tensors(device: str, shape: tuple[int, ...]) -> None:
    x = values(shape, device)
    y = pooled(device, x, (2, 2), (2, 2))
    assert y.shape == (*shape[:2], 2, 2) and torch.autograd.grad(y.sum(), x)[0].shape == shape


@every_place
def test_other_layouts_are_copied(device: str) -> None:
    x = torch.randn(2, 6, 5, 7, device=there(device)).requires_grad_()
    y = pooled(device, x, (2, 2), (1, 1))
    assert torch.equal(y, F.max_pool2d(x, 2, 1))
    cotangent = torch.randn(y.shape, device=x.device)  # contiguous, where y is not
    (dx,) = torch.autograd.grad(y, x, cotangent)
    assert torch.allclose(dx, torch.autograd.grad(F.max_pool2d(x, 2, 1), x, cotangent)[0])


def test_what_is_saved_is_a_byte_a_result() -> None:
    x, saved = values((2, 16, 8, 8), "cpu", BF16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.dtype) or each, lambda each: each):
        max_pool2d(x, (2, 2), (2, 2))
    assert saved == [torch.int8]
    y, where = torch.ops.fxprec.max_pool2d(x.detach(), [2, 2, 2, 2, 0, 0], True, False)
    assert where.dtype == torch.int8 and where.shape == y.shape == (2, 16, 4, 4)
    assert 0 <= where.min() and where.max() <= 3


@every_place
def test_without_gradients_no_places_are_written(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, results = values((2, 16, 8, 8), device, BF16), []
    launch = max_pool._POOL.launch
    monkeypatch.setattr(max_pool._POOL, "launch", lambda *args: results.append(launch(*args)) or results[-1])
    with torch.no_grad():
        y = pooled(device, x, (2, 2), (2, 2))
    assert torch.equal(y, F.max_pool2d(x, 2)) and results[0][1].numel() == 0


def test_samples_of_too_many_pixels_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pool, "can_launch", lambda device: True)
    monkeypatch.setattr(max_pool, "_PIXELS", 32)
    monkeypatch.setattr(max_pool, "_launch", lambda *args: pytest.fail("launched"))
    x = values((1, 3, 4, 8), "cpu")
    assert torch.equal(max_pool2d(x, (2, 2), (2, 2)), F.max_pool2d(x, 2))


@pytest.mark.parametrize("device", [pytest.param("cpu", id="plain"), LOOP])
def test_derivatives_of_any_order_and_the_op(device: str) -> None:
    x = torch.randperm(2 * 2 * 4 * 4).double().view(2, 2, 4, 4).contiguous(memory_format=torch.channels_last) / 8
    x = x.float().requires_grad_()
    torch.library.opcheck(torch.ops.fxprec.max_pool2d.default, (x, [3, 3, 2, 2, 1, 1], True, device == "loop"))
    y = pooled(device, x, (3, 3), (2, 2), (1, 1))
    (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), x)
    (right,) = torch.autograd.grad((F.max_pool2d(x, 3, 2, 1) ** 3).sum(), x, create_graph=True)
    assert torch.allclose(second, torch.autograd.grad(right.sum(), x)[0])
    compiled = torch.compile(lambda z: pooled(device, z, (2, 2), (2, 2)), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), F.max_pool2d(x, 2))


BAD: dict[str, tuple[Any, str]] = {
    "no image": ((torch.zeros(3, 4, 4), (2, 2), (2, 2)), r"takes \[N, C, H, W\]"),
    "larger than the image": ((torch.zeros(1, 1, 2, 2), (3, 3), (1, 1)), "at least 1"),
    "padding of more than half": ((torch.zeros(1, 1, 4, 4), (2, 2), (1, 1), (2, 0)), "at most half"),
    "a negative padding": ((torch.zeros(1, 1, 4, 4), (2, 2), (1, 1), (-1, 0)), "at most half"),
    "a stride of none": ((torch.zeros(1, 1, 4, 4), (2, 2), (0, 1)), "at least 1"),
    "a large window": ((torch.zeros(1, 1, 20, 20), (12, 12), (1, 1)), "at most 127"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        max_pool2d(*arguments)
    with pytest.raises(TypeError, match="float64"):
        max_pool2d(torch.zeros(1, 1, 4, 4, dtype=torch.float64), (2, 2), (2, 2))


@pytest.mark.parametrize("dtype", [F16, torch.float64])
def test_what_no_loop_serves_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises((ValueError, TypeError), match=r"compiled=True\) serves|float64"):
        max_pool2d(torch.zeros(1, 1, 4, 4, dtype=dtype), (2, 2), (2, 2), compiled=True)
    with pytest.raises(ValueError, match="on 'meta'"):
        max_pool2d(torch.zeros(1, 1, 4, 4, device="meta"), (2, 2), (2, 2), compiled=True)


@pytest.mark.skipif(why_not() != "", reason=why_not())
@pytest.mark.parametrize("threads", [1, 3])
def test_loops_of_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    x = values((3, 33, 9, 11), "cpu", BF16, steps=2)
    torch.set_num_threads(threads)
    try:
        y = max_pool2d(x, (3, 3), (2, 2), (1, 1), compiled=True)
        (dx,) = torch.autograd.grad(y.float().square().sum(), x)
    finally:
        torch.set_num_threads(before)
    wide = x.detach().float().requires_grad_()
    right = F.max_pool2d(wide, 3, 2, 1)
    assert torch.equal(y.float(), right)
    assert torch.allclose(dx.float(), torch.autograd.grad(right.square().sum(), wide)[0], rtol=2.0**-7)


@every_place
def test_places_may_come_back_in_another_layout(device: str) -> None:
    """From hooks of saved tensors, as those that keep them elsewhere."""
    x = values((2, 5, 6, 8), device)
    grads = []
    for pack in (lambda each: each, lambda each: each.clone(memory_format=torch.contiguous_format)):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            y = pooled(device, x, (3, 3), (2, 2), (1, 1))
        grads.append(torch.autograd.grad((y**2).sum(), x)[0])
    assert torch.equal(*grads)


@every_place
def test_negated_memory(device: str) -> None:
    x = values((2, 5, 6, 8), device).detach()
    assert torch.equal(pooled(device, torch._neg_view(-x), (2, 2), (2, 2)), F.max_pool2d(x, 2))


def test_a_backward_without_places_is_refused() -> None:
    x = values((1, 16, 8, 8), "cpu")
    y, _ = torch.ops.fxprec.max_pool2d(x, [2, 2, 2, 2, 0, 0], False, False)
    with pytest.raises(RuntimeError, match="saved=False"):
        y.sum().backward()
