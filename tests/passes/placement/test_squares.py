"""squares: in float16 a value is multiplied by itself in FP32, however that is spelled; products of others are not."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.passes.graph.annotations import Rule
from fxprec.passes.placement.products import is_square
from fxprec.passes.policy.policy import Policy

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def written(y, value):
    y[0] = value[0]
    return y


ELEMENTWISE = {
    "square": lambda y: y.square(),
    "torch.square": lambda y: torch.square(y),
    "y * y": lambda y: y * y,
    "torch.mul": lambda y: torch.mul(y, y),
    "other=": lambda y: torch.mul(y, other=y),
    "multiply": lambda y: torch.multiply(y, y),
    "method": lambda y: y.mul(y),
    "dunder": lambda y: y.__mul__(y),
    "mul_": lambda y: y.mul_(y),
    "square_": lambda y: y.square_(),
    "torch.square_": lambda y: torch.square_(y),
    "imul": lambda y: operator.imul(y, y),
    "detached": lambda y: y * y.detach(),
    "cloned": lambda y: y.clone() * y,
    "cast": lambda y: y * y.float(),
    "contiguous": lambda y: y.contiguous() * y,
    "in its own shape": lambda y: y * y.view(y.shape),
    "as itself": lambda y: y.reshape(y.size()) * y.view_as(y),
    "two equal views": lambda y: y.view(-1) * y.view(-1),
    "two equal parts": lambda y: y[0] * y[0],
    "made twice": lambda y: F.relu(y) * F.relu(y),
    "addcmul": lambda y: torch.addcmul(y, y, y),
    "addcmul_": lambda y: torch.zeros_like(y).addcmul_(y, y),
    "pow": lambda y: y.pow(2),
    "pow_": lambda y: y.pow_(2),
    "ipow": lambda y: operator.ipow(y, 2),
    "out=": lambda y: torch.mul(y, y, out=torch.empty_like(y)),
    "copied into": lambda y: torch.empty_like(y).copy_(y * y),
    "added to": lambda y: torch.zeros_like(y).add_(y * y),
    "written into": lambda y: written(torch.zeros_like(y), y * y),
}
CONTRACTIONS = {
    "dot": lambda y: torch.dot(y.view(-1), y.view(-1)),
    "vdot": lambda y: torch.vdot(y[0], y[0]),
    "inner": lambda y: torch.inner(y[0], y[0]),
    "sum": lambda y: (y * y).sum(),
    "mean": lambda y: y.square().mean(-1),
    "i,i->": lambda y: torch.einsum("i,i->", y[0], y[0]),
    "ij,ij->": lambda y: torch.einsum("ij,ij->", y, y),
    "... i": lambda y: torch.einsum("...i, ...i -> ...", y, y),
    "sublists": lambda y: torch.einsum(y, [0, 1], y, [0, 1], [0]),
    "tensordot": lambda y: torch.tensordot(y, y),
    "tensordot, named": lambda y: torch.tensordot(y, y, ([0, 1], [0, 1])),
    "vecdot": lambda y: torch.linalg.vecdot(y, y),
    "matmul of vectors": lambda y: y.flatten() @ y.flatten(),
    "vector norm": lambda y: torch.linalg.vector_norm(y, dim=-1),
    "norm": lambda y: y.norm(),
    "RMS norm": lambda y: y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6),
    "RMS norm by mul": lambda y: y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-6),
    "variance": lambda y: (y - y.mean()).square().mean(),
}


class Head(nn.Module):
    """A product that gives its input back, in float16, and an op on it."""

    def __init__(self, op):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.linear.weight)
        self.op = op

    def forward(self, x):
        return self.op(self.linear(x))


def near_300():
    return 300 + torch.randint(-20, 20, (3, 8)).float()


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("spelling", [*ELEMENTWISE, *CONTRACTIONS])
def test_squares_of_300_are_finite(spelling: str, level: str, capture: str) -> None:
    op, x = (ELEMENTWISE | CONTRACTIONS)[spelling], near_300()
    with torch.no_grad():
        wanted = Head(op)(x)
        model, _ = fxprec.convert(Head(op), level=level, dtype=FP16, capture=capture, scaler=False)
        torch.testing.assert_close(model(x), wanted, rtol=2e-3, atol=0.3)


@pytest.mark.parametrize("fuse", [False, "aten"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_rms_norm_by_hand_and_its_gradients(level: str, fuse) -> None:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.gain, self.down = nn.Linear(8, 8), nn.Parameter(torch.rand(8)), nn.Linear(8, 8)

        def forward(self, x):
            y = self.up(x)
            return self.down(self.gain * (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)))

    model, x = Block(), near_300()
    exact = model.double()(x.double())
    exact.square().sum().backward()
    gradients = [parameter.grad.float() for parameter in model.parameters()]
    model.zero_grad()
    model.float()
    model, _ = fxprec.convert(model, level=level, dtype=FP16, fuse=fuse, scaler=False)
    output = model(x)
    output.square().sum().backward()
    torch.testing.assert_close(output, exact.float(), rtol=5e-3, atol=5e-3)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=2e-2, atol=2e-2 * gradient.abs().max().item())


@pytest.fixture
def rules(tools):
    """name -> what is decided of the ops between a product of x with w and the result."""

    def run(op, low=FP16, level="O1", shapes=True, **settings):
        def between(x, w):
            return op(F.linear(x, w))

        gm = tools.traced(between, *([torch.randn(4, 4)] * 2 if shapes else ()))
        tools.rewritten(gm, tools.context(level, low=low, **settings), until="decide")
        return {node.name: node.meta["precision"] for node in gm.graph.nodes}

    return run


@pytest.mark.parametrize("spelling", ["square", "y * y", "mul_", "ij,ij->", "tensordot", "vecdot", "dot", "inner"])
def test_they_are_full_in_float16_only(rules, spelling: str) -> None:
    op = (ELEMENTWISE | CONTRACTIONS)[spelling]
    name, found = [*rules(op).items()][-2]
    assert (found.rule, found.compute, found.output) == (Rule.FULL, FP32, FP32)
    assert found.why == "squares leave the range of float16 from 256 on"
    assert rules(op, low=BF16)[name].output is BF16
    assert rules(op, placement="autocast")[name].output is FP16
    assert rules(op, level="O3")[name].output is FP16


OTHERS = {
    "another factor": lambda y: y * y.sigmoid(),
    "a number": lambda y: y * 2.0,
    "transposed": lambda y: y * y.t(),
    "two parts": lambda y: y[0] * y[1],
    "Gram matrix": lambda y: y @ y.t(),
    "Gram matrix by einsum": lambda y: torch.einsum("ij,kj->ik", y, y),
    "Gram matrix by inner": lambda y: torch.inner(y, y),
    "Gram matrix by tensordot": lambda y: torch.tensordot(y, y, ([0], [0])),
    "matrix squared": lambda y: y @ y,
    "outer": lambda y: torch.outer(y[0], y[0]),
    "trace of a product": lambda y: torch.einsum("ij,ji->", y, y),
}


@pytest.mark.parametrize("which", OTHERS)
def test_other_products_stay_low(rules, which: str) -> None:
    _, found = [*rules(OTHERS[which]).items()][-2]
    assert found.output is FP16


def test_in_doubt_a_matmul_is_a_gram_matrix_and_a_contraction_is_not(rules) -> None:
    assert [*rules(lambda y: torch.matmul(y, y), shapes=False).values()][-2].output is FP16
    assert [*rules(lambda y: torch.inner(y, y), shapes=False).values()][-2].output is FP32
    assert [*rules(lambda y: torch.tensordot(y, y, 1), shapes=False).values()][-2].output is FP32


def test_what_a_user_says_of_an_op_holds(rules) -> None:
    policy = Policy.preset("O1").override(ops={"mul": "low"})
    assert rules(lambda y: y * y, policy=policy)["mul"].output is FP16


def test_memory_that_is_low_by_a_cast_of_the_users_stays_low(rules) -> None:
    found = rules(lambda y: y.half().mul_(y))
    assert (found["mul_"].rule, found["mul_"].output) == (Rule.PROMOTE, FP16)


def test_weights_and_integers(tools) -> None:
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.a * self.a, self.a * self.b, x * x

    gm = tools.rewritten(tools.traced(Own(), torch.arange(3)), tools.context(low=FP16), until="propagate")
    found = {node.name: is_square(node) for node in gm.graph.nodes if node.op == "call_function"}
    assert found == {"mul": True, "mul_1": False, "mul_2": True}
    tools.rewritten(gm, tools.context(low=FP16))
    assert next(node for node in gm.graph.nodes if node.name == "mul_2").meta["precision"].output is not FP32


def test_both_factors_read_one_cast(tools) -> None:
    """So that their gradients are added in FP32."""
    gm = tools.traced(lambda x, w: (y := F.linear(x, w)) * y, torch.randn(4, 4), torch.randn(4, 4))
    tools.rewritten(gm, tools.context(low=FP16))
    mul = next(node for node in gm.graph.nodes if node.name == "mul")
    assert mul.args[0] is mul.args[1]
    assert mul.args[0].name == "linear_f32"


class Gram(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.linear, self.checkpointed = nn.Linear(4, 4), checkpointed

    def products(self, x):
        y = self.linear(x)
        return torch.inner(y, y) + torch.inner(y[0], y[0])

    def forward(self, x):
        return checkpoint(self.products, x, use_reentrant=False) if self.checkpointed else self.products(x)


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning", "ignore:float16 on a CPU")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_products_of_rows_in_a_checkpointed_region_are_no_squares(checkpointed):
    """Of a region's body dynamo's own fake values tell that each row is multiplied with each."""
    model, _ = fxprec.convert(Gram(checkpointed), (torch.randn(3, 4),), dtype=FP16)
    model(torch.randn(3, 4))
    rows = [row for graph in fxprec.report(model).graphs for row in graph.rows if row.op == "inner"]
    assert [row.compute for row in rows] == ["float16", "float32"]
