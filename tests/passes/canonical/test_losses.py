"""losses: a binary cross entropy of a sigmoid becomes that of its logits; what only looks like one stays."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.passes.canonical.losses import INSTEAD
from fxprec.passes.graph.text import format_graph

X, T, W = torch.randn(3, 4), torch.rand(3, 4), torch.rand(3, 4)


def after(tools, f, *inputs, level="O1"):
    gm = tools.traced(f, *(inputs or (X, T, W)))
    tools.rewritten(gm, tools.context(level), until="propagate")
    return gm


def test_the_graph_after(tools):
    def f(x, t, w):
        return F.binary_cross_entropy(torch.sigmoid(x).view(-1), t.view(-1), w.view(-1), reduction="sum")

    expecttest.assert_expected_inline(
        format_graph(after(tools, f)),
        """\
%x: float32 = placeholder
%t: float32 = placeholder
%w: float32 = placeholder
%view_1: float32 = view(%t, -1)
%view_2: float32 = view(%w, -1)
%nan_to_num: float32 = nan_to_num(%x, nan, 100.0, -100.0)
%view_3: float32 = view(%nan_to_num, -1)
%binary_cross_entropy: float32 = binary_cross_entropy_with_logits(%view_3, %view_1, weight=%view_2, size_average=None, reduce=None, reduction='sum')
return %binary_cross_entropy""",  # noqa: E501
    )


@pytest.mark.parametrize(
    "f",
    [
        lambda x, t, w: F.binary_cross_entropy(torch.sigmoid(x), t),
        lambda x, t, w: F.binary_cross_entropy(input=x.sigmoid(), target=t, weight=w, reduction="none"),
        lambda x, t, w: F.binary_cross_entropy(torch.special.expit(x), t, w, reduction="sum"),
        lambda x, t, w: F.binary_cross_entropy(F.sigmoid(x).float(), t, reduction="none"),
        lambda x, t, w: F.binary_cross_entropy(F.sigmoid(x)[:, 0].unsqueeze(1).contiguous(), t[:, :1]),
        lambda x, t, w: F.binary_cross_entropy(p := x.sigmoid(), t) + p.mean(),
        lambda x, t, w: torch.ops.aten.binary_cross_entropy.default(x.sigmoid(), t, w, 2),
        lambda x, t, w: torch.ops.aten.binary_cross_entropy.default(x.sigmoid(), t, reduction=0),
        lambda x, t, w: torch.ops.aten.binary_cross_entropy.default(x.sigmoid(), t),
    ],
)
def test_the_loss_is_the_same(tools, f):
    gm = after(tools, f)
    assert any(node.meta.get("instead_of") == INSTEAD for node in gm.graph.nodes)
    x, y = (X.clone().requires_grad_() for _ in range(2))
    found, other = gm(x, T, W), f(y, T, W)
    torch.testing.assert_close(found, other)
    found.sum().backward()
    other.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def returned(x, t, w):
    p = x.sigmoid()
    return F.binary_cross_entropy(p, t), p


def returned_view(x, t, w):
    p = x.sigmoid()
    return F.binary_cross_entropy(p.view(-1), t.view(-1)), p


def written(x, t, w):
    p = x.sigmoid()
    p.mul_(0.5)
    return F.binary_cross_entropy(p, t)


def logits_written(x, t, w):
    h = x + 1
    p = h.sigmoid()
    h.mul_(0.5)
    return F.binary_cross_entropy(p, t)


@pytest.mark.parametrize(
    "f",
    [
        returned,
        returned_view,
        written,
        logits_written,
        lambda x, t, w: F.binary_cross_entropy((x + 1).sigmoid_(), t),
        lambda x, t, w: F.binary_cross_entropy(x.sigmoid().clamp(0.1, 0.9), t),
        lambda x, t, w: F.binary_cross_entropy(x.softmax(-1), t),
        lambda x, t, w: F.binary_cross_entropy(x.sigmoid().expand_as(w), t),
        lambda x, t, w: F.binary_cross_entropy(t, x.sigmoid()),
    ],
)
def test_what_stays(tools, f):
    gm = after(tools, f)
    assert "with_logits" not in format_graph(gm)
    for found, expected in zip(
        torch.utils._pytree.tree_leaves(gm(X, T, W)), torch.utils._pytree.tree_leaves(f(X, T, W)), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_o0_is_the_original(tools):
    assert "with_logits" not in format_graph(
        after(tools, lambda x, t, w: F.binary_cross_entropy(x.sigmoid(), t), level="O0")
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.layer.weight.data.fill_(1.0)

    def forward(self, x):
        return torch.sigmoid(self.layer(x)).squeeze(-1)


@pytest.mark.parametrize("logit", [7.0, 60.0])
def test_a_loss_in_the_graph_and_the_report(logit):
    """In FP32 a logit of 60 costs 100 and has no gradient."""
    x = torch.tensor([[logit]])
    converted = fxprec.convert(Net(), dtype=torch.bfloat16, loss=nn.BCELoss()).module
    loss = converted(x, torch.zeros(1))
    loss.backward()
    torch.testing.assert_close(loss, F.softplus(torch.tensor(logit)))
    (gradient,) = (p.grad for p in converted.parameters())
    torch.testing.assert_close(
        gradient, torch.tensor([[logit * torch.sigmoid(torch.tensor(logit))]]), rtol=0.01, atol=0
    )
    whys = {row.op: row.why for row in fxprec.report(converted).graphs[0].rows}
    assert whys["binary_cross_entropy_with_logits"].endswith(INSTEAD)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_logits_that_a_mask_made_infinite(capture):
    """Loss and gradients are those of FP32, also where the target contradicts the mask; NaN stays NaN."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, t, infinite):
            logits = self.fc(x) + infinite
            return F.binary_cross_entropy(logits.sigmoid(), t)

    torch.manual_seed(0)
    model, plain = Masked(), Masked()
    plain.load_state_dict(model.state_dict())
    lowered, _ = fxprec.convert(model, dtype=torch.bfloat16, capture=capture)
    infinite = torch.zeros(3, 4)
    infinite[0, :2], infinite[1, 3] = -torch.inf, torch.inf
    target = T.clone()
    target[0, 0] = 0.0
    loss, exact = lowered(X, target, infinite), plain(X, target, infinite)
    loss.backward()
    exact.backward()
    assert torch.isfinite(exact) and torch.allclose(loss, exact, rtol=2e-2)
    assert torch.allclose(model.fc.weight.grad, plain.fc.weight.grad, rtol=0.1, atol=5e-3)
    assert lowered(X, target, infinite * torch.nan).isnan()
