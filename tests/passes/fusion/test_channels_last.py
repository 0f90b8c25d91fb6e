"""channels_last: where images change their order in memory, and that nobody else sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxprec.passes.fusion.channels_last import channels_last, lay_out_images
from fxprec.passes.graph.annotations import graph_notes
from fxprec.passes.graph.text import format_graph

X, W = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)


@pytest.fixture
def laid_out(tools: Any) -> Callable[..., GraphModule]:
    def rewrite(function: Any, *inputs: Tensor, until: str = "verify") -> GraphModule:
        return tools.rewritten(tools.traced(function, *inputs), tools.context(channels_last=True), until=until)

    return rewrite


def copies(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.name.endswith(("_last", "_first"))]


def test_the_graph_after(laid_out: Any, tools: Any) -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        y = F.relu(F.conv2d(x, w), inplace=True)
        return y.flatten(1), y.dim()

    gm = laid_out(f, X, W, until="fuse")
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = placeholder
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%x_bf16_last: bfloat16 = contiguous(%x_bf16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%conv2d: bfloat16 = conv2d(%x_bf16_last, %w_bf16)
%relu: bfloat16 = relu_(%conv2d, inplace=True)
%relu_first: bfloat16 = contiguous(%relu)
%flatten: bfloat16 = flatten(%relu_first, 1)
%dim: - = dim(%relu)
%flatten_f32: float32 = to(%flatten, torch.float32)
return (%flatten_f32, %dim)""",
    )
    assert not lay_out_images(gm, tools.context(channels_last=True)).changed


def residual(x: Tensor, w: Tensor) -> Tensor:
    y = F.max_pool2d(F.relu(F.conv2d(x, w, padding=1)), 2)
    return torch.cat([y, F.avg_pool2d(x, 2)], 1) * 2


MODELS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    "residual": (residual, (X, W), 3),
    "one channel": (lambda x, w: F.conv2d(F.relu(F.conv2d(x, w)), w.mT.reshape(1, 2, 3, 3)), (X[:, :1], W[:2, :1]), 2),
    "one column": (lambda x, w: F.conv2d(x, w).relu(), (torch.randn(2, 40, 9, 1), torch.randn(2, 40, 1, 1)), 2),
    "transposed": (lambda x, w: F.conv_transpose2d(F.conv2d(x, w), w).sigmoid(), (X, W), 2),
    "view": (lambda x, w: F.conv2d(x, w).view(2, -1), (X, W), 2),
    "read twice": (lambda x, w: (lambda y: (y.flatten(1), y.mean((2, 3)), y.relu()))(F.conv2d(x, w)), (X, W), 3),
}


@pytest.mark.parametrize("name", [*MODELS])
def test_values_and_strides_are_as_before(name: str, laid_out: Any, tools: Any) -> None:
    function, inputs, expected = MODELS[name]
    gm = laid_out(function, *inputs)
    plain = tools.rewritten(tools.traced(function, *inputs), tools.context())
    assert len(copies(gm)) == expected
    ours, before, exact = gm(*inputs), plain(*inputs), function(*(each.double() for each in inputs))
    for got, was, true in zip(
        *(each if isinstance(each, tuple) else (each,) for each in (ours, before, exact)), strict=True
    ):
        assert got.is_contiguous() and was.is_contiguous() and got.dtype == was.dtype
        assert (got - true).norm() <= 2 * (was - true).norm() + 1e-6


@pytest.mark.parametrize("training", [True, False])
def test_a_net_with_norms_and_its_gradients(training: bool, laid_out: Any, tools: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.end = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 4, 5)

        def forward(self, x: Tensor) -> Tensor:
            conv, norm, end = self.conv, self.norm, self.end
            y = F.conv2d(x, conv.weight, conv.bias)
            y = F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training)
            return F.linear(F.max_pool2d(F.relu(y), 2).flatten(1), end.weight, end.bias)

    def results(module: nn.Module, x: Tensor) -> list[Tensor]:
        torch.manual_seed(1)
        out = module(x)
        return [out.detach(), *torch.autograd.grad((out * torch.randn(out.shape)).sum(), [*module.parameters()])]

    torch.manual_seed(0)
    net = Net().train(training)
    state, found = net.state_dict(), []
    for settings in ({"channels_last": True}, {}):
        gm = tools.rewritten(tools.traced(net, X), tools.context(**settings))
        gm.load_state_dict({key: value.clone() for key, value in state.items()}, strict=False)
        found.append((results(gm, X), [value for _, value in gm.named_buffers()], bool(copies(gm))))
    (ours, buffers, changed), (plain, kept, _) = found
    assert changed
    wide = Net().train(training).double()
    wide.load_state_dict(state)
    exact = results(wide, X.double())
    for got, was, true in zip(ours, plain, exact, strict=True):
        assert (got - true).norm() <= 2 * (was - true).norm() + 1e-3 * true.norm()
    for got, was in zip(buffers, kept, strict=True):
        torch.testing.assert_close(got, was)


def test_dropout_draws_as_before(laid_out: Any, tools: Any) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(F.conv2d(x, w), 0.5, True)

    outputs = []
    for settings in ({"channels_last": True}, {}):
        gm = tools.rewritten(tools.traced(f, X, W), tools.context(**settings))
        torch.manual_seed(3)
        outputs.append(gm(X, W))
    assert torch.equal(outputs[0] == 0, outputs[1] == 0)


@pytest.mark.parametrize(
    ("function", "inputs", "why"),
    [
        (lambda x, w: F.conv2d(x, w), (X[..., :3, :3], W), "weights are larger"),
        (lambda x, w: F.conv2d(x, w), (), "not known without sizes"),
        (lambda x, w: F.conv2d(x, w), (X[0], W), None),
        (lambda x, w: F.conv2d(x, w, None, 1, 2, 2, 3), (X, torch.randn(3, 1, 3, 3)), "grouped, dilated filters"),
        (lambda x, w: F.linear(x, w), (torch.randn(2, 3), torch.randn(4, 3)), None),
        (lambda x, w: (lambda y: (y.view(2, -1).mul_(2), y))(F.conv2d(x, w)), (X, W), "writes to what would be a copy"),
    ],
)
def test_where_it_stays(function: Any, inputs: tuple[Tensor, ...], why: str | None, laid_out: Any) -> None:
    gm = laid_out(function, *inputs)
    assert not copies(gm)
    declined = [each for each in graph_notes(gm).declined if "channels last" in each]
    assert (declined == []) if why is None else (len(declined) == 1 and why in declined[0])


def test_only_where_the_context_says_so_and_what_is_low(tools: Any) -> None:
    f = lambda x, w: F.conv2d(x, w)  # noqa: E731
    assert not copies(tools.rewritten(tools.traced(f, X, W), tools.context()))
    assert not copies(tools.rewritten(tools.traced(f, X, W), tools.context("O0", channels_last=True)))


def test_whoever_traces_the_graph_again_finds_the_call(laid_out: Any) -> None:
    gm = laid_out(residual, X, W)
    again = symbolic_trace(gm)
    assert len(again.graph.find_nodes(op="call_function", target=channels_last)) == 2
    assert torch.equal(again(X, W), gm(X, W))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 1, 1, 1)])
def test_the_copy(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    y = channels_last(x)
    _, channels, height, width = shape
    assert torch.equal(x, y) and y.stride() == (channels * height * width, 1, channels * width, channels)
    y.sum().backward()
    assert x.grad is not None and bool((x.grad == 1).all())
    assert channels_last(x[0]) is not None and torch.equal(channels_last(x[0]), x[0])
