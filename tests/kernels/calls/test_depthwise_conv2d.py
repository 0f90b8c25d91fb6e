"""Depthwise convolutions whose backward runs in FP32: exact, of torch's layouts, taken where they pay and unseen."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fxprec
from fxprec.kernels.calls import depthwise_conv2d as depthwise
from fxprec.kernels.calls.depthwise_conv2d import DEPTHWISE, pays

LOW = torch.bfloat16
#: Channels, image, filter, stride, padding, dilation.
SHAPES = [
    (5, (9, 7), (7, 7), (1, 1), (3, 3), (1, 1)),
    (4, (10, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    (3, (8, 11), (5, 4), (2, 1), (0, 2), (1, 1)),
    (6, (9, 9), (3, 2), (1, 1), (2, 1), (2, 3)),
    (1, (6, 6), (5, 5), (1, 1), (2, 2), (1, 1)),
]
shapes = pytest.mark.parametrize(("channels", "image", "filters", "stride", "padding", "dilation"), SHAPES)


def tensors(channels: int, image: tuple[int, ...], filters: tuple[int, ...], last: bool, bias: bool) -> list[Any]:
    x = torch.randn(3, channels, *image)
    x = x.to(LOW, memory_format=torch.channels_last if last else torch.contiguous_format)
    found: list[Any] = [x, torch.randn(channels, 1, *filters).to(LOW), torch.randn(channels).to(LOW) if bias else None]
    return [None if each is None else each.requires_grad_() for each in found]


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def lies(x: Tensor) -> list[int]:
    """Strides, but of dimensions of one element, which have none that matters."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


@shapes
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_forward_to_the_bit_and_gradients_more_exact_than_torchs(
    channels: int, image: Any, filters: Any, stride: Any, padding: Any, dilation: Any, last: bool, bias: bool
) -> None:
    given = tensors(channels, image, filters, last, bias)
    leaves = [each for each in given if each is not None]
    settings = stride, padding, dilation
    y, theirs = DEPTHWISE(*given, *settings), F.conv2d(*given, *settings, channels)
    assert torch.equal(y, theirs) and y.stride() == theirs.stride() and y.dtype is LOW
    dy = torch.randn(y.shape).to(LOW)
    found, eager = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(theirs, leaves, dy)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    exact = torch.autograd.grad(F.conv2d(*wide, *[None] * (not bias), *settings, channels), wide, dy.double())
    for own, other, right, leaf in zip(found, eager, exact, leaves, strict=True):
        assert own.dtype is LOW and own.shape == leaf.shape
        assert lies(own) == lies(other)
        assert off(own, right) <= max(1.05 * off(other, right), 2.0**-9)
        assert torch.equal(own, right.to(LOW)) or off(own, right) < 2.0**-8


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_no_other_gradient_is_made(wanted: tuple[int, ...]) -> None:
    given = tensors(4, (9, 9), (5, 5), False, True)
    whole = torch.autograd.grad(DEPTHWISE(*given, (1, 1), (2, 2), (1, 1)).sum(), given)
    for place, each in enumerate(given):
        each.requires_grad_(place in wanted)
    leaves = [given[place] for place in wanted]
    found = torch.autograd.grad(DEPTHWISE(*given, (1, 1), (2, 2), (1, 1)).sum(), leaves)
    assert all(torch.equal(own, whole[place]) for own, place in zip(found, wanted, strict=True))


def test_second_derivatives() -> None:
    given = tensors(4, (8, 8), (5, 5), False, True)
    leaves = [each.detach().double().requires_grad_() for each in given]

    def penalty(x: Tensor, w: Tensor, b: Tensor, run: Any) -> tuple[Tensor, ...]:
        y = run(x, w, b, (2, 2), (2, 2), (1, 1))
        first = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum(each.double().square().sum() for each in first), (x, w, b))

    own = penalty(*given, DEPTHWISE)
    exact = penalty(*leaves, lambda *all: F.conv2d(*all, 4))
    assert all(off(each, right) < 2.0**-6 for each, right in zip(own, exact, strict=True))


@pytest.mark.slow
def test_the_ops_are_torchs_to_every_tracer() -> None:
    given = tensors(4, (9, 9), (5, 5), False, True)
    torch.library.opcheck(DEPTHWISE.op, (*given, [1, 1], [2, 2], [1, 1]))
    x, w, _ = (each.detach() for each in given)
    backward = torch.randn(3, 4, 9, 9).to(LOW), x, w, True, [1, 1], [2, 2], [1, 1]
    for wanted in ([True, True, True], [False, True, False]):
        torch.library.opcheck(depthwise._backward_op.op, (*backward, wanted))


#: What is changed of a case that pays -> whether it still does.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, True),
    "three by three": ({"filters": (3, 3)}, False),
    "with steps": ({"filters": (3, 3), "stride": (2, 2)}, True),
    "apart": ({"filters": (3, 3), "dilation": (1, 2)}, True),
    "a row": ({"filters": (1, 7)}, False),
    "tiny": ({"image": (5, 5)}, False),
    "no gradient": ({"wants": False}, False),
    "two filters a channel": ({"out": 32}, False),
    "groups of two": ({"width": 2, "groups": 8}, False),
    "FP32": ({"dtype": torch.float32}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_where_it_pays(name: str) -> None:
    changed, right = CASES[name]
    case = {
        "filters": (5, 5), "stride": (1, 1), "dilation": (1, 1), "image": (20, 20), "wants": True, "out": 16,
        "width": 1, "groups": 16, "dtype": LOW,
    } | changed  # fmt: skip
    x = torch.randn(4, 16, *case["image"], dtype=case["dtype"], requires_grad=case["wants"])
    w = torch.randn(case["out"], case["width"], *case["filters"], dtype=case["dtype"])
    assert pays(x, w, None, case["stride"], case["dilation"], case["groups"]) is right
    with torch.no_grad():
        assert not pays(x, w, None, case["stride"], case["dilation"], case["groups"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 1)
        self.deep = nn.Conv2d(24, 24, 7, padding=3, groups=24)
        self.steps = nn.Conv2d(24, 24, 3, 2, 1, groups=24, bias=False)
        self.small = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.mixed = nn.Conv2d(24, 8, 5, padding=2, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.small(F.gelu(self.steps(self.deep(self.first(x))))))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the filters that ran so."""
    found: list[tuple[int, ...]] = []
    whole = DEPTHWISE

    def run(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        found.append(tuple(weight.shape))
        return whole(x, weight, *rest)

    monkeypatch.setattr(depthwise, "DEPTHWISE", run)
    return found


def converted(**options: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3, 32, 32)
    exact = copy.deepcopy(model).double()
    return fxprec.convert(model, dtype=LOW, **options)[0], exact, x


@pytest.mark.parametrize("options", [{}, {"fuse": True}, {"capture": "dynamo"}, {"level": "O2"}])
def test_a_model_takes_them_and_trains(options: dict[str, Any], taken: list[Any]) -> None:
    model, exact, x = converted(**options)
    eager = copy.deepcopy(exact).float()
    model(x).square().mean().backward()
    assert taken == [(24, 1, 7, 7), (24, 1, 3, 3)]
    exact(x.double()).square().mean().backward()
    with torch.autocast("cpu", LOW):
        eager(x).float().square().mean().backward()
    for (name, own), other, right in zip(model.named_parameters(), eager.parameters(), exact.parameters(), strict=True):
        assert off(own.grad, right.grad) <= 2 * off(other.grad, right.grad) + 2.0**-7, name


def test_the_graph_says_so_and_runs_torchs_where_no_gradient_is_wanted(taken: list[Any]) -> None:
    model, _, x = converted()
    with torch.no_grad():
        y = model(x)
    assert not taken and y.shape == (4, 8, 16, 16)
    nodes = [node for node in fxprec.graph_module(model).graph.nodes if node.target is depthwise.depthwise_conv2d]
    assert [node.name for node in nodes] == ["conv2d_1", "conv2d_2"], "of the others the filters say no"
    assert all("its backward runs in FP32" in node.meta["precision"].why for node in nodes)
    model.eval()
    frozen = fxprec.freeze(model)
    with torch.no_grad():
        assert off(frozen(x), y.double()) < 2.0**-6


def test_words_for_padding_stay_torchs() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 5, padding="same", groups=8))
    model, _ = fxprec.convert(model, dtype=LOW)
    y = model(torch.randn(2, 8, 9, 9))
    assert y.shape == (2, 8, 9, 9)
    targets = [node.target for node in fxprec.graph_module(model).graph.nodes]
    assert depthwise.depthwise_conv2d not in targets


def test_who_looks_into_the_ops_gets_torchs(taken: list[Any]) -> None:
    x, w, b = (each.detach() for each in tensors(4, (50, 50), (5, 5), False, True))
    w.requires_grad_()

    def f(x: Tensor) -> Tensor:
        return depthwise.depthwise_conv2d(x, w, b, 1, 2, 1, 4)

    right = f(x)
    assert len(taken) == 1
    assert torch.equal(torch.vmap(f)(x[:, None])[:, 0], right)
    primal = torch.func.jvp(f, (x,), (torch.ones_like(x),))[0]
    assert torch.equal(primal, right) and len(taken) == 1
    y = checkpoint(f, x, use_reentrant=False)
    assert torch.equal(y, right) and len(taken) == 2
    y.sum().backward()
    assert len(taken) == 3 and w.grad is not None


def test_what_is_multiplied_is_fp32_with_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.dtype, bool]] = []
    whole = depthwise.backward_reference

    def run(*given: Any) -> list[Tensor]:
        seen.extend((each.dtype, each.is_contiguous(memory_format=torch.channels_last)) for each in given[:2])
        return whole(*given)

    monkeypatch.setattr(depthwise, "backward_reference", run)
    given = tensors(4, (9, 8), (5, 5), False, True)
    DEPTHWISE(*given, (1, 1), (2, 2), (1, 1)).sum().backward()
    assert seen == [(torch.float32, True)] * 2


def test_gradients_in_a_batch() -> None:
    x, w, b = tensors(4, (50, 50), (5, 5), False, True)
    y = DEPTHWISE(x, w, b, (1, 1), (2, 2), (1, 1))
    many = torch.randn(3, *y.shape).to(LOW)
    found = torch.autograd.grad(y, (x, w, b), many, is_grads_batched=True, retain_graph=True)
    for n, dy in enumerate(many):
        each = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
        assert all(off(own[n], right.double()) < 2.0**-7 for own, right in zip(found, each, strict=True))
    jacobian = torch.autograd.functional.jacobian
    runs = [
        lambda x: depthwise.depthwise_conv2d(x, w, b, 1, 2, 1, 4),
        lambda x: F.conv2d(x, w, b, 1, 2, 1, 4),
    ]
    own, theirs = (jacobian(lambda x, run=run: run(x)[0, 0, 0, :3], x, vectorize=True) for run in runs)
    assert off(own, theirs.double()) < 2.0**-7


def test_the_bias_may_change_and_nothing_else() -> None:
    """As with torch's: no gradient reads it."""
    x, w, b = tensors(4, (9, 9), (5, 5), False, True)
    y = DEPTHWISE(x, w, b, (1, 1), (2, 2), (1, 1)).sum()
    with torch.no_grad():
        b.add_(1)
    torch.autograd.grad(y, (x, w, b), retain_graph=True)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_gradients_lie_as_torchs_do() -> None:
    w = torch.randn(4, 1, 5, 5).to(LOW)
    turned, exchanged = torch.randn(3, 4, 8, 9).transpose(2, 3), torch.randn(4, 3, 8, 9).transpose(0, 1)
    for x in (turned, exchanged, torch.randn(3, 4, 1, 1)):
        image = x.to(LOW).requires_grad_()
        own = DEPTHWISE(image, w, None, (1, 1), (2, 2), (1, 1))
        theirs = F.conv2d(image, w, None, 1, 2, 1, 4)
        dy = torch.randn_like(theirs)
        (one,), (other,) = torch.autograd.grad(own, image, dy), torch.autograd.grad(theirs, image, dy)
        assert lies(one) == lies(other)


@pytest.mark.parametrize("how", ["compile", "strict", "batch", "rows", "jit", "count"])
def test_tracers_and_counters_see_torchs_convolution(how: str) -> None:
    """No guard on a size, no break, no warning, all FLOP."""
    model, _, x = converted()
    model(x)
    gm = fxprec.graph_module(model)
    if how == "compile":
        assert torch.compile(gm, backend="eager", fullgraph=True)(x).shape == (4, 8, 16, 16)
    elif how == "jit":
        with warnings.catch_warnings():
            warnings.simplefilter("error", torch.jit.TracerWarning)
            torch.jit.trace(model, (x,))
    elif how == "count":
        with FlopCounterMode(display=False) as counted:
            gm(x).sum().backward()
        with FlopCounterMode(display=False) as right:
            Net()(x).sum().backward()
        assert counted.get_total_flops() == right.get_total_flops()
    else:
        size = torch.export.Dim("size", min=2, max=64)
        shapes = {"batch": ({0: size},), "rows": ({2: 4 * size, 3: 4 * size},), "strict": None}[how]
        program = torch.export.export(gm, (x,), dynamic_shapes=shapes, strict=how == "strict")
        assert program.module()(x).shape == (4, 8, 16, 16)
