"""rope as a compiled loop: to the bit what plain torch computes, which ``test_rope`` holds against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.kernels.nn.rope import rope, rope_qk

BF16, F32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
every_pair = pytest.mark.parametrize("interleaved", [False, True])
every_dtype = pytest.mark.parametrize("dtype", [BF16, F32])
#: D, what turns: parts of a vector of pairs, half of two, whole ones, more; and columns that pass.
WIDTHS = [(2, 2), (8, 6), (16, 16), (20, 18), (32, 32), (40, 34), (64, 64), (70, 66), (128, 96)]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a part": lambda x: torch.stack((x, x), 2).transpose(1, 3)[:, :, 1].transpose(1, 2),
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "columns apart": lambda x: torch.stack((x, x), -1)[..., 0],
    "columns first": lambda x: x.mT.contiguous().mT,
}


def tables(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


@every_pair
@every_dtype
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
def test_values_and_gradients_are_plain_torchs(
    widths: tuple[int, int], wide: bool, dtype: torch.dtype, interleaved: bool
) -> None:
    dim, rotary = widths
    for batch in ((), (1,), (2,)):
        for of in (BF16, F32):
            cos, sin = tables((*batch, 5, rotary if wide else rotary // 2), of)
            for shape in ((2, 3, 5, dim), (2, 5, dim), (5, dim)):
                if batch and len(shape) == 2:
                    continue
                x, dy = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
                ways = [
                    rope(x, cos, sin, interleaved=interleaved, rotary_dim=rotary, compiled=compiled)
                    for compiled in (True, False)
                ]
                assert torch.equal(*ways)
                assert torch.equal(*(torch.autograd.grad(y, x, dy)[0] for y in ways))


@every_pair
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_comes_back_in_its_own(name: str, interleaved: bool) -> None:
    x, (cos, sin) = LAYOUTS[name](torch.randn(2, 3, 5, 48)).bfloat16(), tables((2, 5, 24), F32)
    cos, sin = cos.mT.contiguous().mT, torch.stack((sin, sin), 1)[:, 0]
    x.requires_grad_()
    y = rope(x, cos, sin, interleaved=interleaved, compiled=True)
    right = rope(x, cos, sin, interleaved=interleaved)
    assert y.stride() == right.stride() and torch.equal(y, right)
    for dy in (torch.randn(y.shape).bfloat16(), torch.randn(2, 5, 3, 48).bfloat16().transpose(1, 2)):
        assert torch.equal(*(torch.autograd.grad(each, x, dy, retain_graph=True)[0] for each in (y, right)))


@pytest.mark.slow
def test_queries_and_keys_of_their_own_heads_and_any_derivative() -> None:
    (cos, sin), q, k = tables((5, 8), F32), torch.randn(2, 4, 5, 16).bfloat16(), torch.randn(2, 1, 5, 16)
    q, k = q.requires_grad_(), k.requires_grad_()
    torch.library.opcheck(torch.ops.fxprec.rope_qk.default, (q, k, cos, sin, 16, False, False, True))
    both, right = (rope_qk(q, k, cos, sin, compiled=compiled) for compiled in (True, False))
    assert all(map(torch.equal, both, right))
    found, expected = (
        torch.autograd.grad(
            sum(
                each.sum()
                for each in torch.autograd.grad((a.float() ** 3).sum() + (b**3).sum(), (q, k), create_graph=True)
            ),
            (q, k),
        )
        for a, b in (both, right)
    )
    assert all(map(torch.equal, found, expected))
    compiled = torch.compile(lambda x: rope(x, cos, sin, compiled=True), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), both[0])


def test_what_is_not_finite_reaches_its_pair_only_and_empty_ones_stay_empty() -> None:
    cos, sin = tables((4, 8), F32)
    x = torch.randn(3, 4, 8)
    x[0, 1, 2], x[1, 2, 7] = torch.inf, torch.nan
    assert (~rope(x, cos, sin, compiled=True).isfinite()).nonzero().tolist() == [
        [0, 1, 2],
        [0, 1, 6],
        [1, 2, 3],
        [1, 2, 7],
    ]
    for shape in ((0, 4, 8), (2, 0, 4, 8)):
        assert rope(torch.zeros(shape), cos, sin, compiled=True).shape == shape


def test_refusals() -> None:
    cos, sin = tables((4, 8), F32)
    with pytest.raises(ValueError, match=r"rope\(compiled=True\) serves bfloat16 and float32 on a CPU.*float16"):
        rope(torch.zeros(3, 4, 8, dtype=torch.float16), cos, sin, compiled=True)
    with pytest.raises(ValueError, match=r"rope_qk\(compiled=True\) .*float16"):
        rope_qk(torch.zeros(3, 4, 8), torch.zeros(3, 4, 8, dtype=torch.float16), cos, sin, compiled=True)
    with pytest.raises(ValueError, match="cos and sin of one dtype"):
        rope(torch.zeros(3, 4, 8), cos, sin.bfloat16(), compiled=True)
    with pytest.raises(ValueError, match="on 'meta'"):
        rope(*(torch.zeros(4, 8, device="meta") for _ in range(3)), compiled=True)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads: int) -> None:
    before, x, (cos, sin) = torch.get_num_threads(), torch.randn(2, 3, 7, 24).bfloat16(), tables((7, 24), BF16)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(rope(x, cos, sin, compiled=True), rope(x, cos, sin))
    finally:
        torch.set_num_threads(before)
