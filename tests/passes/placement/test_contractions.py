"""contractions: a product that sums nothing, or a single value, rounds no FP32 operand, however it is spelled."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.passes.graph.annotations import Rule
from fxprec.passes.placement.products import is_elementwise
from fxprec.passes.policy.policy import Policy

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
POSITIONS, FREQUENCIES = torch.tensor([300.0, 301.0, 1001.0]), torch.tensor([1.0, 3.0, 0.1])
ELEMENTWISE = {
    "i,j->ij": lambda p, f: torch.einsum("i,j->ij", p, f),
    "i,j": lambda p, f: torch.einsum("i , j", p, f),
    "in a list": lambda p, f: torch.einsum("i,j->ij", [p, f]),
    "sublists": lambda p, f: torch.einsum(p, [0], f, [1], [0, 1]),
    "three": lambda p, f: torch.einsum("i,j,k->ijk", p, f, f),
    "...i,...i->...i": lambda p, f: torch.einsum("...i,...i->...i", p, f),
    "ij,jk->ik": lambda p, f: torch.einsum("ij,jk->ik", p[:, None], f[None]),
    "outer": torch.outer,
    "ger": torch.ger,
    "kron": torch.kron,
    "tensordot of nothing": lambda p, f: torch.tensordot(p, f, 0),
    "tensordot": lambda p, f: torch.tensordot(p[:, None], f[None], 1),
    "inner": lambda p, f: torch.inner(p[:, None], f[:, None]),
    "vecdot": lambda p, f: torch.linalg.vecdot(p[:, None], f[:, None]),
    "@": lambda p, f: p[:, None] @ f[None],
    "mm": lambda p, f: torch.mm(p.unsqueeze(-1), f.unsqueeze(0)),
    "bmm": lambda p, f: torch.bmm(p.view(1, 3, 1), f.view(1, 1, 3)),
    "reshape": lambda p, f: p.reshape((3, 1)).matmul(f.reshape((1, 3))),
    "addmm": lambda p, f: torch.addmm(torch.zeros(3, 3), p[:, None], f[None]),
    "baddbmm": lambda p, f: torch.baddbmm(torch.zeros(1, 3, 3), p.view(1, 3, 1), f.view(1, 1, 3)),
    "multi_dot": lambda p, f: torch.linalg.multi_dot([p[:, None], f[None]]),
    "linear": lambda p, f: F.linear(p[:, None], f[:, None]),
}


class Beside(nn.Module):
    """A product of two inputs, and a layer that is lowered."""

    def __init__(self, product):
        super().__init__()
        self.product, self.layer = product, nn.Linear(3, 3)

    def forward(self, p, f):
        return self.product(p, f), self.layer(f)


@pytest.mark.parametrize(
    ("spelling", "how"),
    [
        *((spelling, how) for spelling in ELEMENTWISE for how in ("static", "with inputs")),
        *((spelling, "dynamo") for spelling in ("i,j->ij", "sublists", "@", "linear")),
    ],
)
def test_positions_are_not_rounded(spelling, how):
    model = Beside(ELEMENTWISE[spelling])
    expected = model(POSITIONS, FREQUENCIES)[0]
    settings = {"with inputs": {"example_inputs": (POSITIONS, FREQUENCIES)}, "dynamo": {"capture": "dynamo"}}
    converted = fxprec.convert(model, dtype=BF16, **settings.get(how, {})).module
    torch.testing.assert_close(converted(POSITIONS, FREQUENCIES)[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("f", "rule"),
    [
        (lambda x: x @ x, Rule.LOW),
        (lambda x: F.linear(x, x), Rule.LOW),
        (lambda x: x[0] @ x, Rule.LOW),
        (lambda x: x[:1] @ x[:, :1], Rule.LOW),
        (lambda x: x[:, :1] @ x[:1], Rule.PROMOTE),
        (lambda x: torch.einsum("ij,jk->ik", x, x), Rule.LOW),
        (lambda x: torch.einsum("ij,jk->ik", x[:, :1], x[:1]), Rule.PROMOTE),
        (lambda x: torch.einsum("bi,bj->ij", x[:1], x[:1]), Rule.PROMOTE),
        (lambda x: torch.einsum("bi,bj->j", x[:1], x[:1]), Rule.LOW),
        (lambda x: torch.einsum("...j,jk->...k", x, x), Rule.LOW),
    ],
)
def test_sizes_decide(tools, f, rule):
    gm = tools.rewritten(tools.traced(f, torch.randn(4, 4)), tools.context(), until="decide")
    product = next(node for node in gm.graph.nodes if node.name.startswith(("matmul", "linear", "einsum")))
    assert product.meta["precision"].rule is rule
    assert is_elementwise(product) is (rule is Rule.PROMOTE)


def test_what_a_policy_says_of_the_op_stands(tools):
    policy = Policy().override(ops={"einsum": "low", "matmul": "low"})
    for f in (lambda x: torch.einsum("i,j->ij", x, x), lambda x: x[:, None] @ x[None]):
        gm = tools.rewritten(tools.traced(f, torch.randn(4)), tools.context(policy=policy), until="decide")
        assert [n.meta["precision"].compute for n in gm.graph.nodes][-2] is BF16
    policy.check_matches({"einsum_view", "matmul"}, {}, ())
    with pytest.raises(fxprec.errors.PolicyError, match="einsum_view"):
        Policy().override(ops={"einsum_view": "low"}).check_matches({"einsum"}, {}, ())


def test_low_operands_stay_low(tools):
    """As under mul: nothing is cast for an elementwise product of two low values."""

    def f(x, w):
        y = F.linear(x, w)
        return F.linear(torch.einsum("ij,ij->ij", y, y.relu()), w)

    gm = tools.rewritten(tools.traced(f, torch.randn(4, 4), torch.randn(4, 4)), tools.context(), until="decide")
    found = {node.name: node.meta["precision"] for node in gm.graph.nodes}
    assert (found["einsum"].reads, found["einsum"].output) == (BF16, BF16)


def test_mixed_operands_are_promoted_by_the_kernel(tools):
    def f(x, w):
        return torch.einsum("ij,ij->ij", F.linear(x, w), x)

    inputs = torch.randn(4, 4), torch.randn(4, 4)
    gm = tools.rewritten(tools.traced(f, *inputs), tools.context())
    assert [node.name for node in gm.graph.nodes if node.meta.get("inserted")] == ["x_bf16", "w_bf16"]
    torch.testing.assert_close(gm(*inputs), f(*inputs), rtol=0.05, atol=0.05)


class WritesAView(nn.Module):
    def __init__(self, equation):
        super().__init__()
        self.equation = equation
        self.weight, self.layer = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        torch.einsum(*self.equation(self.weight.detach())).add_(1.0)
        return F.linear(self.layer(x), self.weight)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize(
    "equation",
    [lambda p: ("ii->i", p), lambda p: (p, [0, 1], [1, 0]), lambda p: ("...ij->...ji", [p])],
    ids=["string", "sublists", "list"],
)
def test_a_write_through_a_view_reaches_the_weight(equation, capture):
    model = WritesAView(equation)
    original, x = copy.deepcopy(model), torch.randn(3, 4)
    expected = original(x)
    converted = fxprec.convert(model, dtype=BF16, capture=capture).module
    result = converted(x)
    assert torch.equal(converted.weight, original.weight)
    torch.testing.assert_close(result, expected, rtol=0.05, atol=0.1)


def test_a_view_that_is_written_has_the_dtype_of_its_memory(tools):
    def f(x, w):
        y = F.linear(x, w)
        torch.einsum("ii->i", y).masked_fill_(x[0] > 0, -1e9)
        return F.linear(torch.relu(y), w)

    inputs = torch.randn(4, 4), torch.randn(4, 4)
    gm = tools.rewritten(tools.traced(f, *inputs), tools.context(low=FP16))
    torch.testing.assert_close(gm(*inputs), f(*inputs), rtol=0.02, atol=0.02)
    written = next(node for node in gm.graph.nodes if node.name == "einsum")
    assert written.meta["precision"].output is FP32


@pytest.mark.parametrize("equation", ["ij->i", "ij->", "ij,k->ik"])
def test_a_sum_is_fp32(tools, equation):
    """A sum of 400 values of 300 overflows in float16; see that it is one in both placements."""

    def f(x, w):
        y = F.linear(x, w)
        return torch.einsum(equation, *(y, y[0])[: equation.count(",") + 1])

    inputs = torch.full((2, 1), 300.0), torch.ones(400, 1)
    for placement in ("mincut", "autocast"):
        gm = tools.rewritten(tools.traced(f, *inputs), tools.context(low=FP16, placement=placement))
        torch.testing.assert_close(gm(*inputs), f(*inputs), rtol=1e-3, atol=0)


def test_autocasts_placement_lowers_as_autocast_does(tools):
    f = Beside(lambda p, f: p[:, None] @ f[None])
    gm = tools.rewritten(tools.traced(f, POSITIONS, FREQUENCIES), tools.context(placement="autocast"), until="decide")
    found = {node.name: node.meta["precision"] for node in gm.graph.nodes}
    assert found["matmul"].reads is BF16
