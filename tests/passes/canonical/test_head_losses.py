"""head_losses: linear_cross_entropy has its product low and its loss FP32, in torch's spelling and in ours."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec import kernels

BF16 = torch.bfloat16

torchs = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 and later have it")


class Model(nn.Module):
    """A layer, and the loss of a head on it."""

    def __init__(self, loss, classes=(16,)):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Parameter(torch.randn(*classes, 8))
        self.bias = nn.Parameter(torch.randn(*classes))
        self.loss = loss

    def forward(self, x, target):
        return self.loss(torch.tanh(self.body(x)), self.head, target, self.bias)


def of_torch(**settings):
    return lambda x, w, target, b: F.linear_cross_entropy(x, w, target, linear_bias=b, **settings)


def labels(*shape):
    return torch.randint(0, 16, (32, *shape))


def errors(run, exact):
    return [(a.double() - b).abs().max().item() for a, b in zip(run, exact, strict=True)]


def gradients(model, x, target):
    model.zero_grad()
    output = model(x, target)
    output.sum().backward()
    return [output.detach(), *(parameter.grad for parameter in model.parameters())]


@torchs
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"ignore_index": 3},
        {"ignore_index": None, "label_smoothing": 0.1},
    ],
    ids=str,
)
def test_the_error_is_at_most_twice_that_of_autocast(settings, capture) -> None:
    model, x, target = Model(of_torch(**settings)), torch.randn(32, 8), labels()
    exact = gradients(copy.deepcopy(model).double(), x.double(), target)
    with torch.autocast("cpu", BF16):
        theirs = errors(gradients(model, x, target), exact)
    converted, _ = fxprec.convert(model, capture=capture)
    for ours, allowed in zip(errors(gradients(converted, x, target), exact), theirs, strict=True):
        assert ours <= 2 * allowed + 1e-6


@torchs
def test_the_product_runs_low_and_reads_a_shadow(tools) -> None:
    model, x, target = Model(of_torch()), torch.randn(32, 8), labels()
    with torch.autocast("cpu", BF16):
        theirs = tools.matmul_dtypes(model, x, target)
    converted, _ = fxprec.convert(model, capture="symbolic")
    assert tools.matmul_dtypes(converted, x, target) == theirs == {BF16: 2}
    text = fxprec.explain(converted, "op:linear")
    assert "head as its bfloat16 shadow" in text
    assert "bias as its bfloat16 shadow" in text


@torchs
@pytest.mark.parametrize("given", ["with inputs", "without"])
def test_heads_of_several_dimensions_and_probabilities(given) -> None:
    x = torch.randn(32, 8)
    for classes, target in (((16, 3), labels(3)), ((16,), torch.rand(32, 16)), ((16, 2, 3), labels(2, 3))):
        model = Model(of_torch(), classes)
        wanted = model(x, target)
        converted, _ = fxprec.convert(model, (x, target) if given == "with inputs" else None, capture="symbolic")
        torch.testing.assert_close(converted(x, target), wanted, rtol=2e-2, atol=2e-2)


@torchs
def test_a_head_that_is_an_input_and_a_single_sample() -> None:
    converted, _ = fxprec.convert(lambda x, w, target: F.linear_cross_entropy(x, w, target), capture="symbolic")
    x, w = torch.randn(8), torch.randn(16, 8)
    torch.testing.assert_close(
        converted(x, w, torch.tensor(3)), of_torch()(x, w, torch.tensor(3), None), rtol=2e-2, atol=0
    )


@torchs
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_the_layer(capture) -> None:
    class Layered(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.LinearCrossEntropyLoss(8, 16)

        def forward(self, x, target):
            return self.head(self.body(x), target)

    model, x, target = Layered(), torch.randn(32, 8), labels()
    wanted = model(x, target)
    converted, _ = fxprec.convert(model, (x, target), capture=capture)
    torch.testing.assert_close(converted(x, target), wanted, rtol=1e-2, atol=0)
    fxprec.testing.assert_precision(converted, "op:linear", BF16)
    fxprec.testing.assert_precision(converted, "op:cross_entropy", torch.float32)


@torchs
def test_chunks_take_hidden_states_as_they_arrive() -> None:
    """As under autocast: low ones low, FP32 ones in FP32."""
    options = nn.LinearCrossEntropyOptions()

    def chunked(x, w, target, b):
        return F.linear_cross_entropy(x, w, target, linear_bias=b, options=options)

    for loss, dtype in ((chunked, BF16), (lambda x, *rest: chunked(x.exp(), *rest), torch.float32)):
        model, x, target = Model(loss), torch.randn(32, 8), labels()
        with torch.autocast("cpu", BF16):
            theirs = model(x, target)
        converted, _ = fxprec.convert(model, (x, target), capture="symbolic")
        fxprec.testing.assert_precision(converted, "op:linear_cross_entropy", dtype)
        torch.testing.assert_close(converted(x, target), theirs.float(), rtol=1e-2, atol=0)


def test_our_kernel_takes_low_hidden_states_and_gives_an_fp32_loss() -> None:
    def loss(x, w, target, b):
        return kernels.linear_cross_entropy(x.exp(), w, target, b)

    model, x, target = Model(loss), torch.randn(32, 8), labels()
    wanted = model(x, target)
    converted, _ = fxprec.convert(model)
    torch.testing.assert_close(converted(x, target), wanted, rtol=1e-2, atol=0)
    text = fxprec.explain(converted, "op:fxprec::linear_cross_entropy")
    assert ": bfloat16, head: float32" in text
    assert "computes  bfloat16" in text
    assert "puts out  float32" in text


@torchs
def test_an_integer_target_is_not_said_to_be_cast() -> None:
    converted, _ = fxprec.convert(Model(of_torch()), capture="symbolic")
    text = fxprec.explain(converted, "*")
    assert "from float32 to float32" not in text
    assert "%target as it comes, float32 if it is a float" in text
    converted, _ = fxprec.convert(Model(of_torch()), (torch.randn(32, 8), labels()), capture="symbolic")
    assert "%target: int64" in fxprec.explain(converted, "op:cross_entropy")
