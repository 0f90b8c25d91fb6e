"""placement="autocast": the dtypes of torch.autocast on CUDA, op by op, from the lists that torch ships as a header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.passes.graph.annotations import Arrival, Rule
from fxprec.passes.ops.names import canonical_name
from fxprec.passes.ops.table import row_of
from fxprec.passes.policy.policy import Policy

FP32, BF16 = torch.float32, torch.bfloat16
X, W = torch.rand(4, 4), torch.rand(4, 4)


@pytest.fixture
def decided(tools):
    def run(function, *inputs, level="O1", **settings):
        gm = tools.traced(function, *(inputs or (X, W)))
        tools.rewritten(gm, tools.context(level, placement="autocast", **settings), until="decide")
        return {node.name: node.meta["precision"] for node in gm.graph.nodes}

    return run


def listed(name: str) -> set[str]:
    """Canonical names of one list of ATen/autocast_mode.h."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this torch ships no headers")
    found = re.search(rf"#define AT_FORALL_{name}\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)
    assert found is not None
    names = re.findall(r"_\((\w+)", found.group(1))
    return {op.name for each in names if (op := canonical_name(each, "call_method")) is not None}


def rules(names: set[str]) -> set[Rule]:
    return {row.rule for row in map(row_of, names) if row is not None}


def test_every_op_of_the_lists_is_here():
    fp32 = {name for name in listed("FP32") | listed("FP32_SET_OPT_DTYPE") | {"norm"} if row_of(name) is not None}
    assert len(fp32) > 50
    assert {name for name in fp32 if row_of(name).autocast is not Rule.FULL} == set()
    assert {row_of(name).autocast or row_of(name).rule for name in listed("LOWER_PRECISION_FP")} == {Rule.LOW}
    assert {row_of(name).autocast or row_of(name).rule for name in listed("PROMOTE")} == {Rule.PROMOTE}


#: What each spelling gives with inputs x (FP32) and y (low, a product).
CASES = {
    "add": (lambda x, y, w: x + y, FP32),
    "mul": (lambda x, y, w: y * y, BF16),
    "relu": (lambda x, y, w: torch.relu(y), BF16),
    "gelu": (lambda x, y, w: F.gelu(x), FP32),
    "matmul": (lambda x, y, w: x @ y, BF16),
    "bmm": (lambda x, y, w: torch.bmm(x[None], y[None]), BF16),
    "einsum": (lambda x, y, w: torch.einsum("ij,jk->ik", x, y), BF16),
    "prelu": (lambda x, y, w: F.prelu(x, w[0, :1]), BF16),
    "exp": (lambda x, y, w: torch.exp(y), FP32),
    "pow": (lambda x, y, w: y**2, FP32),
    "rdiv": (lambda x, y, w: 1.0 / y, FP32),
    "softmax": (lambda x, y, w: torch.softmax(y, -1), FP32),
    "softmax_dtype": (lambda x, y, w: torch.softmax(y, -1, dtype=torch.bfloat16), BF16),
    "log_softmax": (lambda x, y, w: F.log_softmax(y, -1), FP32),
    "layer_norm": (lambda x, y, w: F.layer_norm(y, (4,), w[0]), FP32),
    "group_norm": (lambda x, y, w: F.group_norm(y, 2), FP32),
    "batch_norm": (lambda x, y, w: F.batch_norm(y, None, None, training=True), BF16),
    "sum": (lambda x, y, w: y.sum(-1), FP32),
    "mean": (lambda x, y, w: y.mean(-1), BF16),
    "var": (lambda x, y, w: y.var(-1), BF16),
    "sin": (lambda x, y, w: torch.sin(y), BF16),
    "norm": (lambda x, y, w: torch.linalg.vector_norm(y, dim=-1), FP32),
    "cdist": (lambda x, y, w: torch.cdist(y, y), FP32),
    "mse_loss": (lambda x, y, w: F.mse_loss(y, x), FP32),
    "cross_entropy": (lambda x, y, w: F.cross_entropy(y, x), FP32),
    "cat": (lambda x, y, w: torch.cat([x, y]), FP32),
    "cat_low": (lambda x, y, w: torch.cat([y, y]), BF16),
    "stack": (lambda x, y, w: torch.stack([x, y]), FP32),
    "where": (lambda x, y, w: torch.where(x > 0, x, y), FP32),
    "addcmul": (lambda x, y, w: torch.addcmul(y, y, x), FP32),
    "atan2": (lambda x, y, w: torch.atan2(y, x), FP32),
    "cross": (lambda x, y, w: torch.cross(y[:, :3], x[:, :3], dim=-1), FP32),
    "dot": (lambda x, y, w: torch.dot(y[0], x[0]), FP32),
    "tensordot": (lambda x, y, w: torch.tensordot(y, x), FP32),
    "bilinear": (lambda x, y, w: F.bilinear(y, x, w.view(1, 4, 4)), FP32),
    "grid_sample": (lambda x, y, w: F.grid_sample(y[None, None], x.view(1, 2, 4, 2), align_corners=False), FP32),
    "scatter_add": (lambda x, y, w: x.scatter_add(0, (x > 9).long(), y), FP32),
    "index_put": (lambda x, y, w: y.index_put(((x[0] > 9).long(),), x[0]), FP32),
    "interpolate": (lambda x, y, w: F.interpolate(y[None, None], scale_factor=2.0, mode="bilinear"), FP32),
    "nearest": (lambda x, y, w: torch._C._nn.upsample_nearest2d(y[None, None], (8, 8)), FP32),
    "dropout": (lambda x, y, w: F.dropout(y), BF16),
    "view": (lambda x, y, w: y.view(-1)[1:], BF16),
    "zero_dim": (lambda x, y, w: y * x.sum(), BF16),
    "clone": (lambda x, y, w: y.clone(), BF16),
    "max_pool": (lambda x, y, w: F.max_pool1d(y, 2), BF16),
    "clamp": (lambda x, y, w: y.clamp(0.0, 1.0), BF16),
    "user": (lambda x, y, w: y.float() + 1.0, FP32),
    "type_as": (lambda x, y, w: x.type_as(y), BF16),
    "in_place": (lambda x, y, w: y.add_(x), BF16),
}


def final(gm):
    """The precision of what the graph returns."""
    return gm.graph.output_node().args[0].meta["precision"]


@pytest.mark.parametrize("case", CASES)
def test_op_by_op(tools, case):
    op, expected = CASES[case]
    gm = tools.traced(lambda x, w: op(x, F.linear(x, w), w), X, W)
    tools.rewritten(gm, tools.context(placement="autocast"), until="decide")
    assert final(gm).output is expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("case", CASES)
def test_as_autocast_does_on_cuda(case):
    op, expected = CASES[case]
    x, w = X.cuda(), W.cuda()
    with torch.autocast("cuda", dtype=BF16):
        result = op(x.clone(), F.linear(x, w), w)
    assert isinstance(result, Tensor)
    assert result.dtype is expected


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"dropout"}))
def test_it_runs_and_is_right(tools, case):
    """Every edge of the rewritten graph has a dtype that its kernel takes."""
    op, _ = CASES[case]

    def function(x, w):
        return op(x, F.linear(x, w), w)

    gm = tools.rewritten(tools.traced(function, X, W), tools.context(placement="autocast"))
    result, expected = gm(X, W), function(X.clone(), W)
    assert result.dtype is expected.dtype
    assert torch.allclose(result, expected, rtol=0.05, atol=0.1)


def test_what_eager_autocast_cannot_do_works(decided):
    def f(x, w):
        y = F.linear(x, w)
        return torch.lerp(y, x, 0.5), y.masked_fill(x > 9, torch.finfo(FP32).min), torch.linalg.inv(y)

    found = decided(f)
    assert found["lerp"].reads is FP32
    assert found["masked_fill"].reads is FP32
    assert (found["linalg_inv"].rule, found["linalg_inv"].output) == (Rule.KEEP, FP32)


def test_levels_and_overrides(decided):
    def f(x, w):
        return torch.softmax(torch.relu(x + w), -1)

    assert decided(f)["add"].reads is FP32
    assert decided(f, level="O2")["add"].reads is BF16
    assert decided(f, level="O3")["softmax"].reads is BF16
    assert decided(f, level="O0")["softmax"].rule is Rule.KEEP
    assert decided(f, policy=Policy().override(ops={"relu": torch.bfloat16}))["relu"].reads is BF16
    batch_norm = Policy().override(ops={"batch_norm": torch.float32})
    norm = decided(lambda x, w: F.batch_norm(F.linear(x, w), None, None, training=True), policy=batch_norm)
    assert norm["batch_norm"].reads is FP32
    full = Policy().override(ops={"mean": "full"})
    assert decided(lambda x, w: F.linear(x, w).mean(), policy=full)["mean"].reads is FP32


def test_integers_are_untouched(decided):
    found = decided(lambda ids, x: (ids + 1, ids > 2, x * 2.0), torch.arange(4), torch.rand(4, dtype=torch.float64))
    assert all(isinstance(p.reads, Arrival) for p in found.values())
    assert found["mul"].output is torch.float64
