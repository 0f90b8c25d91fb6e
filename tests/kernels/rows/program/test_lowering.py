"""Every lowering computes what torch's function does, and its derivative is torch's, in float64 and without kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import region_tools as tools
from fxprec.kernels.rows.program import lowering
from fxprec.kernels.rows.program.lowering import LOWERINGS
from fxprec.kernels.rows.program.values import Declined
from fxprec.kernels.rows.run.evaluate import eager_backward, evaluate

#: Around every corner that a function below has.
X = torch.tensor(
    [[-30.0, -7.0, -3.5, -3.0, -1.0, -0.6], [-0.5, -1e-4, 0.0, 1e-4, 0.3, 0.5], [1.0, 3.0, 4.0, 6.5, 25.0, 88.0]]
)
POSITIVE = X.abs() + 0.01
Y = torch.linspace(-2, 3, 18).reshape(3, 6)
W, B = torch.linspace(0.5, 2, 6), torch.linspace(-1, 1, 6)
COLUMN = torch.tensor([[0.5], [-1.0], [2.0]])
MASK = torch.tensor([[True, False, True, True, False, False]])
#: Bounds: below, at, above X, both at X, at each other, and crossed.
LOW = X + torch.tensor([-1.0, 0.0, 0.5, 0.0, 0.5, 0.0])
HIGH = X + torch.tensor([1.0, 0.5, 0.5, 0.0, 0.0, -0.5])


OF_TWO = "add sub mul div maximum minimum"
ANYWHERE = "neg abs erf tanh sigmoid square floor ceil trunc sign positive clone"
ABOVE_ZERO = "sqrt rsqrt log log2 log10 log1p reciprocal"
ACTIVATIONS = (
    "relu relu6 hardtanh leaky_relu elu softplus logsigmoid silu gelu mish hardsigmoid hardswish tanhshrink softsign"
)


def of_one(function):
    return lambda x: function(x)


def of_power(exponent):
    return lambda x: x.pow(exponent)


def of_two(function):
    return lambda x, y: function(x, y)


CASES = {
    **{name: (of_one(getattr(torch, name)), X) for name in ANYWHERE.split()},
    **{name: (of_one(getattr(torch, name)), POSITIVE) for name in ABOVE_ZERO.split()},
    **{name: (of_one(getattr(torch, name)), X.clamp(max=3)) for name in ("exp", "exp2", "expm1")},
    **{f"{name} of two": (of_two(getattr(torch, name)), X, Y) for name in OF_TWO.split()},
    "maximum of equals": (of_two(torch.maximum), X, X.clone()),
    "add alpha": (lambda x, y: torch.add(x, y, alpha=0.3), X, Y),
    "sub alpha": (lambda x, y: torch.sub(x, y, alpha=0.3), X, Y),
    "rsub": (lambda x: 3.0 - x, X),
    "rsub of torch": (lambda x, y: torch.rsub(x, y, alpha=2), X, Y),
    "rdiv": (lambda x: 3.0 / x, POSITIVE),
    "rdiv as a method": (lambda x: x.__rtruediv__(3.0), POSITIVE),
    "div by 3": (lambda x: x / 3, X),
    "div by 8": (lambda x: x / 8, X),
    **{f"pow {p}": (of_power(p), POSITIVE) for p in (1, 2, 3, 4, -1, -2, 0.5, -0.5, 1.5)},
    "pow 2 of negative": (lambda x: x**2, X),
    "clamp": (lambda x: x.clamp(-1.0, 2.0), X),
    "clamp crossed": (lambda x: x.clamp(2.0, -1.0), X),
    "clamp_min": (lambda x: x.clamp_min(-0.5), X),
    "clamp_max": (lambda x: torch.clamp_max(x, 0.5), X),
    "clamp min only": (lambda x: torch.clamp(x, min=-0.5), X),
    "clamp at both bounds": (lambda x: x.clamp(-1.0, 3.0), X),
    "clamp to one number": (lambda x: x.clamp(0.5, 0.5), X),
    "clamp to tensors": (lambda x, low, high: torch.clamp(x, low, high), X, LOW, HIGH),
    "clamp_min to a tensor": (lambda x, low: x.clamp_min(low), X, LOW),
    "clamp_max to a tensor": (lambda x, high: torch.clamp(x, max=high), X, HIGH),
    **{name: (of_one(getattr(F, name)), X) for name in ACTIVATIONS.split()},
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "elu alpha": (lambda x: F.elu(x, 0.7), X),
    "leaky_relu slope": (lambda x: F.leaky_relu(x, 0.3), X),
    "softplus beta": (lambda x: F.softplus(x, 2.0, 5.0), X),
    "where": (lambda m, x, y: torch.where(m, x, y), MASK, X, Y),
    "where numbers": (lambda m, x: torch.where(m, x, -1.5), MASK, X),
    "masked_fill": (lambda x, m: x.masked_fill(m, -1e9), X, MASK),
    "comparisons": (lambda x, y: torch.where(torch.logical_or(x > y, x == 0), x, y), X, Y),
    "logical": (lambda x, y: torch.where(torch.logical_and(x >= y, torch.logical_not(x != 0.5)), x, y), X, Y),
    "le lt": (lambda x, y: torch.where(x <= y, x, torch.where(y < 1, y, x * 2)), X, Y),
    "isnan": (lambda x: torch.where(torch.isnan(x), 0.0, x), X),
    "addcmul": (lambda x, y, w: torch.addcmul(x, y, w, value=0.5), X, Y, W),
    "addcdiv": (lambda x, y, w: torch.addcdiv(x, y, w, value=0.5), X, Y, W),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), X, Y),
    "contiguous": (lambda x: x.contiguous() * 2, X),
    "sum": (lambda x: x.sum(-1), X),
    "sum kept": (lambda x: x / x.sum(-1, keepdim=True), POSITIVE),
    "mean": (lambda x: x - x.mean(-1, keepdim=True), X),
    "mean two dims": (lambda x: x - x.mean((-2, -1), keepdim=True), torch.stack((X, Y))),
    "amax": (lambda x: x - x.amax(-1, keepdim=True), X),
    "amax of ties": (lambda x: x.amax(-1), torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])),
    "amin": (lambda x: x * x.amin(dim=-1, keepdim=True), Y),
    "var": (lambda x: x.var(-1), Y),
    "var biased": (lambda x: x.var(-1, unbiased=False, keepdim=True) + x, Y),
    "var correction": (lambda x: x.var(-1, correction=2), Y),
    "sum of a column": (lambda x, c: x + c.sum(-1, keepdim=True), X, COLUMN),
    "sum of what is broadcast": (lambda w, x: x * w.sum(-1), W, X),
    "softmax": (lambda x: F.softmax(x, -1), Y),
    "softmax dtype": (lambda x: torch.softmax(x, dim=-1), X),
    "log_softmax": (lambda x: F.log_softmax(x, dim=-1), X),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), X),
    "logsumexp kept": (lambda x: x - x.logsumexp(-1, keepdim=True), X),
    "normalize": (lambda x: F.normalize(x, dim=-1), Y),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-5), Y, W, B),
    "layer_norm bare": (lambda x: F.layer_norm(x, (6,)), Y),
    "layer_norm two dims": (lambda x: F.layer_norm(x, (3, 6)), torch.stack((X, Y))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w, 1e-6), Y, W),
    "rms by hand": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), Y, W),
    "column": (lambda x, c: x * c + c, X, COLUMN),
    "bias": (lambda x, b: x * b + b, X, B),
    "number": (lambda x, s: x * s, X, torch.tensor(1.5)),
    "all kinds": (lambda x, c, b, s: (x + c) * b / s, X, COLUMN, B, torch.tensor(1.5)),
    "used twice": (lambda x: x * F.silu(x) + x, X),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(name: str) -> None:
    function, *inputs = CASES[name]
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    plan = tools.plan_of(function, *inputs)
    exact_inputs = tools.wide(inputs)
    exact = function(*exact_inputs)
    (value, *_) = evaluate(plan.derived.forward, plan.layout, inputs, None, 0, dtype=torch.float64)
    store = plan.derived.forward.stores[0]
    value = plan.layout.torch_shaped(value, store.columns).reshape(exact.shape)
    assert torch.allclose(value, exact, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn(exact.shape, dtype=torch.float64)
    wanted = [x for x in exact_inputs if x.requires_grad]
    gradients = torch.autograd.grad(exact, wanted, cotangent, allow_unused=True)
    kinds = {"input": exact_inputs, "output": [value], "statistic": [torch.empty(0)] * 9}
    saved = [kinds[kind][n] for kind, n in plan.saved_sources]
    found = eager_backward(plan, saved, [cotangent], None, 0, dtype=torch.float64)
    for n, result, gradient in zip(plan.derived.backward.wanted, found, gradients, strict=True):
        gradient = torch.zeros_like(inputs[n], dtype=torch.float64) if gradient is None else gradient
        assert torch.allclose(result, gradient, rtol=1e-7 if name == "hardsigmoid" else 1e-11, atol=1e-12), (
            name,
            n,
        )  # torch's 1/6 is FP32 there


@pytest.mark.parametrize("share", [lambda tensors: 1.0, lambda tensors: 0.5 if tensors else 0.0])
@pytest.mark.parametrize("above", [0.0, -3.0, 3.0])  # x within the bounds or at them, below, above
@pytest.mark.parametrize("who", ["x", "low", "high"])
def test_a_clamp_of_nan_is_nan(who: str, above: float, share: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_share_at_bound", share)  # of torch 2.13, and of 2.14
    given = {"x": X + above, "low": LOW.clone(), "high": HIGH.clone()}
    given[who][:, ::2] = torch.nan
    x, low, high = (tensor.requires_grad_() for tensor in given.values())
    for function, *inputs in (
        (lambda x, low, high: torch.clamp(x, low, high), x, low, high),
        (lambda x, low: torch.clamp_min(x, low), x, low),
        (lambda x, high: torch.clamp_max(x, high), x, high),
    ):
        plan = tools.plan_of(function, *inputs)
        (value, *_) = evaluate(plan.derived.forward, plan.layout, inputs, None, 0, dtype=torch.float64)
        store = plan.derived.forward.stores[0]
        exact = function(*tools.wide(inputs))
        value = plan.layout.torch_shaped(value, store.columns).reshape(exact.shape)
        assert torch.equal(value.nan_to_num(), exact.nan_to_num())


def test_torch_is_asked_about_ties_whatever_is_on() -> None:
    for tensors in (False, True):
        x = torch.zeros(1, requires_grad=True)
        bounds = (torch.zeros(1), torch.ones(1)) if tensors else (0, 1)
        expected = torch.autograd.grad(x.clamp(*bounds).sum(), x)[0].item()
        lowering._share_at_bound.cache_clear()
        with torch.inference_mode(), torch.device("meta"), torch.autograd.graph.disable_saved_tensors_hooks("no"):
            assert lowering._share_at_bound(tensors) == expected


def test_every_lowering_is_among_the_cases() -> None:
    used = set()
    for function, *_ in CASES.values():
        used |= {node.meta["op"].name for node in tools.graph_of(function).graph.nodes if "op" in node.meta}
    assert LOWERINGS.keys() - used == set()


@pytest.mark.parametrize(
    ("function", "inputs", "words"),
    [
        (lambda x: x.sum(0) * 2, (X,), "other dimensions than the last"),
        (lambda x: F.softmax(x, 0) + x.sum(-1, keepdim=True), (X,), "other dimensions"),
        (
            lambda x: x.sum(-1, keepdim=True) + x.sum((-2, -1), keepdim=True),
            (torch.stack((X, Y)),),
            "different numbers",
        ),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), (X,), "rounds"),
        (lambda x: x.pow(2.5), (POSITIVE,), "a power of 2.5"),
        (lambda x, y: torch.pow(x, y), (POSITIVE, Y), "exponent is a tensor"),
        (lambda x: F.normalize(x, p=1.0, dim=-1), (X,), "order 1.0"),
        (lambda x: torch.cumsum(x, -1), (X,), "cumsum is no row operation"),
        (lambda x: x.double(), (X,), "a cast to"),
        (lambda x: x * 2, (X.double(),), "float64"),
        (lambda x, y: (x * 2, y * 2), (X, B), "vary along all the rows"),
        (lambda x: x.var(-1), (torch.randn(3, 1),), "fewer columns"),
        (lambda x: x * 2, (torch.empty(0, 4),), "an empty tensor"),
    ],
)
def test_what_is_declined_says_why(function, inputs, words: str) -> None:
    with pytest.raises(Declined, match=words):
        tools.plan_of(function, *inputs)


def test_an_argument_that_a_lowering_does_not_have_is_declined() -> None:
    gm = tools.graph_of(lambda x: torch.neg(x))
    next(node for node in gm.graph.nodes if "op" in node.meta).meta["op"] = tools.canonical_op(
        next(node for node in tools.graph_of(lambda x: F.dropout2d(x)).graph.nodes if "op" in node.meta)
    )
    with pytest.raises(Declined, match="dropout2d is no row operation"):
        tools.make_plan("fused", gm, [tools.spec_of(X)], tools.CPU, {})
