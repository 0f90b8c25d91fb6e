"""kernel_calls: which nodes become calls of hand-written kernels, what they join, and that results stay the same."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
import kernel_tools
from fxprec.kernels.calls import cross_entropy as cross_entropy_file
from fxprec.kernels.calls.batch_norm import batch_norm
from fxprec.kernels.calls.cross_entropy import cross_entropy
from fxprec.kernels.calls.group_norm import group_norm
from fxprec.kernels.calls.max_pool2d import max_pool2d
from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.kernels.launch import triton_support
from fxprec.passes.graph.annotations import Rule, graph_notes
from fxprec.passes.graph.text import format_graph
from fxprec.testing import count_casts

on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)
outside = pytest.mark.skipif(kernel_tools.INTERPRETING, reason="wants to be outside of the interpreter")
#: As one compiled loop, where one can be.
loop_too = pytest.mark.parametrize("fuse", ["auto", *([] if why_not() else [True])])
X, WEIGHT = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
CHANNELS = [torch.zeros(4), torch.ones(4), torch.randn(4), torch.randn(4)]


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


def normalized(x, w, mean, var, weight, bias):
    return F.batch_norm(F.conv2d(x, w), mean, var, weight, bias, True, 0.1, 1e-5)


def rewritten(tools, function, *inputs) -> GraphModule:
    return tools.rewritten(tools.traced(function, *inputs), tools.context(regions="triton"), until="fuse")


def calls(gm: GraphModule, function) -> list:
    return gm.graph.find_nodes(op="call_function", target=function)


@outside
def test_the_graph_after(tools) -> None:
    def f(x, w, mean, var, weight, bias, residual, target):
        y = F.relu(normalized(x, w, mean, var, weight, bias) + F.conv2d(residual, w))
        return F.cross_entropy(y.flatten(1), target)

    gm = rewritten(tools, f, X, WEIGHT, *CHANNELS, X, torch.zeros(2, dtype=torch.long))
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = placeholder
%mean: float32 = placeholder
%var: float32 = placeholder
%weight: float32 = placeholder
%bias: float32 = placeholder
%residual: float32 = placeholder
%target: int64 = placeholder
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%conv2d: bfloat16 = conv2d(%x_bf16, %w_bf16)
%residual_bf16: bfloat16 = to(%residual, torch.bfloat16)
%conv2d_1: bfloat16 = conv2d(%residual_bf16, %w_bf16)
%relu: bfloat16 = batch_norm(%conv2d, running_mean=%mean, running_var=%var, weight=%weight, bias=%bias, training=True, momentum=0.1, eps=1e-05, residual=%conv2d_1, relu=True)
%flatten: bfloat16 = flatten(%relu, 1)
%cross_entropy: float32 = cross_entropy(%flatten, target=%target, weight=None, ignore_index=-100, reduction='mean', label_smoothing=0.0)
return %cross_entropy""",  # noqa: E501
    )
    assert [node.meta["fused"] for node in gm.graph.nodes if "fused" in node.meta] == [
        "the kernel of batch_norm, add and relu, on a GPU from 1,048,576 elements on", "the kernel of cross_entropy",
    ]  # fmt: skip
    rules = [node.meta["precision"].rule for node in gm.graph.nodes if "fused" in node.meta]
    assert rules == [Rule.FULL, Rule.FULL]


@outside
def test_batch_norm_joins_what_follows_it_and_nothing_else(tools) -> None:
    def f(x, w, mean, var, weight, bias, residual):
        plain = normalized(x, w, mean, var, weight, bias)
        read_twice = normalized(x, w, mean, var, weight, bias)
        in_place = F.relu(normalized(x, w, mean, var, weight, bias), inplace=True).mean((2, 3))
        scaled = F.relu(torch.add(normalized(x, w, mean, var, weight, bias), residual, alpha=2))
        widened = F.relu(normalized(x, w, mean, var, weight, bias) + residual)
        return plain, read_twice, F.relu(read_twice), in_place, scaled, widened

    residual = torch.randn(2, 4, 3, 3)
    found = calls(rewritten(tools, f, X, WEIGHT, *CHANNELS, residual), batch_norm)
    assert [node.kwargs["relu"] for node in found] == [False, False, True, False, False]
    assert all(node.kwargs["residual"] is None for node in found)


@outside
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, t: F.cross_entropy(x, t, reduce=False), (torch.randn(3, 4), torch.tensor([0, 1, 2]))),
        (lambda x, t: F.cross_entropy(x, t, size_average=True), (torch.randn(3, 4), torch.tensor([0, 1, 2]))),
    ],
)
def test_other_forms_stay_and_the_report_says_so(tools, function, inputs) -> None:
    gm = rewritten(tools, function, *inputs)
    assert not calls(gm, cross_entropy)
    assert graph_notes(gm).declined == [
        "call_kernels: cross_entropy: cross_entropy with arguments that the kernel does not have"
    ]


@outside
def test_without_kernels_nothing_is_called(tools) -> None:
    def f(x, target):
        return F.cross_entropy(x, target)

    gm = tools.traced(f, torch.randn(3, 4), torch.tensor([0, 1, 2]))
    tools.rewritten(gm, tools.context(regions="aten"), until="fuse")
    assert not calls(gm, cross_entropy)


def grouped(x, w, scale, shift, w2, r):
    y = F.conv2d(F.silu(F.group_norm(F.conv2d(x, w), 2, scale, shift)), w2)
    plain = F.conv2d(F.group_norm(y, 4), w2)
    wanted_wide = F.group_norm(y, 2, scale, shift) + r
    of_wide = F.conv2d(F.group_norm(r, 2), w2)
    return plain, wanted_wide, of_wide


def low_group_norms(tools, *inputs) -> GraphModule:
    gm = tools.traced(grouped, *inputs)
    return tools.rewritten(gm, tools.context(regions="triton", device="cuda"))


GROUPED = [X, WEIGHT, *CHANNELS[2:], torch.randn(4, 4, 1, 1), torch.randn(2, 4, 3, 3)]


@outside
def test_group_norms_between_casts_are_one_kernel_with_silu(tools) -> None:
    gm = low_group_norms(tools, *GROUPED)
    first, second = calls(gm, group_norm)
    assert (first.kwargs["silu"], second.kwargs["silu"]) == (True, False)
    assert [str(node.args[0]) for node in (first, second)] == ["conv2d", "conv2d_1"]
    precision = first.meta["precision"]
    assert (precision.compute, precision.output) == (torch.float32, torch.bfloat16)
    assert "reads and writes torch.bfloat16" in precision.why
    assert first.meta["fused"] == "the kernel of group_norm and silu" and second.meta["fused"].endswith("group_norm")
    assert len(calls(gm, F.group_norm)) == 2, "one whose result is wanted in FP32, and one that comes in FP32"
    assert not [node for node in gm.graph.nodes if not node.users and node.op == "call_function"]


@outside
@pytest.mark.parametrize("written", ["source", "scale", "between"])
def test_norms_stay_where_what_they_read_is_written_to(tools, written: str) -> None:
    def f(x, w, scale, shift, w2, mean, var):
        y = F.conv2d(x, w)
        alias = y.flatten(1)
        z = F.group_norm(y, 2, scale, shift) if written != "between" else F.batch_norm(y, mean, var, scale, shift, True)
        (scale if written == "scale" else alias).mul_(3.0)
        return F.conv2d(F.silu(z) if written != "between" else F.relu(z), w2)

    inputs = [X, WEIGHT, *CHANNELS[2:], torch.randn(4, 4, 1, 1), *CHANNELS[:2]]
    gm = tools.rewritten(tools.traced(f, *inputs), tools.context(regions="triton", device="cuda"))
    assert not calls(gm, group_norm) and not calls(gm, batch_norm)
    assert "of what the graph writes to in place" in str(graph_notes(gm).declined)


@outside
@pytest.mark.parametrize("way", ["vmap", "dual"])
def test_who_looks_into_the_ops_gets_torchs(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(triton_support, "can_launch", lambda device: True)  # and no kernel could run here
    x = torch.randn(2, 2, 4, 3, 3).contiguous(memory_format=torch.channels_last_3d)

    def f(y):
        normed = batch_norm(y, None, None, None, None, True)
        return group_norm(normed, 2, silu=True)

    if way == "vmap":
        assert torch.func.vmap(f)(x).shape == x.shape
    else:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x[0], torch.ones_like(x[0]))
            assert torch.autograd.forward_ad.unpack_dual(f(dual)).tangent is not None


@on_devices
def test_group_norms_compute_as_in_float64(tools, device: str) -> None:
    gm = low_group_norms(tools, *GROUPED)
    results = []
    for kind, function in ((torch.float64, grouped), (torch.float32, grouped), (torch.float32, gm)):
        given = [x.to(device, kind).requires_grad_() for x in GROUPED]
        with torch.autocast(device, torch.bfloat16, enabled=function is grouped and kind is torch.float32):
            found = function(*given)
        cotangents = [torch.ones_like(y).mul_(0.5) for y in found]
        results.append([*found, *torch.autograd.grad(found, given, cotangents)])
    for exact, eager, own in zip(*results, strict=True):
        size = exact.abs().max()
        off, theirs = ((y.double() - exact).abs().max() / size for y in (own, eager))
        assert off <= 2 * theirs + 2.0**-7


@outside
def test_a_plain_batch_norm_is_the_kernels_where_channels_lie_next_to_each_other(monkeypatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(triton_support, "can_launch", lambda device: True)
    module = types.SimpleNamespace(batch_norm=lambda x, *_, **options: taken.append(x) or x)
    monkeypatch.setitem(sys.modules, "fxprec.kernels.nn.batch_norm", module)
    planes = torch.randn(2, 4, 3, 3)
    for x in (planes, planes.contiguous(memory_format=torch.channels_last), planes[..., 0]):
        batch_norm(x, *CHANNELS)
    assert len(taken) == 1 and taken[0].stride(1) == 1
    batch_norm(planes, *CHANNELS, relu=True)
    assert len(taken) == 2


class Ops(TorchDispatchMode):
    """The names of the ops that are called within."""

    def __enter__(self) -> list[str]:
        super().__enter__()
        self.names: list[str] = []
        return self.names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().split("::")[1].split(".")[0])
        return func(*args, **(kwargs or {}))


@outside
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_small_norms_and_poolings_are_torchs_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their sizes alone: a captured step does what an eager one does."""
    monkeypatch.undo()
    monkeypatch.setattr(triton_support, "can_launch", lambda device: True)
    monkeypatch.setattr(F, "batch_norm", lambda x, *_: x.clone())  # whose fake form asks for a device that is there
    monkeypatch.setattr(F, "max_pool2d", lambda x, *_: x.clone())
    own = {"batch_norm", "batch_norm_statistics", "max_pool2d"}
    for pixels, large in ((31, False), (32, True)):
        with FakeTensorMode():
            x = torch.empty(16, 64, 32, pixels, dtype=torch.bfloat16, device=device)
            x = x.to(memory_format=torch.channels_last)
            mean, var, weight, bias = (torch.empty(64, device=device) for _ in range(4))
            with Ops() as normed:
                y = batch_norm(x, mean, var, weight, bias, True, residual=x, relu=True)
            with Ops() as pooled:
                max_pool2d(x, 2)
        assert y.dtype == torch.bfloat16 and y.shape == x.shape
        taken = own & {*normed}, own & {*pooled}
        kernels = large or device == "cpu"
        assert taken == (({"batch_norm", "batch_norm_statistics"}, {"max_pool2d"}) if kernels else (set(), set()))


@outside
def test_the_calls_are_torchs_ops_where_no_kernel_runs() -> None:
    logits, target = torch.randn(3, 4).bfloat16(), torch.tensor([0, 1, 2])
    assert torch.equal(cross_entropy(logits, target), F.cross_entropy(logits.float(), target))
    running = [channel.clone() for channel in CHANNELS[:2]], [channel.clone() for channel in CHANNELS[:2]]
    y = F.conv2d(X, WEIGHT)
    own = batch_norm(y, *running[0], *CHANNELS[2:], True, 0.1, 1e-5, y, True)
    assert torch.equal(own, F.relu(F.batch_norm(y, *running[1], *CHANNELS[2:], True, 0.1, 1e-5) + y))
    assert torch.equal(running[0][0], running[1][0]) and torch.equal(running[0][1], running[1][1])


class Bottleneck(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, k, padding=k // 2, bias=False) for k in (1, 3, 1))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.norms[0](self.convs[0](x)))
        y = self.relu(self.norms[1](self.convs[1](y)))
        y = self.norms[2](self.convs[2](y))
        y += x
        return self.relu(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 3), nn.Sequential(Bottleneck(), Bottleneck())
        self.head = nn.Linear(8, 5)

    def forward(self, x, target):
        return F.cross_entropy(self.head(self.blocks(self.stem(x)).mean((2, 3))), target)


@on_devices
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_residual_network_trains_as_in_float64(device: str, channels_last: bool) -> None:
    torch.manual_seed(0)
    net = Net().to(device)
    exact, eager = copy.deepcopy(net).double(), copy.deepcopy(net)
    x, target = torch.randn(4, 3, 9, 9, device=device), torch.tensor([0, 3, 2, 1], device=device)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    low = torch.float16 if kernel_tools.INTERPRETING else torch.bfloat16  # which it cuts where a GPU rounds
    net, _ = fxprec.convert(net, dtype=low, fuse=True)
    loss = net(x, target)
    loss.backward()
    exact(x.double(), target).backward()
    with torch.autocast(device, low):
        eager(x, target).backward()
    gm = fxprec.graph_module(net)
    assert len(calls(gm, batch_norm)) == 6 and len(calls(gm, cross_entropy)) == 1
    for (name, own), other, right in zip(net.named_parameters(), eager.parameters(), exact.parameters(), strict=True):
        size = right.grad.norm() + 1e-3
        error, eager_error = ((p.grad.double() - right.grad).norm() / size for p in (own, other))
        assert error <= 2 * eager_error + 1e-3, name
    for own, right in zip(net.buffers(), exact.buffers(), strict=True):
        assert torch.allclose(own.double(), right.double(), rtol=0.05, atol=0.02)
    assert int(net.blocks[0].norms[0].num_batches_tracked) == 1


@on_devices
def test_a_bottleneck_takes_three_kernels_forward_and_six_backward(device: str) -> None:
    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view and not str(func).startswith(("aten.detach", "aten.empty")):
                self.names.append(str(func).split(".")[1])
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), Bottleneck(), Bottleneck(), nn.AvgPool2d(6)).to(device)
    net, _ = fxprec.convert(net, dtype=torch.bfloat16, fuse=True)
    x = torch.randn(2, 3, 6, 6, device=device).to(memory_format=torch.channels_last).requires_grad_()
    net(x)
    with Count() as forward:
        y = net(x)
    loss = y.sum()
    with Count() as backward:
        loss.backward()
    assert forward.names.count("batch_norm") == 6 and forward.names.count("batch_norm_statistics") == 6
    assert backward.names.count("batch_norm_backward") == 6  # two launches each: sums over the batch, then dx
    extra = [n for n in forward.names if n not in ("convolution", "batch_norm", "batch_norm_statistics", "add_")]
    assert [name for name in extra if name not in ("_foreach_copy_", "_to_copy", "avg_pool2d")] == []
    others = [
        n for n in backward.names if n not in ("convolution_backward", "batch_norm_backward", "ones_like", "expand")
    ]
    torchs = {"new_empty_strided", "copy_"}  # gradients of weights that lie in channels_last, accumulated
    assert {*others} <= {"_to_copy", "add", "add_", "avg_pool2d_backward"} | torchs, others
    # The gradient of a block's input comes from its convolution and from its residual: one addition a block.
    assert sum(name in ("add", "add_") for name in others) <= 2


@outside
@loop_too
@pytest.mark.parametrize("ignored", [False, True], ids=["all rows", "some rows ignored"])
def test_many_logits_on_a_cpu_make_no_copies_in_fp32(ignored: bool, fuse: Any):
    """Forward and gradients, against float64, and what autograd keeps."""
    torch.manual_seed(0)
    head = nn.Linear(16, 4100, bias=False)
    x, labels = torch.randn(257, 16), torch.randint(4100, (257,))
    if ignored:
        labels[::3] = -100
    gradients: dict[str, list[torch.Tensor]] = {}
    kept: list[torch.Tensor] = []

    def run(name: str, model: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        inputs = x.to(dtype).requires_grad_()
        loss = model(inputs, labels)
        found = torch.autograd.grad(loss, (inputs, head.weight if dtype is torch.float32 else exact.weight))
        gradients[name] = [loss.detach(), *found]
        return loss

    exact = nn.Linear(16, 4100, bias=False).double()
    exact.load_state_dict(head.state_dict())
    run("exact", lambda x, y: F.cross_entropy(exact(x), y), torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        run("eager", lambda x, y: F.cross_entropy(head(x), y))
    model = fxprec.convert(head, loss=F.cross_entropy, fuse=fuse).module
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run("ours", model)
    for ours, eager, right in zip(*(gradients[name] for name in ("ours", "eager", "exact")), strict=True):
        assert (ours.double() - right).norm() <= 2 * (eager.double() - right).norm() + 1e-9
    logits = [tensor.dtype for tensor in kept if tensor.numel() == 257 * 4100]
    assert logits and {*logits} == {torch.bfloat16}
    (node,) = fxprec.graph_module(model).graph.find_nodes(op="call_function", target=cross_entropy)
    loop = "cross_entropy by a compiled loop from 262,144 logits on"
    assert node.meta["fused"] == (loop if fuse is True else "the kernel of cross_entropy")


@outside
def test_few_logits_on_a_cpu_take_torchs_loss():
    head, x, labels = nn.Linear(16, 8), torch.randn(5, 16), torch.randint(8, (5,))
    plain = fxprec.convert(copy.deepcopy(head), loss=F.cross_entropy, fuse=False).module
    model = fxprec.convert(head, loss=F.cross_entropy).module
    assert torch.equal(model(x, labels), plain(x, labels))
    (node,) = [node for node in fxprec.graph_module(model).graph.nodes if node.target is cross_entropy]
    assert node.args[0].meta["precision"].output is torch.bfloat16
    with count_casts() as casts:
        model(x, labels)
    assert casts.total == 2  # the input, and the logits within the call


@outside
@loop_too
@pytest.mark.parametrize("way", ["vmap", "jvp", "trace", "float64 probabilities"])
def test_many_logits_take_torchs_loss_where_nothing_else_can_serve(way: str, fuse: Any, monkeypatch):
    torch.manual_seed(0)
    head, x, labels = nn.Linear(16, 8), torch.randn(3, 5, 16), torch.randint(8, (3, 5))
    model = fxprec.convert(head, loss=F.cross_entropy, fuse=fuse).module

    def run() -> torch.Tensor:
        if way == "vmap":
            return torch.func.vmap(model)(x, labels)
        if way == "jvp":
            return torch.func.jvp(lambda x: model(x, labels[0]), (x[0],), (x[1],))[1]
        if way == "trace":
            return torch.jit.trace(model, (x[0], labels[0]))(x[1], labels[1])
        return model(x[0], F.one_hot(labels[0], 8).double())

    expected = run()
    for name in ("FEWEST_FOR_SLICES", "FEWEST_FOR_LOOP"):
        monkeypatch.setattr(cross_entropy_file, name, (1, 1))
    torch.testing.assert_close(run(), expected)


@outside
def test_images_and_few_classes_take_torchs_loss():
    """There the passes over memory do not weigh more: slices took 1.7 to 9 times as long."""
    for shape, classes in (((2, 600, 32, 32), 600), ((1 << 16, 32), 32)):
        x, labels = torch.randn(shape).bfloat16().requires_grad_(), torch.randint(classes, (shape[0], *shape[2:]))
        ours, torchs = cross_entropy(x, labels), F.cross_entropy(x.float(), labels)
        assert ours.grad_fn.name() == torchs.grad_fn.name() and torch.equal(ours, torchs)
    many, labels = torch.randn(2048, 512).bfloat16().requires_grad_(), torch.zeros(2048, dtype=torch.long)
    assert cross_entropy(many, labels).grad_fn.name() == "cross_entropyBackward"


@outside
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_compiled_loop_takes_labels_in_long_rows_and_torch_the_rest(monkeypatch):
    taken: list[bool] = []
    module = types.SimpleNamespace(cross_entropy=lambda *args, compiled, **options: taken.append(compiled))
    monkeypatch.setitem(sys.modules, "fxprec.kernels.nn.cross_entropy", module)

    def call(x: torch.Tensor, target: torch.Tensor, **options: Any) -> None:
        cross_entropy(x, target, compiled=True, **options)

    x, labels = torch.randn(1 << 10, 256).bfloat16(), torch.zeros(1 << 10, dtype=torch.long)
    call(x, labels)
    call(x, labels, label_smoothing=0.1)
    call(x.float(), labels)
    assert taken == [True, True, True]
    call(x[1:], labels[1:])  # fewer
    call(x.view(1 << 13, 32), torch.zeros(1 << 13, dtype=torch.long))  # shorter
    call(x.half(), labels)
    call(x.double(), labels)
    call(x, labels, weight=torch.ones(256))
    call(x, x.float().softmax(1))
    assert taken == [True, True, True]


class LanguageModel(nn.Module):
    """Widens its logits, shifts them for the loss, and returns both, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 2100)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(x).float()
        rows = logits[:, :-1, :].contiguous()
        return F.cross_entropy(rows.view(-1, rows.size(-1)), labels[:, 1:].reshape(-1)), logits


@outside
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_compiled_loop_takes_logits_that_a_model_widens_whose_gradient_stays():
    torch.manual_seed(0)
    own = LanguageModel()
    model = fxprec.convert(copy.deepcopy(own), fuse=True).module
    x, labels = torch.randn(3, 70, 16), torch.randint(2100, (3, 70))
    labels[:, ::4] = -100

    def run(model: Any) -> tuple[torch.Tensor, ...]:
        loss, logits = model(x, labels)
        logits.retain_grad()
        loss.backward()
        return loss, logits, logits.grad, model.head.weight.grad

    ours = run(model)
    with torch.autocast("cpu", torch.bfloat16):
        eager = run(own)
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert calls(fxprec.graph_module(model), cross_entropy)
    assert "cross_entropyBackward" in kernel_tools.backwards_of(ours[0])


@outside
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_logits_in_negated_memory_are_torchs():
    logits, labels = torch.randn(1 << 10, 256), torch.zeros(1 << 10, dtype=torch.long)
    negated = torch._neg_view(-logits)
    assert negated.is_neg()
    torch.testing.assert_close(cross_entropy(negated, labels, compiled=True), F.cross_entropy(logits, labels))


@outside
def test_nothing_is_joined_where_every_node_stays_visible_or_nothing_was_cast():
    for options in ({"fuse": False}, {"level": "O0"}):
        model = fxprec.convert(nn.Linear(16, 8), loss=F.cross_entropy, **options).module
        model(torch.randn(5, 16), torch.randint(8, (5,)))
        assert F.cross_entropy in {node.target for node in fxprec.graph_module(model).graph.nodes}


POOLS: dict[str, tuple[Callable[..., Any], bool]] = {
    "F.max_pool2d": (lambda x: F.max_pool2d(x, 2), True),
    "torch.max_pool2d": (lambda x: torch.max_pool2d(x, (3, 3), stride=2, padding=[1, 1]), True),
    "keywords": (lambda x: F.max_pool2d(input=x, kernel_size=2, stride=[2], dilation=1), True),
    "module": (lambda x: nn.MaxPool2d(3, 2, 1).forward(x), True),
    "indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], False),
    "dilation": (lambda x: F.max_pool2d(x, 2, dilation=2), False),
    "ceil": (lambda x: F.max_pool2d(x, 2, ceil_mode=True), False),
}


@outside
@pytest.mark.parametrize(("pool", "called"), POOLS.values(), ids=POOLS)
def test_max_poolings_of_whole_windows_are_called(tools, pool, called: bool, monkeypatch) -> None:
    gm = rewritten(tools, lambda x, w: pool(F.conv2d(x, w)), X, WEIGHT)
    assert len(calls(gm, max_pool2d)) == called
    low = F.conv2d(X.bfloat16(), WEIGHT.bfloat16())
    assert torch.equal(gm(X, WEIGHT), pool(low).float())
    if called:  # as on a GPU
        taken: list[Any] = []
        monkeypatch.setattr(triton_support, "can_launch", lambda device: True)
        module = types.SimpleNamespace(
            max_pool2d=lambda *args, compiled: taken.append(args) or F.max_pool2d(*args), why_not=lambda *_: ""
        )
        monkeypatch.setitem(sys.modules, "fxprec.kernels.nn.max_pool", module)
        assert torch.equal(gm(X, WEIGHT), pool(low).float()) and not taken
        last = X.contiguous(memory_format=torch.channels_last)
        assert torch.equal(gm(last, WEIGHT), pool(F.conv2d(last.bfloat16(), WEIGHT.bfloat16())).float())
        assert [len(each) for each in taken[0][1:]] == [2, 2, 2]


@outside
def test_large_windows_are_torchs(monkeypatch) -> None:
    monkeypatch.setattr(triton_support, "can_launch", lambda device: True)
    x = torch.randn(1, 3, 12, 12).contiguous(memory_format=torch.channels_last)
    assert torch.equal(max_pool2d(x, 12), F.max_pool2d(x, 12))


class Pooled(nn.Module):
    """Two convolutions with a pooling between them, of images that are many pixels, or few."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.max_pool2d(F.relu(self.first(x)), 3, 2, 1)).mean((2, 3))


@outside
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_pooling_on_a_cpu_is_a_loop_whose_gradients_are_as_near_to_float64_as_autocasts():
    torch.manual_seed(0)
    own, x = Pooled(), torch.randn(8, 3, 36, 36)
    exact, model = copy.deepcopy(own).double(), copy.deepcopy(own)
    fxprec.convert(model, fuse=True, example_inputs=(x,))
    (node,) = calls(fxprec.graph_module(model), max_pool2d)
    assert node.meta["fused"] == "max_pool2d by a compiled loop from 131,072 elements on, channels last"
    names: set[str] = set()

    def run(of: nn.Module, x: torch.Tensor) -> list[Any]:
        y = of(x)
        names.update(kernel_tools.backwards_of(y))
        y.square().sum().backward()
        return [y.detach(), *(each.grad for each in of.parameters())]

    with torch.autocast("cpu", torch.bfloat16):
        eager = run(own, x)
    names.clear()
    for ours, theirs, right in zip(run(model, x), eager, run(exact, x.double()), strict=True):
        assert (ours.double() - right).norm() <= 2 * (theirs.double() - right).norm()
    assert "max_pool2dBackward" in names and "MaxPool2DWithIndicesBackward0" in names  # the exact one's
    names.clear()
    run(model, x[:1])  # few pixels
    assert "max_pool2dBackward" not in names


@outside
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_what_the_loop_of_a_pooling_does_not_take_is_torchs(monkeypatch):
    taken: list[bool] = []

    def kernel(x, *window, compiled: bool):
        taken.append(compiled)
        return F.max_pool2d(x, *window)

    module = types.SimpleNamespace(max_pool2d=kernel, why_not=lambda *_: "")
    monkeypatch.setitem(sys.modules, "fxprec.kernels.nn.max_pool", module)
    x = torch.randn(4, 32, 32, 32).contiguous(memory_format=torch.channels_last)
    for given in (x, x.bfloat16()):
        assert torch.equal(max_pool2d(given, 2, compiled=True), F.max_pool2d(given, 2))
    assert taken == [True, True]
    for given in (x[1:], x.contiguous(), x.double(), x.half()):  # fewer, rows of pixels, other dtypes
        assert torch.equal(max_pool2d(given, 2, compiled=True), F.max_pool2d(given, 2))
    torch.func.vmap(lambda each: max_pool2d(each, 2, compiled=True))(x[None])
    max_pool2d(x, 2)
    assert taken == [True, True]


@outside
def test_sizes_that_torch_refuses_are_refused_and_large_windows_are_no_calls(tools):
    x = torch.randn(4, 32, 40, 40).contiguous(memory_format=torch.channels_last)
    for arguments in ((2, 0), ((2, 2, 2),), (2, 2, 2), (50,)):
        with pytest.raises(RuntimeError) as right:
            F.max_pool2d(x, *arguments)
        with pytest.raises(RuntimeError) as found:
            max_pool2d(x, *arguments, compiled=True)
        assert str(found.value) == str(right.value)
    gm = rewritten(tools, lambda x, w: F.max_pool2d(F.conv2d(x, w, padding=9), 12), X, WEIGHT)
    assert not calls(gm, max_pool2d)


@outside
def test_a_trace_of_a_pooling_warns_of_nothing():
    pool = fxprec.convert(Pooled(), fuse="auto" if why_not() else True).module
    x = torch.randn(8, 3, 36, 36)
    pool(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        torch.jit.trace(lambda x: max_pool2d(x, 2, compiled=True), (x,))
