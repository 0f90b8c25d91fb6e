"""low_reads: a loss that a user computes of widened logits, through views, reads the low ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.passes.fusion import kernel_calls
from fxprec.passes.graph.annotations import notes

CLASSES = 2100


class Model(nn.Module):
    """A head and a loss as language models have them."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(16, CLASSES), loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.head(x), labels)


def shifted(logits: Tensor, labels: Tensor) -> Any:
    wide = logits.float()
    rows = wide[..., :-1, :].contiguous().view(-1, CLASSES)
    return F.cross_entropy(rows, labels[..., 1:].contiguous().view(-1)), wide


def padded(logits: Tensor, labels: Tensor) -> Any:
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return F.cross_entropy(logits.to(torch.float32).view(-1, CLASSES), labels, ignore_index=-100)


def transposed(logits: Tensor, labels: Tensor) -> Any:
    return F.cross_entropy(logits.float().transpose(1, 2), labels)


def chunked(logits: Tensor, labels: Tensor) -> Any:
    first, second = logits.float().chunk(2, 1)
    rows, wanted = second.flatten(0, 1), labels.chunk(2, 1)[1].flatten()
    return F.cross_entropy(rows, wanted), first.sum()


def losses(model: nn.Module) -> list[Any]:
    return fxprec.graph_module(model).graph.find_nodes(op="call_function", target=kernel_calls.cross_entropy)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 270, 16), torch.randint(CLASSES, (3, 270))


@pytest.mark.parametrize("spelled", [shifted, padded, transposed, chunked])
def test_the_loss_reads_low_logits_and_gives_the_same(spelled: Callable[..., Any]) -> None:
    own = Model(spelled)
    exact = copy.deepcopy(own).double()
    exact.loss = lambda logits, labels: spelled(_Wide(logits), labels)
    model = fxprec.convert(copy.deepcopy(own)).module
    x, labels = batch()

    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        found = model(x, labels)
        outputs = found if isinstance(found, tuple) else (found,)
        (gradient, *_) = torch.autograd.grad(outputs[0], [x, *model.parameters()])
        return [*(each.detach() for each in outputs), gradient]

    ours, right = run(model, x), run(exact, x.double())
    with torch.autocast("cpu", torch.bfloat16):
        eager = run(own, x)
    (loss,) = losses(model)
    assert loss.args[0].meta["precision"].output is torch.bfloat16
    assert "reads torch.bfloat16" in loss.meta["precision"].why
    for mine, theirs, truth in zip(ours, eager, right, strict=True):
        assert mine.dtype is torch.float32 is theirs.dtype
        assert (mine - truth).norm() <= 2 * (theirs - truth).norm() + 1e-6


class _Wide:
    """Float64 logits that stay so when a loss widens them to FP32."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def float(self) -> Tensor:
        return self.logits

    def to(self, _: torch.dtype) -> Tensor:
        return self.logits


def test_the_wide_logits_stay_for_who_else_reads_them_and_go_else() -> None:
    for spelled, wide in ((shifted, 1), (padded, 0)):
        model = fxprec.convert(Model(spelled)).module
        model(*batch())
        nodes = fxprec.graph_module(model).graph.nodes
        casts = [node for node in nodes if notes(node).op.name == "to" and not notes(node).inserted]
        assert len(casts) == wide
    assert model(*batch()).dtype is torch.float32


def test_what_is_written_to_stays_wide() -> None:
    def scaled(logits: Tensor, labels: Tensor) -> Tensor:
        wide = logits.float()
        rows = wide.view(-1, CLASSES)
        wide.mul_(2.0)
        return F.cross_entropy(rows, labels.view(-1))

    model = fxprec.convert(copy.deepcopy(own := Model(scaled))).module
    x, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = own(x, labels)
    torch.testing.assert_close(model(x, labels), expected)
    assert not losses(model)


def test_a_cast_that_ends_a_gradient_stays() -> None:
    """Of logits that are low in the program itself: of others ``.float()`` gives the very tensor, gradient and all."""

    def cut(logits: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            wide = logits.float()
        return F.cross_entropy(wide.view(-1, CLASSES), labels.view(-1)) + logits.float().mean()

    x, labels = batch()
    for dtype in (torch.float32, torch.bfloat16):
        own = Model(cut)
        own.head.to(dtype)
        own.norm = nn.LayerNorm(16)  # a model is not all low
        model = fxprec.convert(copy.deepcopy(own)).module
        gradients = [torch.autograd.grad(each(x.to(dtype), labels), each.head.parameters()) for each in (own, model)]
        for theirs, ours in zip(*gradients, strict=True):
            assert (ours - theirs).norm() <= 0.02 * theirs.norm()


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "division": lambda wide: wide / 3.0,
    "activation": lambda wide: F.leaky_relu(wide, 0.1),
    "dropout": lambda wide: F.dropout(wide, 0.0),
    "bits as integers": lambda wide: wide.view(torch.int32).view(torch.float32),
    "bits as they are": lambda wide: wide.view(torch.float32),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_is_no_view_between_the_cast_and_the_loss_stays_wide(between: Callable[[Tensor], Tensor]) -> None:
    def computed(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(between(logits.float()).view(-1, CLASSES), labels.view(-1))

    model = fxprec.convert(Model(computed)).module
    assert model(*batch()).isfinite()
    assert not losses(model)
