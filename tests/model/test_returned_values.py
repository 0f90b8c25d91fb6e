"""What a model returns lies on the gradient's path: its gradient is there, as in the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fxprec

BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.function = nn.Linear(4, 6), nn.Linear(6, 3), nn.LayerNorm(6), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)

    def scores(self, x: Tensor) -> Any:
        return self.function(self, x)


def product(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    return m.b(h), h


def activation(m: Net, x: Tensor) -> Any:
    h = F.gelu(m.a(x))
    return m.b(h), h


def several(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    g = torch.relu(h)
    return m.b(g), {"h": h, "g": [g, g]}


def widened(m: Net, x: Tensor) -> Any:
    h = m.a(x).float()
    return m.b(h), h


def normalized(m: Net, x: Tensor) -> Any:
    h = m.norm(m.a(x))
    return m.b(h), h


def pointwise(m: Net, x: Tensor) -> Any:
    h = F.gelu(m.a(x))
    y = torch.tanh(h) * 2
    return m.b(y), h, y


def viewed(m: Net, x: Tensor) -> Any:
    h = m.a(x).view(-1, 2, 3)
    return m.b(h.flatten(1)), h


def chunked(m: Net, x: Tensor) -> Any:
    h, g = m.a(x).chunk(2, -1)
    return m.b(torch.cat([h, g], -1)), h, g


def written(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    h.add_(1)
    return m.b(h), h


def written_without_gradients(m: Net, x: Tensor) -> Any:
    """The returned cast comes behind the write, but not in its grad mode."""
    h = m.a(x)
    with torch.no_grad():
        h.clamp_(-0.5, 0.5)
        h[0] = 0.25
    return m.b(h), h


def cast_to_its_own_dtype(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    g = h.to(h.dtype)
    return m.b(h) + m.b(g), g, h.type_as(h), h.type(h.dtype), h.real


def cast_back_and_read(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    o = torch.relu(h @ h.t() @ h).to(h.dtype)
    p = m.a(x).type_as(h)
    return m.b(o) + m.b(p) + m.b(p.to(o)), o, p


def cast_as_another(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    y = m.b(h)
    g = x.new_zeros(5, 6) + m.a(x)
    z = m.b(g)
    return y + z, h.type_as(x), g.to(x.dtype)


def sum_cast_as_another(m: Net, x: Tensor) -> Any:
    h = x[:, :1] + m.a(x)
    y = m.b(h)
    return y, h.to(x)


def sum_cast_by_name(m: Net, x: Tensor) -> Any:
    h = x[:, :1] + m.a(x)
    y = m.b(h)
    return y, h.float()


def strided(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    return m.b(h).sum() + h.as_strided((4, 2, 6), (6, 6, 1)).square().sum(), h


def residual(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    y = h + m.norm(h)
    return m.b(y), h, y


def contiguous(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    return m.b(h), h.contiguous()


def idle_dropout(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    return m.b(h), F.dropout(h, 0.0)


def itself_in_many_ways(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    g = F.dropout(h.contiguous().flatten(1), 0.5, False)
    return m.b(h), g.cpu(), +h, torch.atleast_2d(g)


def itself_read_again(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    g = h.contiguous()
    return m.b(h) + m.b(g), g, h.resolve_conj()


def contiguous_or_not(m: Net, x: Tensor) -> Any:
    """Of the first eager has the very tensor, of the second a copy."""
    h = m.a(x)
    g = h.t()
    return m.b(h) + g.sum(), h.contiguous(), g.contiguous()


class Pair(NamedTuple):
    """What a forward may return: a named tuple, which a graph makes by a call."""

    out: Tensor
    hidden: Tensor


def named(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    return Pair(m.b(h), h)


def checkpointed(m: Net, x: Tensor) -> Any:
    def block(t: Tensor) -> Any:
        h = m.a(t)
        return m.b(h), h

    return checkpoint(block, x, use_reentrant=False)


def checkpointed_twice(m: Net, x: Tensor) -> Any:
    """The result of an inner region is read in the outer one, and behind both."""

    def inner(t: Tensor) -> Any:
        h = m.a(t)
        return torch.relu(h), h

    def block(t: Tensor) -> Any:
        g, h = checkpoint(inner, t, use_reentrant=False)
        return m.b(g + h), {"h": h}

    out, held = checkpoint(block, x, use_reentrant=False)
    return out + m.b(held["h"]), held["h"]


def broken(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    torch._dynamo.graph_break()
    return m.b(h), h


def broken_later(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    y = m.b(h)
    torch._dynamo.graph_break()
    return y * 2, h


def one_of_several(m: Net, x: Tensor) -> Any:
    """Each access to a result gives the very tensor: by name, by position, from the end."""
    t, u, v, w = m.a(x).topk(2), m.a(x).sort(), m.a(x).max(-1), m.a(x).cummax(-1)
    y = m.b(m.a(x)) * (t.values.sum() + u[0].sum() + v[-2].sum() + w.values.sum())
    return y, t.values, u.values, v[0], w[0]


def one_of_several_more(m: Net, x: Tensor) -> Any:
    t, u = m.a(x).median(-1), torch.aminmax(m.a(x), dim=-1)
    v, w = F.max_pool1d(m.a(x), 2, return_indices=True), m.a(x).chunk(2, -1)
    y = m.b(m.a(x)) * (t.values.sum() + u.max.sum() + v[0].sum() + (w[0] @ w[1].T).sum())
    return y, t.values, u.max, v[0], w[0]


def there_and_back(m: Net, x: Tensor) -> Any:
    """Nothing is lost on the way, which is the gradient's all the same."""
    d, e = m.a(x).double(), m.a(x).exp().double()
    f = m.a(x).exp().double().float()
    return m.b(d.float()) + m.b(e.float()) + m.b(f).exp(), d, e, f


def stored(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    m.kept = h
    return m.b(h)


def cast_and_read(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    v = h.to(x.dtype)
    return m.b(v) + m.b(h * 2), v


def cast_after_itself(m: Net, x: Tensor) -> Any:
    h = m.a(x)
    return m.b(h), h.flatten(1).float(), h.contiguous().to(torch.float32)


FUNCTIONS = [
    product, activation, several, widened, normalized, pointwise, viewed, chunked, written, written_without_gradients,
    cast_to_its_own_dtype, cast_back_and_read, strided, residual, named,
    checkpointed, checkpointed_twice, broken, broken_later, stored, contiguous, idle_dropout, itself_in_many_ways,
    itself_read_again, contiguous_or_not, one_of_several, one_of_several_more, there_and_back,
]  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "by inputs": {"by_inputs": True},
    "autocast's placement": {"placement": "autocast"},
    "O0": {"level": "O0"},
    "O2": {"level": "O2"},
    "O3": {"level": "O3"},
    "O3 by inputs": {"level": "O3", "by_inputs": True},
    "O3 by dynamo": {"level": "O3", "capture": "dynamo"},
    "fused": {"fuse": True},
    "nothing fused": {"fuse": False},
    "dynamo": {"capture": "dynamo"},
    "low outputs": {"keep_output_dtype": False},
}


def returned(model: Any, x: Tensor, call: str = "forward") -> list[Tensor]:
    """What a call gives, and what it stores."""
    out = model(x) if call == "forward" else getattr(model, call)(x)
    kept = model.__dict__.get("kept")
    return [each for each in [*tree_leaves(out), kept] if isinstance(each, Tensor)]


def gradients(model: Any, x: Tensor, call: str = "forward") -> list[Tensor | None]:
    first, *others = returned(model, x, call)
    loss = first.float().square().sum()
    return [*torch.autograd.grad(loss, others, allow_unused=True)]


def beside_its_cast(m: Net, x: Tensor) -> Any:
    h, g = m.a(x), m.a(x).sin()
    return m.b(h) + m.b(g), h.type_as(x), h, g, g.to(x.dtype)


CASTS = [cast_as_another, sum_cast_as_another, sum_cast_by_name, cast_and_read, cast_after_itself, beside_its_cast]


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
@pytest.mark.parametrize(
    "name", ["default", "by inputs", "autocast's placement", "O0", "O2", "nothing fused", "dynamo"]
)
@pytest.mark.parametrize("function", CASTS, ids=lambda function: function.__name__)
def test_gradients_of_what_is_returned_by_a_cast_that_does_nothing(function: Callable[..., Any], name: str) -> None:
    test_gradients_of_what_is_returned(function, SETTINGS[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, BF16])
def test_a_cast_to_what_turned_out_to_be_another_dtype(dtype: torch.dtype) -> None:
    """Readers of the low value do not read it through that cast."""
    original, x = Net(product_and_cast), torch.randn(5, 4)
    like = torch.zeros(1, dtype=dtype)
    converted, _ = fxprec.convert(copy.deepcopy(original), dtype=BF16)
    for ours, theirs in zip(converted((x, like)), original((x, like)), strict=True):
        assert ours.dtype is theirs.dtype
        assert (ours.double() - theirs.double()).abs().max() <= (1 if dtype is torch.int64 else 0.05)


def product_and_cast(m: Net, both: Any) -> Any:
    x, like = both
    h = m.a(x)
    return m.b(h), h.type_as(like)


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_gradients_of_what_is_returned(function: Callable[..., Any], settings: dict[str, Any]) -> None:
    settings = dict(settings)
    original, x = Net(function), torch.randn(5, 4)
    given = (x,) if settings.pop("by_inputs", False) else None  # which tell dtypes that weights, low at O3, do not
    converted, _ = fxprec.convert(copy.deepcopy(original), given, dtype=BF16, **settings)
    expected = gradients(original, x)
    for ours, theirs in zip(gradients(converted, x), expected, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours - theirs).norm() <= 0.1 * theirs.norm()


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
@pytest.mark.parametrize("function", [product, pointwise, several], ids=lambda function: function.__name__)
def test_they_can_be_retained_and_hooked(function: Callable[..., Any]) -> None:
    model, _ = fxprec.convert(Net(function), dtype=BF16)
    first, *others = returned(model, torch.randn(5, 4))
    seen: list[Tensor] = []
    for each in others:
        each.retain_grad()
        each.register_hook(lambda gradient: seen.append(gradient))
    first.square().sum().backward()
    assert all(each.grad is not None and each.grad.dtype is torch.float32 for each in others)
    assert len(seen) == len(others)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_graph_that_was_captured_without_gradients_does_not_serve_a_call_with_them(capture: Any) -> None:
    x = torch.randn(5, 4)
    with torch.no_grad():
        converted, _ = fxprec.convert(Net(product), dtype=BF16, capture=capture)
        converted(x)
    assert all(gradient is not None for gradient in gradients(converted, x))


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
def test_of_other_methods() -> None:
    model, _ = fxprec.convert(Net(product), dtype=BF16, methods=("scores",))
    assert all(gradient is not None for gradient in gradients(model, torch.randn(5, 4), "scores"))


def test_of_functions_and_losses() -> None:
    w, x = torch.randn(6, 4), torch.randn(5, 4, requires_grad=True)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = F.linear(x, w)
        return F.linear(h, w.t()), h

    converted, _ = fxprec.convert(function, dtype=BF16)
    out, h = converted(x, w)
    assert torch.autograd.grad(out.sum(), h)[0] is not None


def test_without_gradients_nothing_is_cast_back() -> None:
    def casts(model: nn.Module) -> int:
        return fxprec.report(model).headline.on_path

    model, _ = fxprec.convert(Net(product), (torch.randn(5, 4),), dtype=BF16)
    assert casts(model) == 1 and "1 of those inserted keep gradients on what is returned" in str(fxprec.report(model))
    with torch.no_grad():
        model, _ = fxprec.convert(Net(product), (torch.randn(5, 4),), dtype=BF16)
    assert casts(model) == 0


VIEWS = {
    "a row": lambda h: h[0],
    "columns": lambda h: h[:, 1:],
    "a view of a view": lambda h: h.view(-1)[3:].view(-1, 1),
    "transposed": lambda h: h.T,
    "one of several": lambda h: h.chunk(2, -1)[1],
}


#: Products of a low value and an FP32 one that is 0-dim, of which nobody knows without inputs.
NOBODY_KNOWS = {
    "an element": lambda m, x: m.a(x) * m.norm.weight[0],
    "of an exponential": lambda m, x: m.a(x) * m.norm.weight[0].exp(),
    "a trace": lambda m, x: (h := m.a(x)) * torch.trace(h),
    "an einsum": lambda m, x: (h := m.a(x)) * torch.einsum("ii", h[:4, :4]),
    "where": lambda m, x: torch.where((h := m.a(x)) > 0, h, torch.tensor(-1.0).exp()),
    "a sum": lambda m, x: m.a(x) + (m.a(x) * m.norm.weight[0]),
    "a logarithm": lambda m, x: (2 + m.a(x) * m.norm.weight[0].abs()).abs().log(),
    "a part": lambda m, x: (m.a(x) * m.norm.weight[0])[0],
    "in its dtype": lambda m, x: torch.ones(2).to((m.a(x) * m.norm.weight[0]).dtype),
    "a view": lambda m, x: (m.a(x) * m.norm.weight[0]).view(-1),
    "a view, written": lambda m, x: ((h := m.a(x) * m.norm.weight[0]), h.view(-1).mul_(2.0), h)[-1],
}


@pytest.mark.parametrize("function", NOBODY_KNOWS.values(), ids=NOBODY_KNOWS)
def test_it_has_the_dtype_of_the_original_whatever_promotes(function: Callable[..., Any]) -> None:
    original, x = Net(function), torch.randn(5, 4)
    found = fxprec.convert(copy.deepcopy(original), dtype=BF16).module(x)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, original(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.a(x) * m.norm.weight,
        lambda m, x: m.a(x) + F.layer_norm(m.norm.weight.exp(), (6,)),
        lambda m, x: (e := m.norm.weight.exp().view(1, 6), F.layer_norm(e, (6,)), m.a(x) * e)[-1],
    ],
    ids=["a weight", "a norm", "what a norm reads"],
)
def test_where_dimensions_are_known_nobody_looks(function: Callable[..., Any]) -> None:
    (returned,) = fxprec.graph_module(fxprec.convert(Net(function), dtype=BF16).module).graph.output_node().args
    assert isinstance(returned, torch.fx.Node) and returned.meta["op"].name in ("mul", "add")


@pytest.mark.parametrize("capture", ["static", "dynamo", "examples"])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_returned_view_shares_memory_with_a_returned_value(view: Any, gradients: bool, capture: str) -> None:
    x = torch.randn(2, 4)
    original = Net(lambda m, x: (h := m.a(x), view(h)))
    settings = {"dynamo": {"capture": "dynamo"}, "examples": {"example_inputs": (x,)}}.get(capture, {})
    results = []
    with torch.set_grad_enabled(gradients):
        for model in (original, fxprec.convert(copy.deepcopy(original), dtype=BF16, **settings).module):
            whole, part = model(x)
            if gradients:
                results += torch.autograd.grad(part.sum(), whole, retain_graph=True)
            with torch.no_grad():
                whole.mul_(3)
            results.append(part.detach().clone())
    expected, got = results[: len(results) // 2], results[len(results) // 2 :]
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


PARTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "a wide reader": lambda h: (h[0], h.view(-1), h.softmax(-1)),
    "parts of a split": lambda h: (h[:, 2:4], h.split([1, 5], -1)[1]),
    "transposed": lambda h: (h.mT, h.t(), h.t()[3]),
    "detached": lambda h: (h[0], h.detach(), h.detach()[1:]),
    "a computed index": lambda h: (h, h[:, : h.shape[-1] // 2]),
}


@pytest.mark.parametrize("capture", ["static", "dynamo", "examples"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_returned_parts_share_memory(parts: Callable[[Tensor], tuple[Tensor, ...]], capture: str) -> None:
    torch._dynamo.reset()
    x, model = torch.randn(2, 4), Net(lambda m, x: parts(m.a(x)))
    settings = {"dynamo": {"capture": "dynamo"}, "examples": {"example_inputs": (x,)}}.get(capture, {})
    lowered, _ = fxprec.convert(model, dtype=BF16, **settings)
    with torch.no_grad():
        first, second, *_ = lowered(x)
        before = first.clone()
        second.add_(100)
    assert not torch.equal(first, before)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("capture", ["static", "dynamo", "examples"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_returned_dropout_is_what_others_read(whole: bool, capture: str, gradients: bool) -> None:
    torch._dynamo.reset()

    def forward(m: Net, x: Tensor) -> tuple[Tensor, ...]:
        h = m.a(x)
        d = F.dropout(h, 0.5)
        return d @ torch.eye(6), h, d if whole else d[:, :3]

    x = torch.randn(16, 4)
    settings = {"dynamo": {"capture": "dynamo"}, "examples": {"example_inputs": (x,)}}.get(capture, {})
    lowered, _ = fxprec.convert(Net(forward), dtype=BF16, **settings)
    with torch.set_grad_enabled(gradients):
        read, _, dropped = lowered(x)
    assert torch.equal(read[:, : dropped.shape[1]], dropped)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("reads", ["innermost", "each"])
def test_what_a_checkpoint_within_checkpoints_returns_lies_on_the_path(depth, reads):
    """The innermost region makes and reads it, those around hand it on, or read it as well."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def region(self, x, depth):
            if depth == 0:
                h = self.a(x)
                return self.b(h.tanh()), h
            y, h = checkpoint(self.region, x, depth - 1, use_reentrant=False)
            return self.b(y + h if reads == "each" else y), h

        def forward(self, x):
            return self.region(x, depth)

    torch.manual_seed(0)
    model, plain = Nested(), Nested()
    plain.load_state_dict(model.state_dict())
    lowered, _ = fxprec.convert(model, dtype=torch.bfloat16)
    grads = []
    for each in (lowered, plain):
        y, h = each(torch.linspace(-1, 1, 24).view(3, 8))
        h.retain_grad()
        y.square().mean().backward()
        assert h.dtype is torch.float32 and h.grad is not None
        grads.append((h.grad, each.get_parameter("a.weight").grad))
    for own, other in zip(*grads, strict=True):
        assert (own - other).norm() <= 0.05 * other.norm()


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("wide", [lambda h: h.float(), lambda h: h.to(torch.float32)], ids=["float", "to"])
def test_a_cast_that_did_nothing_is_the_value_itself(wide, capture):
    """``h.float()`` and ``h.contiguous()`` are ``h`` in FP32: one tensor, one gradient."""

    def function(m: Net, x: Tensor) -> Any:
        h = m.a(x)
        u, v = wide(h), h.contiguous()
        return m.b(v).sum() + u.sum(), h, v

    torch.manual_seed(0)
    net, plain = Net(function), Net(function)
    plain.load_state_dict(net.state_dict())
    lowered, _ = fxprec.convert(net, dtype=BF16, capture=capture)
    found = []
    for each in (lowered, plain):
        y, h, v = each(torch.ones(2, 4))
        found.append(torch.autograd.grad(y, v)[0])
        assert h is v
    assert torch.allclose(*found, rtol=2e-2, atol=1e-2)
