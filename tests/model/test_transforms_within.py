"""``torch.func``'s transforms within a forward, of values that are low there: casts stay outside of what they wrap."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import fxprec


class Sine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Net(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.a(x))


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
@pytest.mark.parametrize("function", [
    lambda m, h: grad(lambda t: Sine.apply(t).sum())(h),
    lambda m, h: grad(lambda t: t.sin().sum())(h),
    lambda m, h: grad(lambda t: m.b(t).square().sum())(h),
    lambda m, h: vjp(m.b, h)[1](m.a(h))[0],
    lambda m, h: jvp(m.b, (h,), (h,))[1],
    lambda m, h: jacrev(lambda t: m.b(t).square().sum(0))(h),
    lambda m, h: hessian(lambda t: m.b(t).exp().sum())(h[0]),
    lambda m, h: vmap(grad(lambda t: m.b(t).exp().sum()))(h),
    lambda m, h: grad(lambda t: (t * h.exp()).sum())(h) + h.exp(),  # a cast within serves nobody outside
    lambda m, h: grad(lambda t: m.b(t).square().sum())(h) + grad(lambda t: (t.exp() * h.exp()).sum())(h),
])  # fmt: skip
def test_they_give_what_the_original_gives(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    original, x = Net(function), torch.randn(4, 8)
    converted, _ = fxprec.convert(copy.deepcopy(original), dtype=torch.bfloat16)
    expected = original(x)
    torch.testing.assert_close(converted(x), expected, rtol=0, atol=0.03 * float(expected.abs().max()))
