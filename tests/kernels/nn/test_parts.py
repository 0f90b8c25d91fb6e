"""parts: views as torch cuts them, and a gradient that lies as the tensor does, of whatever parts have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxprec.kernels.nn import parts as file
from fxprec.kernels.nn.parts import copy_wide, join, joins, parts

CUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "queries, keys, values": ((2, 5, 3, 2, 16), lambda x: x.permute(2, 0, 3, 1, 4).unbind(0)),
    "one row each": ((3, 7), lambda x: x.unbind()),
    "columns": ((2, 5, 48), lambda x: x.split(16, dim=2)),
    "uneven": ((2, 5, 23), lambda x: x.split((16, 4, 3), dim=-1)),
    "chunks": ((4, 22), lambda x: x.chunk(2, dim=-1)),
    "rows": ((7, 6), lambda x: x.chunk(3)),
    "empty": ((0, 6), lambda x: x.chunk(2, -1)),
}


def gradient(x: Tensor, cut: Callable[[Tensor], Any], read: list[int] | None = None, **options: Any) -> Tensor:
    torch.manual_seed(1)
    pieces = cut(x)
    total = sum((pieces[i] * torch.randn_like(pieces[i])).sum() for i in read or range(len(pieces)))
    return torch.autograd.grad(total, x, **options)[0]


@pytest.mark.parametrize(("shape", "cut"), CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_values_and_gradients_are_torchs(shape: Any, cut: Any, dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype).requires_grad_()
    for own, right in zip(parts(x, cut), cut(x), strict=True):
        assert torch.equal(own, right) and own.stride() == right.stride() and own.data_ptr() == right.data_ptr()
    if not dtype.is_complex:
        for read in (None, [1]):
            found = gradient(x, lambda y: parts(y, cut), read)
            assert torch.equal(found, gradient(x, cut, read)) and found.stride() == x.stride()


def test_a_gradient_lies_as_the_tensor_does() -> None:
    base = torch.randn(2, 5, 3, 2, 16).requires_grad_()
    x = base.permute(2, 0, 3, 1, 4)
    found = gradient(x, lambda y: parts(y, torch.unbind))
    assert found.stride() == x.stride() and gradient(x, torch.unbind).stride() != x.stride()
    gaps = torch.randn(6, 8)[:, :4].requires_grad_()  # with room between its rows
    assert gradient(gaps, lambda y: parts(y, torch.unbind)).is_contiguous()


@pytest.mark.parametrize(("shape", "cut"), [*CUTS.values()][:5], ids=[*CUTS][:5])
def test_derivatives_of_any_order(shape: Any, cut: Any) -> None:
    x = torch.randn([min(n, 6) if n > 16 else n for n in shape][-3:], dtype=torch.float64).requires_grad_()

    def halves(y: Tensor) -> list[Tensor]:
        return [piece**3 for piece in parts(y, lambda z: z.split(1, dim=0))[:2]]

    assert torch.autograd.gradcheck(halves, (x,)) and torch.autograd.gradgradcheck(halves, (x,))


def test_without_gradients_there_is_no_node() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with torch.no_grad():
        assert all(each.grad_fn is None for each in parts(x, torch.unbind))
    assert all(each.grad_fn is None for each in parts(x.detach(), torch.unbind))


def test_parts_without_a_gradient_are_zeros_and_without_any_there_is_none() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    first, *_ = parts(x, torch.unbind)
    first.sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0] * 4, [0.0] * 4, [0.0] * 4]))


WIDE = {
    "rows": (lambda: torch.zeros(5, 3, 16, dtype=torch.bfloat16)[:, 1], torch.complex128),
    "eight bytes": (lambda: torch.zeros(5, 3, 12, dtype=torch.bfloat16)[:, 1], torch.int64),
    "four bytes": (lambda: torch.zeros(5, 3, 6, dtype=torch.bfloat16)[:, 1], torch.int32),
    "FP32": (lambda: torch.zeros(5, 3, 6)[:, 1], torch.int64),
    "odd": (lambda: torch.zeros(5, 3, 7, dtype=torch.bfloat16)[:, 1], None),
    "odd strides": (lambda: torch.zeros(5, 17, dtype=torch.bfloat16)[:, :16], None),
    "off by one": (lambda: torch.zeros(5, 24, dtype=torch.bfloat16)[:, 1:17], None),
    "off by four": (lambda: torch.zeros(5, 24, dtype=torch.bfloat16)[:, 4:20], torch.int64),
    "columns apart": (lambda: torch.zeros(16, 8, dtype=torch.bfloat16)[:, ::2], None),
    "transposed": (lambda: torch.zeros(16, 8, dtype=torch.bfloat16).t(), torch.complex128),
    "channels last": (
        lambda: torch.zeros(2, 3, 5, 16, dtype=torch.bfloat16).permute(0, 3, 1, 2)[:, 8:],
        torch.complex128,
    ),
    "no dim": (lambda: torch.zeros((), dtype=torch.bfloat16), None),
    "as wide as words": (lambda: torch.zeros(2, 2, dtype=torch.complex128), None),
}


@pytest.mark.parametrize(("make", "word"), WIDE.values(), ids=WIDE)
def test_copies_in_the_widest_words(make: Any, word: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = make(), []
    original = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda x, y: seen.append((x.dtype, y.dtype)) or original(x, y))
    source = torch.empty_like(target).copy_(torch.randn(target.shape))
    seen.clear()
    copy_wide(target, source)
    assert torch.equal(target, source) and seen == [(word or target.dtype,) * 2]


def laid_out(*shape: int, layout: torch.memory_format = torch.channels_last) -> Tensor:
    return torch.randn(shape).bfloat16().contiguous(memory_format=layout).requires_grad_()


JOINED = {
    "channels last": ([laid_out(2, 8, 3, 5), laid_out(2, 16, 3, 5)], 1),
    "three": ([laid_out(2, 8, 3, 5) for _ in range(3)], -3),
    "contiguous": ([laid_out(4, 3, 8, layout=torch.contiguous_format) for _ in range(2)], 2),
    "pixels": ([laid_out(4, 8, 1, 1), laid_out(4, 16, 1, 1)], 1),
    "vectors": ([torch.randn(8).bfloat16().requires_grad_(), torch.randn(16).bfloat16().requires_grad_()], 0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("tensors", "dim"), JOINED.values(), ids=JOINED)
def test_joined_as_torch_does_and_gradients_lie_as_the_tensors(tensors: list[Tensor], dim: int) -> None:
    assert joins(tensors, dim)
    own, right = join(tensors, dim), torch.cat(tensors, dim)
    assert torch.equal(own, right) and own.stride() == right.stride()
    cotangent = torch.randn_like(own)
    for x, found, other in zip(
        tensors, *(torch.autograd.grad(y, tensors, cotangent) for y in (own, right)), strict=True
    ):
        assert torch.equal(found, other) and found.stride() == x.stride()
    one = torch.autograd.grad(join([tensors[0].detach(), *tensors[1:]], dim), tensors[1], cotangent)[0]
    assert torch.equal(one, torch.autograd.grad(right, tensors[1], cotangent)[0])
    wide = [x.detach()[:2].double().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(lambda *xs: join(xs, dim), wide)
    assert torch.autograd.gradgradcheck(lambda *xs: join(xs, dim) ** 2, wide, atol=1e-4)


NOT_JOINED = {
    "another dim": ([laid_out(2, 8, 3, 5), laid_out(2, 8, 3, 5)], 2),
    "layouts mixed": ([laid_out(2, 8, 3, 5), laid_out(2, 8, 3, 5, layout=torch.contiguous_format)], 1),
    "odd channels": ([laid_out(2, 8, 3, 5), laid_out(2, 9, 3, 5)], 1),
    "dtypes mixed": ([laid_out(2, 8, 3, 5), laid_out(2, 8, 3, 5).float()], 1),
    "sizes that do not fit": ([laid_out(2, 8, 3, 5), laid_out(2, 8, 1, 5)], 1),
    "dims that do not fit": ([laid_out(2, 8, 3, 5), torch.zeros(0).bfloat16()], 1),
    "room between rows": ([laid_out(2, 16, 3, 5)[:, :8], laid_out(2, 8, 3, 5)], 1),
}


@pytest.mark.parametrize(("tensors", "dim"), NOT_JOINED.values(), ids=NOT_JOINED)
def test_not_joined(tensors: list[Tensor], dim: int) -> None:
    assert not joins(tensors, dim)


def test_a_source_that_does_not_hold_words_is_copied_by_values() -> None:
    target, source = torch.zeros(8, 16, dtype=torch.bfloat16), torch.randn(16, 8).bfloat16().t()
    copy_wide(target, source)
    assert torch.equal(target, source)
    assert file._WORDS[0][0] == torch.complex128.itemsize


@pytest.mark.parametrize(
    "source",
    [torch.randn(3, 8).half(), torch.randn(3, 8, dtype=torch.complex64).conj(), torch.randn(3, 8).double()],
    ids=["another dtype", "conjugated when it is read", "a wider dtype"],
)
def test_a_source_whose_bytes_are_not_its_values_is_copied_by_values(source: Tensor) -> None:
    others = {torch.float16: torch.bfloat16, torch.float64: torch.float32}
    target = torch.zeros(3, 8, dtype=others.get(source.dtype, source.dtype))
    copy_wide(target, source)
    assert torch.equal(target, source.to(target.dtype))
