"""Lookups on a CPU read FP32 weights: torch adds the gradient of a row up in the dtype of the weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec

FP32, BF16 = torch.float32, torch.bfloat16
LOOKUPS = {
    "embedding": lambda w, ids: F.embedding(ids, w),
    "embedding of a product": lambda w, ids: F.embedding(ids, w * 2.0),
    "embedding, written": lambda w, ids: F.embedding(ids, w).mul_(2.0),
    "embedding_bag": lambda w, ids: F.embedding_bag(ids, w, mode="sum").expand(2, -1, -1),
    "take": lambda w, ids: torch.take(w, ids[..., None] * 16 + torch.arange(16)),
}


class Lookup(nn.Module):
    def __init__(self, lookup):
        super().__init__()
        torch.manual_seed(0)
        self.lookup, self.weight, self.head = lookup, nn.Parameter(torch.randn(8, 16)), nn.Linear(16, 8)

    def forward(self, ids):
        return self.head(self.lookup(self.weight, ids))


@pytest.mark.parametrize(
    ("spelling", "settings"),
    [
        *((each, {"level": "O2"}) for each in LOOKUPS),
        ("take", {"level": "O1"}),
        ("embedding", {"level": "O2", "capture": "dynamo"}),
        ("embedding", {"level": "O2", "placement": "autocast"}),
        ("embedding", {"level": "O3"}),
    ],
    ids=str,
)
def test_the_gradient_of_a_frequent_row_does_not_stall(spelling, settings):
    ids = torch.arange(4096).view(8, 512) % 20 % 8
    model = Lookup(LOOKUPS[spelling])
    model(ids).square().sum().backward()
    converted = fxprec.convert(Lookup(LOOKUPS[spelling]), dtype=BF16, **settings).module
    converted(ids).square().sum().backward()
    assert (converted.weight.grad - model.weight.grad).norm() <= 0.02 * model.weight.grad.norm()


def test_a_lookup_costs_one_cast_and_widens_nobody():
    model = fxprec.convert(Lookup(LOOKUPS["embedding"]), dtype=BF16, level="O2").module
    nodes = {node.name: node for node in fxprec.graph_module(model).graph.nodes}
    (cast,) = nodes["embedding"].users
    assert nodes["embedding"].meta["precision"].reads is FP32
    assert cast.meta["precision"].output is BF16 and [*cast.users] == [nodes["linear"]]


def test_a_gpu_adds_up_in_fp32_itself(tools):
    gm = tools.traced(
        lambda ids, w: F.linear(F.embedding(ids, w), w), torch.zeros(4, dtype=torch.long), torch.randn(4, 4)
    )
    tools.rewritten(gm, tools.context("O2", device="cuda"), until="decide")
    assert {node.name: node.meta["precision"].reads for node in gm.graph.nodes}["embedding"] is BF16
