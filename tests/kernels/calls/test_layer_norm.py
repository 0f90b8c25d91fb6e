"""Layer norms of bfloat16 values on a CPU: the forward is torch's, gradients of weight and bias do not stall.

Those of few rows are torch's own as a whole.
"""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec
import fxprec.testing
from fxprec.kernels.calls import layer_norm as kernel

LOW, FP32 = torch.bfloat16, torch.float32
#: Sizes of x, and how many of its last dimensions are normalized.
SHAPES = [
    ((17000, 8), 1),
    ((3000, 8), 1),
    ((15, 7, 9), 1),
    ((70, 3, 5, 6), 2),
    ((5, 7, 9), 1),
    ((2, 5), 2),
    ((0, 4), 1),
]


def tensors(sizes: tuple[int, ...], last: int, dtype: torch.dtype, bias: bool, weight: bool = True) -> list[Any]:
    own = sizes[len(sizes) - last :]
    w, b = (torch.rand(own).to(dtype) if wanted else None for wanted in (weight, bias))
    return [None if each is None else each.requires_grad_() for each in (torch.randn(sizes).to(LOW), w, b)]


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


@pytest.mark.parametrize(("sizes", "last"), SHAPES)
@pytest.mark.parametrize(
    ("which", "dtype"),  # torch's kernel of low values takes no FP32 bias without a weight
    [("both", FP32), ("both", LOW), ("weight", FP32), ("weight", LOW), ("bias", LOW)],
)
def test_forward_to_the_bit_and_gradients_of_fp32(sizes: Any, last: int, which: str, dtype: torch.dtype) -> None:
    given = tensors(sizes, last, dtype, which != "weight", which != "bias")
    leaves, shape = [each for each in given if each is not None], sizes[len(sizes) - last :]
    y, theirs = kernel.layer_norm(given[0], shape, *given[1:], 1e-5), F.layer_norm(given[0], shape, *given[1:], 1e-5)
    many = given[0].numel() > 64 * prod(shape)
    assert torch.equal(y, theirs) and y.stride() == theirs.stride() and y.dtype is theirs.dtype
    dy = (torch.rand(y.shape) + 0.5).to(LOW)
    found, eager = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(theirs, leaves, dy)
    wide = [None if each is None else each.detach().double().requires_grad_() for each in given]
    exact = torch.autograd.grad(
        F.layer_norm(wide[0], shape, *wide[1:], 1e-5), [each for each in wide if each is not None], dy.double()
    )
    for own, other, right, leaf in zip(found, eager, exact, leaves, strict=True):
        assert own.dtype is leaf.dtype and own.shape == leaf.shape and own.stride() == other.stride()
        exactly = leaf.dtype is FP32 and dtype is FP32 and many
        assert off(own, right) <= (1e-5 if exactly else max(1.05 * off(other, right), 2.0**-8))


def test_torchs_own_stalls() -> None:
    """Where it no longer does, on all versions that are served, this kernel can go."""
    x, w, b = tensors((4096, 8), 1, FP32, True)
    dy = torch.ones_like(x)
    _, own = torch.autograd.grad(kernel.layer_norm(x, (8,), w, b, 1e-5), (w, b), dy)
    _, theirs = torch.autograd.grad(F.layer_norm(x, (8,), w, b, 1e-5), (w, b), dy)
    assert torch.equal(own, torch.full((8,), 4096.0)) and theirs.max() < 2048


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_no_other_gradient_is_made(wanted: tuple[int, ...]) -> None:
    given = tensors((5, 7, 9), 1, FP32, True)
    whole = torch.autograd.grad(kernel._op(*given, (9,), 1e-5).sum(), given)
    for place, each in enumerate(given):
        each.requires_grad_(place in wanted)
    found = torch.autograd.grad(kernel._op(*given, (9,), 1e-5).sum(), [given[place] for place in wanted])
    assert all(torch.equal(own, whole[place]) for own, place in zip(found, wanted, strict=True))


def test_rows_in_parts_and_in_one_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors((5, 7, 9), 1, FP32, True)
    dy = torch.randn(5, 7, 9).to(LOW).transpose(0, 1).contiguous().transpose(0, 1)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(kernel._op(*given, (9,), 1e-5), given, dy)

    whole = gradients()
    monkeypatch.setattr(kernel, "_ELEMENTS", 4 * 9)  # the last part has three rows
    assert torch.equal(gradients()[0], whole[0])
    assert all(torch.allclose(own, right, rtol=1e-5, atol=1e-5) for own, right in zip(gradients(), whole, strict=True))


def test_second_derivatives() -> None:
    given = tensors((6, 8), 1, FP32, True)
    leaves = [each.detach().double().requires_grad_() for each in given]

    def penalty(x: Tensor, w: Tensor, b: Tensor, run: Any) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(run(x, w, b, (8,), 1e-5).pow(3).sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum(each.double().square().sum() for each in first), (x, w, b))

    own, exact = (
        penalty(*given, kernel._op),
        penalty(*leaves, lambda x, w, b, *rest: F.layer_norm(x, rest[0], w, b, rest[1])),
    )
    assert all(off(each, right) < 2.0**-6 for each, right in zip(own, exact, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, LOW])
def test_the_ops_are_torchs_to_every_tracer(dtype: torch.dtype) -> None:
    x, w, b = tensors((5, 7, 9), 1, dtype, True)
    torch.library.opcheck(kernel._op.op, (x, w, b, [9], 1e-5))
    x, w, b = (each.detach() for each in (x, w, b))
    for wanted in ([True, True, True], [False, True, False]):
        torch.library.opcheck(kernel._backward_op.op, (torch.randn_like(x), x, w, b, [9], 1e-5, wanted))


def test_gradients_in_a_batch() -> None:
    x, w, b = tensors((6, 8), 1, FP32, True)
    y = kernel._op(x, w, b, (8,), 1e-5)
    many = torch.randn(3, *y.shape).to(LOW)
    found = torch.autograd.grad(y, (x, w, b), many, is_grads_batched=True, retain_graph=True)
    for n, dy in enumerate(many):
        each = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
        assert all(off(own[n], right.double()) < 2.0**-7 for own, right in zip(found, each, strict=True))


def test_who_looks_into_the_ops_gets_torchs() -> None:
    x, w, b = tensors((70, 8), 1, FP32, True)

    def f(x: Tensor) -> Tensor:
        return kernel.layer_norm(x, (8,), w, b, 1e-5)

    right = F.layer_norm(x, (8,), w, b, 1e-5)
    assert "NativeLayerNorm" not in type(f(x).grad_fn).__name__
    assert torch.equal(torch.vmap(f)(x), right)
    assert torch.equal(torch.func.jvp(f, (x.detach(),), (torch.ones_like(x),))[0], right)
    assert torch.equal(torch.compile(f, backend="eager", fullgraph=True)(x), right)
    assert torch.equal(checkpoint(f, x, use_reentrant=False), right)
    with torch.no_grad():
        assert torch.equal(f(x), right)


class Net(nn.Module):
    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8, elementwise_affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"level": "O2"}, {"level": "O3"}, {"capture": "dynamo"}, {"fuse": True}, {"fuse": False},
        {"placement": "autocast"},
    ],
    ids=str,
)  # fmt: skip
def test_a_model_s_layer_norm_learns(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    exact, x = Net().double(), torch.randn(17_000, 8)
    model = fxprec.convert(copy.deepcopy(exact).float(), dtype=LOW, **settings).module
    for net, given in ((model, x), (exact, x.double())):
        y = net(given)
        (y.square() + y).sum().backward()
    for name in ("weight", "bias"):
        found, right = getattr(model.norm, name).grad, getattr(exact.norm, name).grad
        assert off(found, right) < 2.0**-6, name


def test_the_graph_says_so() -> None:
    def norms(model: nn.Module) -> list[Any]:
        nodes = fxprec.graph_module(fxprec.convert(model, dtype=LOW).module).graph.nodes
        return [node for node in nodes if node.target is kernel.layer_norm]

    (node,) = norms(Net())
    assert node.meta["precision"].why.endswith("its backward adds up the gradients of weight and bias in FP32")
    assert not norms(Net(affine=False)) and not norms(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))


def test_a_checkpoint_may_run_under_a_mode_and_again_without() -> None:
    """Whoever looks on, the same tensors are saved: a checkpoint counts them."""
    x, w, b = tensors((70, 8), 1, FP32, True)
    with fxprec.testing.count_casts():
        y = checkpoint(lambda x: kernel.layer_norm(x, (8,), w, b, 1e-5), x, use_reentrant=False)
    found = torch.autograd.grad(y.sum(), (x, w, b))
    for own, right in zip(found, torch.autograd.grad(kernel._op(x, w, b, (8,), 1e-5).sum(), (x, w, b)), strict=True):
        assert torch.equal(own, right)
