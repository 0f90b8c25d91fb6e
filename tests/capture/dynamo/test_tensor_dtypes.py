"""tensor_dtypes: a dtype that a forward asks of a tensor is told from one that the user named, however it is written.

Each function is traced by dynamo under the net, where the result of ``m.fc`` is bfloat16 and FP32 in the original.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

import fxprec

BF16, FP32 = torch.bfloat16, torch.float32
#: What bfloat16's eps is by chance: a scale of 1/128.
EPS = torch.finfo(BF16).eps


class Model(nn.Module):
    """Calls a function with itself and its input, (4, 4)."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.low = nn.Linear(4, 4).bfloat16()
        self.register_buffer("mean", torch.ones(4, dtype=BF16))
        self.scale, self.out_dtype = EPS, BF16
        self.function = types.MethodType(function, self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def both(function: Any, x: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of the model and of the converted one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(function).eval()
    x = torch.randn(4, 4) if x is None else x
    expected = model(x)
    lowered, _ = fxprec.convert(model, dtype=BF16, capture="dynamo", **options)
    return expected.detach(), lowered(x).detach()


def stored(m, x):
    m.asked = m.fc(x).dtype
    return x.to(m.asked)


def given(m, x):
    return cast_like(x, dtype=m.fc(x).dtype)


def cast_like(x, dtype):
    return x.to(dtype)


def in_a_body(m, x):
    h = m.fc(x)
    return torch.utils.checkpoint.checkpoint(lambda y: y.to(h.dtype) + h, x, use_reentrant=False)


def by_string(m, x):
    return x.type(m.fc(x).type())


def filled(m, x):
    h = m.fc(x)
    return torch.zeros(h.shape, dtype=h.dtype).index_add_(0, torch.arange(4), h)


ASKED = {
    "to": lambda m, x: x.to(m.fc(x).dtype),
    "keyword": lambda m, x: x.to(dtype=m.fc(x).dtype),
    "half": lambda m, half: half.to(m.fc(half).dtype),
    "function": lambda m, x: torch.ops.aten.to.dtype(x, m.fc(x).dtype),
    "stored": stored,
    "given": given,
    "in a body": in_a_body,
    "by string": by_string,
    "filled": filled,
    "linspace": lambda m, x: torch.linspace(0, 1, 4, dtype=m.fc(x).dtype),
    "new": lambda m, x: x.new_full((4,), 2, dtype=m.fc(x).dtype),
    "summed": lambda m, x: x.sum(0, dtype=m.fc(x).dtype),
    "softmax": lambda m, x: torch.softmax(x, -1, dtype=m.fc(x).dtype),
    "random": lambda m, x: torch.ones(4, 4, dtype=m.fc(x).dtype) * x,
    "promoted": lambda m, x: x.to(torch.promote_types(m.fc(x).dtype, m.fc(x).dtype)),
    "of a sum with a low one": lambda m, x: x.to((m.fc(x) + m.mean).dtype),
}


@pytest.mark.parametrize("function", ASKED.values(), ids=ASKED)
def test_a_dtype_asked_of_a_tensor_is_that_of_the_original(function):
    expected, found = both(function)
    assert (expected.dtype, found.dtype) == (FP32, FP32)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def user_autocast(m, x):
    with torch.autocast("cpu", BF16):
        h = m.fc(x)
    return x.to(h.dtype)


NAMED = {
    "literal": lambda m, x: m.fc(x).to(torch.bfloat16),
    "on a line of its own": lambda m, x: m.fc(x).to(
        dtype=torch.bfloat16,
    ),
    "method": lambda m, x: m.fc(x).bfloat16(),
    "attribute": lambda m, x: m.fc(x).to(m.out_dtype),
    "asked of a cast": lambda m, x: x.to(m.fc(x).bfloat16().dtype),
    "autocast of the user's": user_autocast,
    "filled": lambda m, x: torch.zeros(4, dtype=m.out_dtype) + m.fc(x).bfloat16().sum(),
}


@pytest.mark.parametrize("function", NAMED.values(), ids=NAMED)
def test_a_dtype_that_the_user_named_is_obeyed(function):
    expected, found = both(function)
    assert (expected.dtype, found.dtype) == (BF16, BF16)


OWN = {
    "input": lambda m, x: m.fc(x.float()).to(x.dtype),
    "made of one": lambda m, x: m.fc(x.float()).to((2 * x).dtype),
    "buffer": lambda m, x: m.fc(x.float()).to(m.mean.dtype),
    "parameter": lambda m, x: m.low(m.fc(x.float()).to(m.low.weight.dtype)),
    "in a body": lambda m, x: torch.utils.checkpoint.checkpoint(
        lambda y: m.fc(y).to(m.mean.dtype), x.float(), use_reentrant=False
    ),
    "created": lambda m, x: torch.ones(4, dtype=x.dtype) * x,
    "eps": lambda m, x: x + torch.finfo(x.dtype).eps,
    "eps of a cast": lambda m, x: m.fc(x.float()).bfloat16() * 0 + torch.finfo(m.fc(x.float()).bfloat16().dtype).eps,
}


@pytest.mark.parametrize("function", OWN.values(), ids=OWN)
def test_the_dtype_of_what_is_low_in_the_original_is_its_own(function):
    expected, found = both(function, torch.randn(4, 4).bfloat16())
    assert (expected.dtype, found.dtype) == (BF16, BF16)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)


def test_numbers_that_only_equal_the_eps_are_the_users():
    def scaled(m, x):
        h = m.fc(x)
        h = h / (h.norm(dim=-1, keepdim=True) + torch.finfo(h.dtype).eps)
        return h * m.scale + torch.finfo(torch.bfloat16).eps

    expected, found = both(scaled)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-4)


def held(m, x):
    limits = torch.finfo(m.fc(x).dtype)
    return x.sum() * 0 + torch.full((4,), limits.eps)


LIMITS = {
    "eps": (lambda m, x: torch.full((4,), torch.finfo(m.fc(x).dtype).eps), torch.finfo(FP32).eps),
    "held": (held, torch.finfo(FP32).eps),
    "tiny": (lambda m, x: torch.full((4,), torch.finfo(m.fc(x).dtype).tiny), torch.finfo(FP32).tiny),
    "keyword": (lambda m, x: torch.full((4,), torch.finfo(type=m.fc(x).dtype).resolution), 1e-6),
    "min": (lambda m, x: torch.full((4,), torch.finfo(m.fc(x).dtype).min), torch.finfo(BF16).min),
    "named": (lambda m, x: torch.full((4,), torch.finfo(torch.bfloat16).eps), EPS),
}


@pytest.mark.parametrize(("function", "number"), LIMITS.values(), ids=LIMITS)
def test_how_fine_a_dtype_is_is_asked_of_the_original(function, number):
    _, found = both(function)
    assert found.tolist() == pytest.approx([number] * 4, rel=1e-6)


def test_a_clamp_by_eps_keeps_what_the_original_keeps():
    def clamped(m, x):
        probs = m.fc(x).sigmoid()
        eps = torch.finfo(probs.dtype).eps
        return probs.clamp(eps, 1 - eps).log()

    expected, found = both(clamped, 30 * torch.randn(64, 4))
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
