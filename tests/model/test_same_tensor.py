"""A tensor that the original program hooks, or writes by another name, is one tensor in the rewritten graph as well."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxprec

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.g = nn.Parameter(torch.full((8,), 1.5))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def model_of(function):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Model(function)


def gradients(model):
    """The gradients of the weights by all that the model returns, and of its input."""
    x = X.clone().requires_grad_()
    returned = model(x)
    returned = returned if isinstance(returned, tuple) else (returned,)
    sum((each.float() * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in returned).backward()
    return [each.grad for each in model.parameters() if each.grad is not None] + [x.grad]


def thrice(gradient):
    return 3 * gradient


def after_use(m, x):
    h = m.a(x)
    y = m.b(h)
    h.register_hook(thrice)
    return y


def zeroed(m, x):
    h = m.a(x)
    y = m.b(h)
    h.register_hook(lambda gradient: gradient * 0)
    return y


def clamped(m, x):
    h = m.a(x)
    y = m.b(h)
    h.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return y + h


def returned_too(m, x):
    h = m.a(x)
    y = m.b(h)
    h.register_hook(thrice)
    return y, h


def read_in_several_places(m, x):
    h = F.gelu(m.a(x))
    y = m.b(h) + m.b(2 * h)
    h.register_hook(thrice)
    return y


def of_a_residual(m, x):
    h = x + m.a(x)
    y = m.b(h)
    h.register_hook(thrice)
    return y + h


def before_use(m, x):
    h = m.a(x)
    h.register_hook(thrice)
    return m.b(h)


def twice(m, x):
    h = m.a(x)
    y = m.b(h)
    h.register_hook(thrice)
    h.register_hook(lambda gradient: gradient + 0.1)
    return y + m.b(h)


def in_a_checkpoint(m, x):
    def body(h):
        z = m.b(h)
        w = m.b(z.relu())
        z.register_hook(thrice)
        return w

    return checkpoint(body, m.a(x), use_reentrant=False)


def written_through_a_view(m, x):
    h = m.a(x)
    row = h[0]
    h.register_hook(thrice)
    row.zero_()
    return m.b(h)


def on_a_view_that_is_written(m, x):
    h = m.a(x)
    flat = h.view(-1)
    flat.register_hook(thrice)
    flat *= 1.5
    return m.b(h)


HOOKED = [
    written_through_a_view,
    on_a_view_that_is_written,
    after_use,
    zeroed,
    clamped,
    returned_too,
    read_in_several_places,
    of_a_residual,
    before_use,
    pytest.param(
        twice,
        marks=pytest.mark.skipif(
            torch.__version__.startswith("2.11."),
            reason="two hooks of one tensor are wrong under torch.compile(backend='eager') of torch 2.11 as well",
        ),
    ),
    in_a_checkpoint,
]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("function", HOOKED)
def test_a_hook_gets_and_changes_the_gradient_of_all_readers(function, level):
    expected = gradients(model_of(function))
    lowered, _ = fxprec.convert(model_of(function), dtype=torch.bfloat16, capture="dynamo", level=level)
    found = gradients(lowered)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 0.02 * other.abs().max() + 1e-6


@pytest.mark.parametrize("part", ["norm", "b"])
def test_a_hook_of_a_forward_hook(part):
    def hooked():
        model = model_of(lambda m, x: m.b(m.norm(m.a(x))))

        def scale(module, inputs, output):
            inputs[0].register_hook(lambda gradient: 0.1 * gradient)

        getattr(model, part).register_forward_hook(scale)
        return model

    expected = gradients(hooked())
    lowered, _ = fxprec.convert(hooked(), dtype=torch.bfloat16)
    for one, other in zip(gradients(lowered), expected, strict=True):
        assert (one - other).abs().max() <= 0.02 * other.abs().max() + 1e-6


def mixed(m, x):
    w = m.g.softmax(0)
    h = w[0] * m.a(x) + w[1] * m.b(x)
    return m.b(h), h


@pytest.mark.parametrize(
    "function",
    [lambda m, x: (m.b(h := m.a(x) * m.g[0]), h), lambda m, x: (m.b(h := m.g[0] * m.a(x)), h.relu(), h), mixed],
)
def test_a_returned_value_that_may_be_low_has_a_gradient(function):
    """Without inputs nobody knows that ``g[0]`` is 0-dim, and does not widen what it is multiplied with."""
    found = []
    for module in (model_of(function), fxprec.convert(model_of(function), dtype=torch.bfloat16, capture="symbolic")[0]):
        y, *_, h = module(X)
        h.retain_grad()
        y.sum().backward()
        found.append(h.grad)
        assert h.dtype == torch.float32
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)


def written(cast):
    def function(m, x):
        h = m.a(x)
        y = cast(m, h, x)
        y.mul_(3)
        return m.b(h) + y

    return function


CASTS = {
    "type_as": lambda m, h, x: h.type_as(x),
    "to a tensor": lambda m, h, x: h.to(x),
    "to its dtype": lambda m, h, x: h.to(x.dtype),
    "to a low tensor's dtype": lambda m, h, x: h.to(m.b(h).dtype),
    "to itself": lambda m, h, x: h.to(h),
    "to a weight": lambda m, h, x: h.to(m.a.weight),
    "to device and dtype": lambda m, h, x: h.to(x.device, x.dtype),
    "to a tensor in bfloat16": lambda m, h, x: h.to(x.bfloat16()),
    "type_as one in bfloat16": lambda m, h, x: h.type_as(x.bfloat16()),
    "copied": lambda m, h, x: h.to(x, copy=True),
}


@pytest.mark.parametrize("options", [{"capture": "symbolic"}, {"capture": "dynamo"}, {"level": "O2"}], ids=str)
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_cast_that_did_nothing_is_the_tensor_itself(cast, options):
    expected = model_of(written(cast))(X)
    lowered, _ = fxprec.convert(model_of(written(cast)), dtype=torch.bfloat16, **options)
    assert (lowered(X) - expected).abs().max() < 0.02 * expected.abs().max()
