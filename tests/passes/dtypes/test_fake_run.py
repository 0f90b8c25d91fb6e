"""fake_run: what torch gives on fake tensors, against what is stated; nothing outside of the run changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx import wrap
from torch.utils._python_dispatch import TorchDispatchMode

from fxprec.kernels.calls.batch_norm import batch_norm
from fxprec.passes.dtypes.fake_run import run_on_fakes
from fxprec.passes.graph.annotations import notes


@wrap
def stranger(x):
    return x * 1.0


F32, BF16 = torch.float32, torch.bfloat16
X, W = torch.randn(2, 4), torch.randn(4, 4)


@pytest.fixture
def final(tools):
    """The graph of a function, rewritten at O1, with the answer of every node stated wrong that is named."""

    def run(function, *inputs, wrong=(), **settings):
        gm = tools.rewritten(tools.traced(function, *inputs), tools.context(**settings), until="fuse")
        for node in gm.graph.nodes:
            if node.name in wrong:
                precision = notes(node).precision
                other = F32 if precision.output is BF16 else BF16
                notes(node).precision = precision._replace(output=other)
        return gm

    return run


def found(gm):
    return [(node.name, got, stated) for node, got, stated in run_on_fakes(gm)]


@pytest.mark.parametrize(
    ("function", "inputs", "name", "got"),
    [
        (lambda x, w: F.linear(x, w), (X, W), "linear", BF16),
        (lambda x, w: F.linear(x, w).relu().exp(), (X, W), "exp", F32),
        (lambda x, w: F.linear(x, w).mul_(2.0), (X, W), "mul_", BF16),
        (lambda x, w: F.linear(x, w).max(-1)[0], (X, W), "getitem", BF16),
        (lambda x, w: torch.stack(F.linear(x, w).chunk(2)), (X, W), "stack", BF16),
        (lambda x, w: F.linear(x, w).softmax(-1), (X, W), "softmax", F32),
        (lambda x, w: F.linear(x, w)[:, 1:].to(torch.float32), (X, W), "to", F32),
    ],
)
def test_a_wrong_dtype_is_found_and_none_else(final, function, inputs, name, got):
    assert found(final(function, *inputs)) == []
    gm = final(function, *inputs, wrong=[name])
    assert (name, got, F32 if got is BF16 else BF16) in found(gm)
    assert {node for node, _, _ in found(gm)} == {name}


def test_without_captured_values_there_is_nothing_to_run(final):
    assert found(final(lambda x, w: F.linear(x, w), wrong=["linear"])) == []


def test_neither_captured_values_nor_random_state_change(final):
    def f(x, w):
        y = F.dropout(F.linear(x, w), 0.5, True)
        x.resize_(4, 4)
        x.mul_(2.0)
        return y + torch.randn(2, 4), x

    gm = final(f, X.clone(), W)
    values = [node.meta["val"] for node in gm.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    before = [(value.shape, value.dtype, value._version) for value in values]
    state = torch.random.get_rng_state()
    assert found(gm) == []
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [(value.shape, value.dtype, value._version) for value in values] == before


def test_a_write_to_what_was_not_run_does_not_reach_its_captured_value(final):
    """A function of a user's is not run: what it gave stands for it, and is copied before the graph changes it."""
    gm = final(lambda x, w: stranger(F.linear(x, w)).unsqueeze_(0).exp(), X, W)
    value = next(node.meta["val"] for node in gm.graph.nodes if node.target is stranger)
    before = value.shape
    assert found(gm) == []
    assert value.shape == before


class Count(TorchDispatchMode):
    """How often an op is dispatched."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def test_layers_that_are_alike_run_once(final):
    def f(x, w):
        for _ in range(6):
            x = F.linear(x, w).relu()
        return x

    gm = final(f, X, W)
    with Count() as count:
        assert found(gm) == []
    assert count.calls.count(torch.ops.aten.relu) == 1


def test_calls_of_our_kernels_are_not_run(final):
    def f(x, w, mean, var):
        return F.relu(F.batch_norm(F.conv2d(x, w), mean, var, training=True))

    gm = final(f, torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.zeros(4), torch.ones(4), regions="triton")
    assert gm.graph.find_nodes(op="call_function", target=batch_norm)
    with Count() as count:
        assert found(gm) == []
    assert torch.ops.aten.convolution in count.calls
    assert not {packet for packet in count.calls if "batch_norm" in str(packet)}


def test_calls_that_read_values_are_not_run(final):
    def f(x, w):
        y = F.linear(x, w)
        return y * y.sum().item()

    gm = final(f, X, W)
    with Count() as count:
        assert found(gm) == []
    assert torch.ops.aten._local_scalar_dense not in count.calls


def test_what_has_no_fake_is_taken_as_stated(final):
    """``unique`` gives a shape that nobody knows: its readers are judged by what is stated of it."""

    def f(x, w):
        return torch.nonzero(F.linear(x, w)).float().exp()

    assert found(final(f, X, W)) == []
