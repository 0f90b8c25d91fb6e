"""saturation: what a saturating op gives is FP32 up to the pole that reads it, and where it is returned."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Bernoulli, Categorical
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.passes.policy.policy import Policy

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
X, Y = torch.tensor([[7.0, -7.0], [6.0, -6.5]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])


class Model(nn.Module):
    """Two products, so that what follows is low, and a function of their logits: X to the rounding."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        for layer in (self.first, self.second):
            layer.weight.data.copy_(torch.eye(2))

    def forward(self, x, y):
        return self.function(self.second(self.first(x)), y)


def both(p):
    return torch.stack([p, 1 - p], -1)


def without_autocast(h, y):
    p = torch.sigmoid(h)
    with torch.autocast("cpu", enabled=False):
        return F.binary_cross_entropy(p.float(), y.float())


def squared(h, y):
    t = torch.tanh(h / 2)
    return torch.log(1 - t * t + 1e-6).mean()


def focal(h, y):
    p = h.sigmoid()
    return -((1 - p) ** 2 * torch.log(p) * y + p**2 * torch.log(1 - p) * (1 - y)).mean()


def odds(h, y):
    p = torch.sigmoid(h)
    return (p / (1 - p)).mean()


def filled(h, y):
    p = torch.zeros(2, 2)
    p[:, 0], p[:, 1] = torch.sigmoid(h[:, 0]), torch.sigmoid(-h[:, 1])
    return -torch.log(1 - p).mean()


POLES = {
    "log": lambda h, y: -torch.log(1 - torch.sigmoid(h) + 1e-8).mean(),
    "log1p": lambda h, y: -torch.log1p(-torch.sigmoid(h)).mean(),
    "logit": lambda h, y: torch.logit(torch.sigmoid(h)).square().mean(),
    "logit(eps)": lambda h, y: torch.logit(torch.sigmoid(h), eps=1e-6).square().mean(),
    "hardtanh": lambda h, y: torch.log(1.0001 - torch.nn.functional.hardtanh(h / 10)).mean(),
    "atanh": lambda h, y: torch.atanh(torch.tanh(h / 2)).square().mean(),
    "erfinv": lambda h, y: torch.erfinv(torch.erf(h / 3)).square().mean(),
    "acos": lambda h, y: torch.acos(torch.tanh(h / 2)).square().mean(),
    "sqrt": lambda h, y: torch.sqrt(1 - torch.tanh(h / 2) ** 2).mean(),
    "rsqrt": lambda h, y: torch.rsqrt(1 - torch.sigmoid(h)).mean(),
    "pow": lambda h, y: ((1 - torch.sigmoid(h)) ** -1).mean(),
    "division": lambda h, y: ((1 + y) / (1 - torch.sigmoid(h))).mean(),
    "reciprocal": lambda h, y: (1 / (1 - torch.sigmoid(h))).mean(),
    "odds": odds,
    "xlogy": lambda h, y: torch.xlogy(1 - y, 1 - torch.sigmoid(h)).mean(),
    "squared": squared,
    "a power": lambda h, y: torch.log(1 - torch.tanh(h / 2) ** 2 + 1e-6).mean(),
    "focal": focal,
    "a mean": lambda h, y: torch.log(1 - torch.sigmoid(h.abs()).mean()),
    "a product": lambda h, y: torch.log(1 - torch.sigmoid(h.abs()).prod(-1)).mean(),
    "where": lambda h, y: -torch.log(torch.where(y > 0.5, torch.sigmoid(h), 1 - torch.sigmoid(h))).mean(),
    "nll_loss": lambda h, y: F.nll_loss(torch.log(both(torch.sigmoid(h[:, 0]))), torch.ones(2, dtype=torch.long)),
    "kl_div": lambda h, y: F.kl_div(torch.log(both(h.sigmoid())), both(y * 0.4 + 0.3), reduction="batchmean"),
    "written": filled,
    "out of a checkpoint": lambda h, y: -torch.log(1 - checkpoint(torch.sigmoid, h, use_reentrant=False)).mean(),
    "into a checkpoint": lambda h, y: checkpoint(lambda p: -torch.log(1 - p), h.sigmoid(), use_reentrant=False).mean(),
    "finfo.eps": lambda h, y: -torch.log(1 - torch.sigmoid(h) + torch.finfo(torch.sigmoid(h).dtype).eps).mean(),
    "in place": lambda h, y: -torch.log(1 - h.sigmoid_()).mean(),
    "clamped": lambda h, y: F.binary_cross_entropy(torch.sigmoid(h).clamp(1e-7, 1 - 1e-7), y),
    "inverted": lambda h, y: F.binary_cross_entropy(1 - torch.sigmoid(h), 1 - y),
    "outside of autocast": without_autocast,
    "to(h.dtype)": lambda h, y: -torch.log(1 - h.sigmoid().to(h.dtype)).mean(),
    "type_as": lambda h, y: -torch.log(1 - h.sigmoid().type_as(h)).mean(),
    "to(h)": lambda h, y: -torch.log(1 - h.sigmoid().to(h)).mean(),
    "softmax(dtype=h.dtype)": lambda h, y: -torch.log(1 - (h / 2).softmax(-1, dtype=h.dtype)).mean(),
    "mean(dtype=h.dtype)": lambda h, y: torch.log(1 - h.abs().sigmoid().mean(0, dtype=h.dtype)).mean(),
    "Categorical": lambda h, y: Categorical(probs=both(h[:, 0].sigmoid())).log_prob(torch.ones(2)).mean(),
    "Categorical(softmax)": lambda h, y: Categorical(probs=h.softmax(-1)).log_prob(torch.ones(2)).mean(),
    "Bernoulli": lambda h, y: Bernoulli(h.sigmoid()).log_prob(y).mean(),
}
RETURNED = {
    "sigmoid": lambda h, y: torch.sigmoid(h),
    "viewed": lambda h, y: {"p": torch.sigmoid(h).view(4).view(2, 2)},
    "inverted": lambda h, y: (1 - torch.sigmoid(-h), h),
    "stacked": lambda h, y: torch.stack([torch.sigmoid(h), 1 - torch.sigmoid(h)])[0],
    "clamped": lambda h, y: torch.sigmoid(h).clamp(1e-6, 1 - 1e-6),
    "tanh": lambda h, y: (torch.tanh(h / 2) + 1) / 2,
    "read as well": lambda h, y: ((p := torch.sigmoid(h)), p @ y),
}


def check(loss, settings, function, x=X, y=Y, tolerance=0.02):
    """The loss and the gradient of the logits, against float64."""
    reference, model = Model(function), Model(function)
    expected = loss(reference.double()(x.double(), y.double()))
    if expected.requires_grad:
        expected.backward()
    example = {"example_inputs": (x, y)} if "example_inputs" in settings else {}
    converted = fxprec.convert(model, **{"dtype": BF16, **settings, **example}).module
    found = loss(converted(x, y))
    found.backward()
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=0)
    gradient = reference.second.weight.grad
    assert (converted.second.weight.grad - gradient).norm() <= tolerance * gradient.norm()


@pytest.mark.parametrize(
    ("spelling", "settings"),
    [
        *((each, {}) for each in POLES),
        *((each, {"capture": "dynamo"}) for each in ("log", "a power", "clamped", "to(h.dtype)", "to(h)")),
        *((each, {"example_inputs": True, "level": "O2"}) for each in ("log", "odds", "focal", "in place", "type_as")),
        *((each, {"dtype": FP16, "scaler": False}) for each in ("log", "squared", "Bernoulli")),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:float16 on a CPU")
def test_nothing_saturates_before_a_pole(spelling, settings):
    check(lambda loss: loss, settings, POLES[spelling])


@pytest.mark.parametrize("settings", [{}, {"example_inputs": True, "level": "O2"}], ids=str)
@pytest.mark.parametrize("spelling", RETURNED)
def test_the_loss_of_returned_probabilities(spelling, settings):
    def loss(returned):
        p = returned["p"] if isinstance(returned, dict) else returned[0] if isinstance(returned, tuple) else returned
        return F.binary_cross_entropy(p, Y.to(p.dtype))

    check(loss, settings, RETURNED[spelling])


def over_a_break(h, y):
    p = (h / 2).softmax(-1)
    torch._dynamo.graph_break()
    return -torch.log(1 - p).mean()


class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(y := torch.sigmoid(x))
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y * (1 - y)


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (over_a_break, {}),
        (over_a_break, {"placement": "autocast"}),
        (lambda h, y: -torch.log(1 - Sigmoid.apply(h)).mean(), {}),
    ],
    ids=["a break", "a break, as autocast", "a Function"],
)
def test_a_piece_rounds_nothing_that_an_earlier_one_hands_over(function, settings):
    check(lambda loss: loss, {"level": "O2", "capture": "dynamo", **settings}, function)


#: In front of poles, values that a sigmoid or tanh in an earlier piece gave, at the end of what FP32 tells from 1.
IN_PIECES = {
    "binary_cross_entropy": lambda p, y: F.binary_cross_entropy(p, y),
    "log": lambda p, y: torch.log(1 - p).mean(),
    "log1p": lambda p, y: torch.log1p(-p).mean(),
    "logit": lambda p, y: torch.logit(p).mean(),
    "atanh": lambda p, y: torch.atanh(p).mean(),
    "division": lambda p, y: (p / (1 - p)).log().mean(),
    "rsqrt": lambda p, y: torch.rsqrt(1 - p * p).log().mean(),
    "a mean": lambda p, y: torch.log(1 - p[:, 0].mean()),
    "a view": lambda p, y: torch.log1p(-p.view(-1)).mean(),
    "type_as": lambda p, y: torch.log1p(-p.type_as(y)).mean(),
}


@pytest.mark.parametrize(
    ("spelling", "settings"),
    [
        *((each, {"level": level}) for each in IN_PIECES for level in ("O2", "O3")),
        ("logit", {"level": "O3", "placement": "autocast"}),
    ],
    ids=str,
)
def test_a_pole_reads_what_an_earlier_piece_hands_over_as_it_is(spelling, settings):
    def in_pieces(h, y):
        torch._dynamo.graph_break()
        p = torch.sigmoid(h)
        torch._dynamo.graph_break()
        return IN_PIECES[spelling](p, y)

    check(lambda loss: loss, {"capture": "dynamo", **settings}, in_pieces, X * 1.5)


@pytest.mark.parametrize("spelling", IN_PIECES)
def test_at_o3_a_pole_reads_what_the_user_widened(spelling):
    def f(h, y):
        return IN_PIECES[spelling](torch.sigmoid(h.float()), y.float())

    check(lambda loss: loss, {"level": "O3"}, f, X * 1.5)


def test_an_override_lowers_a_pole_all_the_same(decided):
    policy = Policy.preset("O3").override(ops={"log1p": "low"})
    found, _ = decided(lambda x, w: torch.log1p(F.linear(x, w).float().sigmoid()), level="O3", policy=policy)
    assert found["log1p"].reads is BF16


E = 1.2e-7  # the digit of FP32 next to 1: numbers that keep away from a pole there, and not in low precision
BOUNDS = {
    "logit": lambda u: torch.logit(u.clamp(E, 1 - E)),
    "odds": lambda u: torch.log((v := u.clamp(min=E, max=1 - E)) / (1 - v)),
    "atanh": lambda u: torch.atanh(torch.clamp(u, -1 + E, 1 - E)),
    "acos": lambda u: torch.acos(torch.clamp(u, -1 + E, 1 - E)),
    "acosh": lambda u: torch.acosh(u.clamp(min=1 + E)),
    "division": lambda u: u.sigmoid() / (1 - u.clamp(max=1 - E)),
    "clamp_max": lambda u: torch.log(1 - u.clamp_max(1 - E)),
    "clip": lambda u: torch.log(1 - torch.clip(u, max=1 - E)),
    "in place": lambda u: torch.log(1 - u.clamp_(E, 1 - E)),
    "hardtanh": lambda u: torch.atanh(F.hardtanh(u, -1 + E, 1 - E)),
    "where": lambda u: torch.log(1 - torch.where(u < 1 - E, u, 1 - E)),
    "masked_fill": lambda u: torch.log(1 - u.masked_fill(u > 1 - E, 1 - E)),
    "to(h.dtype)": lambda u: torch.logit(u.clamp(E, 1 - E).to(u.dtype)),
    "through a view": lambda u: torch.logit(u.clamp(E, 1 - E).view(-1)),
    "a mean": lambda u: torch.log(1 - u.clamp(1 - E, 1 - E).mean()),
    "binary_cross_entropy": lambda u: F.binary_cross_entropy(u.clamp(E, 1 - E), torch.zeros_like(u)),
}


@pytest.mark.parametrize(
    ("spelling", "settings"),
    [
        *((each, {"level": level}) for each in BOUNDS for level in ("O1", "O2")),
        *((each, {"level": "O3"}) for each in BOUNDS if each != "to(h.dtype)"),  # h is low there
        *((each, {"capture": "dynamo"}) for each in BOUNDS),
        *((each, {"dtype": FP16, "scaler": False}) for each in ("logit", "odds")),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:float16 on a CPU")
def test_a_bound_keeps_away_from_a_pole(spelling, settings):
    x = torch.tensor([[1.0, 1.5], [1.0, 0.5]])
    model = Model(lambda h, y: BOUNDS[spelling](h).mean())
    expected = model(x, Y)
    expected.backward()
    converted = fxprec.convert(Model(model.function), **{"dtype": BF16, **settings}).module
    found = converted(x, Y)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0)
    gradient = model.second.weight.grad
    assert (converted.second.weight.grad - gradient).norm() <= 0.01 * gradient.norm()


@pytest.mark.parametrize("f", [lambda d: d.log_prob(Y), lambda d: d.entropy()], ids=["log_prob", "entropy"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_distribution_of_sure_probabilities_is_finite(f, level):
    model = fxprec.convert(Model(lambda h, y: f(Bernoulli(torch.sigmoid(h))).mean()), dtype=BF16, level=level).module
    found = model(X * 4, Y)
    found.backward()
    assert found.isfinite() and model.second.weight.grad.isfinite().all()


def written_like(h):
    p = torch.zeros_like(h)
    p[:, :8].copy_(h[:, :8].sigmoid())
    return torch.log(1 - p + 1e-8)


#: Constants that are made like a low value meet one that saturates.
MADE_ALIKE = {
    "ones_like": lambda h: torch.log(torch.ones_like(h) - h.sigmoid() + 1e-8),
    "zeros_like + 1": lambda h: torch.log(torch.zeros_like(h) + 1 - h.sigmoid() + 1e-8),
    "full_like": lambda h: torch.log(torch.full_like(h, 1.0) - h.sigmoid() + 1e-8),
    "digits": lambda h: torch.log(torch.full_like(h, 1.0002) - h.sigmoid()),
    "a product": lambda h: torch.log(torch.ones_like(h) * 1.0002 - h.sigmoid()),
    "new_ones": lambda h: torch.log(h.new_ones(()) - h.sigmoid() + 1e-8),
    "fill": lambda h: torch.log(torch.empty_like(h).fill_(1) - h.sigmoid() + 1e-8),
    "where": lambda h: torch.log(torch.where(h > 0, 1 - h.sigmoid(), torch.ones_like(h)) + 1e-8),
    "clamp": lambda h: torch.log(torch.clamp(1 - h.sigmoid(), min=torch.zeros_like(h)) + 1e-8),
    "max": lambda h: torch.log(torch.max(1 - h.sigmoid(), torch.zeros_like(h)) + 1e-8),
    "stack": lambda h: torch.log(torch.stack([h.sigmoid(), torch.ones_like(h) - h.sigmoid()]) + 1e-8),
    "cat": lambda h: torch.log(torch.cat([1 - h.sigmoid(), h.new_zeros(8, 1)], 1) + 1e-8),
    "lerp": lambda h: torch.log(torch.lerp(torch.ones_like(h), torch.zeros_like(h), h.sigmoid()) + 1e-8),
    "addcmul": lambda h: torch.log(torch.addcmul(torch.ones_like(h), h.erf(), h.sigmoid(), value=-1) + 1e-8),
    "written": written_like,
}
OF_POLES = {
    "lgamma": lambda h: torch.lgamma(1 - h.sigmoid()),
    "digamma": lambda h: torch.digamma(1 - h.sigmoid()),
    "polygamma": lambda h: torch.polygamma(1, 1 - h.sigmoid()),
    "x.polygamma": lambda h: (1 - h.sigmoid()).polygamma(1),
    "mvlgamma": lambda h: torch.mvlgamma(1 - h.sigmoid(), 1),
    "float_power": lambda h: torch.float_power(1 - h.sigmoid(), -1),
    "divided by a float_power": lambda h: 1 / (1 - torch.float_power(h.sigmoid(), 2)),
    "addcdiv": lambda h: torch.addcdiv(h.float(), torch.ones_like(h), 1 - h.sigmoid()),
    "remainder": lambda h: torch.remainder(torch.ones(8, 16), 1 - h.sigmoid()).isfinite() * h.sigmoid(),
    "atan2": lambda h: torch.atan2(1 - h.sigmoid(), 1 - (h - 1).sigmoid()) * h,
    "hypot": lambda h: torch.hypot(1 - h.sigmoid(), 1 - h.sigmoid()) * h,
    "double": lambda h: torch.log(1 - h.sigmoid().double() + 1e-12),
    "tan": lambda h: torch.tan(torch.pi / 2 * torch.tanh(h / 2)),
    "elu": lambda h: torch.log(F.elu(h) + 1 + 1e-6),
    "an inverse of elu": lambda h: 1 / (F.elu(h) + 1 + 1e-6),
    "celu": lambda h: torch.log(F.celu(h) + 1 + 1e-6),
    "selu": lambda h: torch.log(F.selu(h) / 1.0507009873554805 + 1.6732632423543772 + 1e-5),
    "tanhshrink": lambda h: torch.log(F.tanhshrink(h).abs() + 1e-8),
}


@pytest.mark.parametrize("f", [*MADE_ALIKE.values(), *OF_POLES.values()], ids=[*MADE_ALIKE, *OF_POLES])
def test_poles_beside_float64(f):
    class Poles(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(16, 16)
            self.l.weight.data.copy_(torch.eye(16))
            self.l.bias.data.zero_()

        def forward(self, x):
            return f(self.l(x))

    x = torch.linspace(-9, 9, 128).reshape(8, 16)
    reference, model = Poles().double(), fxprec.convert(Poles(), dtype=BF16).module
    expected, found = reference(x.double()), model(x)
    assert (found - expected).norm() <= 0.04 * expected.norm()  # a pole of degree 2 doubles the error of h
    expected.abs().sum().backward()
    found.abs().sum().backward()
    gradient = reference.l.weight.grad
    assert (model.l.weight.grad - gradient).norm() <= 0.06 * gradient.norm()


@pytest.fixture
def decided(tools):
    def run(f, **settings):
        gm = tools.traced(f, torch.randn(4, 4), torch.randn(4, 4))
        tools.rewritten(gm, tools.context(settings.pop("level", "O1"), **settings))
        return {node.name: node.meta["precision"] for node in gm.graph.nodes if node.op.startswith("call")}, gm

    return run


@pytest.mark.parametrize("f", [torch.atan, torch.expm1], ids=lambda f: f.__name__)
def test_what_is_full_and_saturates_stays_so_up_to_the_pole(decided, f):
    def saturated(x, w):
        p = f(F.linear(x, w))
        return torch.log(p + 1) + sum(F.linear(p + i, w) for i in range(2, 6))

    found, _ = decided(saturated)
    assert {found[name].output for name in (f.__name__, "add")} == {FP32}


def test_a_pin_says_why(decided):
    found, _ = decided(lambda x, w: (torch.log(1 - torch.sigmoid(F.linear(x, w))), F.linear(x, w).tanh()))
    assert found["sigmoid"].why == found["sub"].why == "saturates in low precision before the pole of %log"
    assert found["tanh"].why == "saturates in low precision, and who gets it may take its logarithm"


@pytest.mark.parametrize(
    ("f", "names"),
    [
        (lambda x, w: F.linear(x, w) * torch.sigmoid(F.linear(x, w)), ["sigmoid", "mul"]),
        (lambda x, w: (F.linear(x, w) * torch.sigmoid(F.linear(x, w))) / 3, ["sigmoid", "truediv"]),
        (lambda x, w: torch.log(1 + F.linear(torch.tanh(F.linear(x, w)), w).relu()), ["tanh"]),
        (lambda x, w: x / (F.linear(x, w) * torch.tanh(F.linear(x, w))).norm(), ["tanh", "mul"]),
        (lambda x, w: F.linear(torch.sigmoid(F.linear(x, w)) ** 2, w), ["sigmoid"]),
        (lambda x, w: torch.sigmoid(F.linear(x, w)) * torch.tanh(F.linear(x, w)), ["sigmoid", "tanh"]),
        (lambda x, w: F.group_norm(torch.tanh(F.linear(x, w)), 2, w[0]), ["tanh"]),
        (lambda x, w: F.linear(torch.dropout(torch.tanh(F.linear(x, w)), 0.1, True), w), ["tanh", "dropout"]),
        (lambda x, w: F.linear(F.elu(F.linear(x, w)), w), ["elu"]),
        (lambda x, w: (F.elu(F.linear(x, w)) + 1) @ (F.elu(F.linear(w, x)) + 1), ["elu", "add", "elu_1", "add_1"]),
        (lambda x, w: torch.ones_like(F.linear(x, w)) - torch.sigmoid(F.linear(x, w)) @ w, ["ones_like", "sigmoid"]),
        (lambda x, w: torch.log(torch.ones_like(a := F.linear(x, w)) * a.sigmoid() + a * 0), ["sigmoid", "mul"]),
    ],
    ids=[
        "a gate",
        "a numerator",
        "a product between",
        "a gate in a norm",
        "a square",
        "a cell's gates",
        "before a norm",
        "hidden",
        "elu between products",
        "a feature map of elu",
        "a constant beside a product",
        "low after all",
    ],
)
def test_what_reaches_no_pole_stays_low(decided, f, names):
    found, _ = decided(f)
    assert {name: found[name].output for name in names} == dict.fromkeys(names, BF16)


def test_a_softmax_that_weighs_values_costs_no_cast(decided):
    def attention(q, v):
        weights = torch.softmax(F.linear(q, v), -1)
        return F.linear(torch.dropout(weights, 0.1, True) @ F.linear(q, v), v)

    _, gm = decided(attention)
    assert [node.name for node in gm.graph.nodes if node.meta.get("inserted")] == [
        "q_bf16", "v_bf16", "linear_f32", "softmax_bf16", "linear_2_f32"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings", [{"placement": "autocast"}, {"level": "O3"}, {"keep_output_dtype": False}], ids=str
)
def test_where_nothing_is_pinned(tools, settings):
    gm = tools.traced(lambda x, w: torch.sigmoid(F.linear(x, w)), torch.randn(4, 4), torch.randn(4, 4))
    level = settings.pop("level", "O1")
    tools.rewritten(gm, tools.context(level, **settings), until="decide")
    assert next(node for node in gm.graph.nodes if node.name == "sigmoid").meta["precision"].output is BF16


def test_returned_probabilities_cost_no_more_casts(decided):
    _, gm = decided(lambda x, w: torch.sigmoid(F.linear(x, w)))
    assert [node.name for node in gm.graph.nodes if node.meta.get("inserted")] == ["x_bf16", "w_bf16", "linear_f32"]
    assert operator.is_(gm.graph.output_node().all_input_nodes[0].target, torch.sigmoid)
