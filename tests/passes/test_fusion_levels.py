"""What the levels mean where kernels cast for nothing: the residual stream is FP32 at O1 and low at O2."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.passes.graph.subgraphs import every_graph
from fxprec.settings import Settings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(10, 16), nn.Sequential(*[Block() for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embedding(ids))))


@pytest.mark.parametrize(("level", "stream"), [("O1", torch.float32), ("O2", torch.bfloat16), ("O3", torch.bfloat16)])
def test_the_residual_stream(monkeypatch: pytest.MonkeyPatch, level: str, stream: torch.dtype) -> None:
    plain = Settings.context
    monkeypatch.setattr(
        Settings, "context", lambda self, **given: replace(plain(self, **given), regions="triton", device="cuda")
    )
    model, _ = fxprec.convert(Net(), (torch.zeros(2, 3, dtype=torch.long),), level=level)
    gm = fxprec.graph_module(model)
    nodes = [node for graph in every_graph(gm) for node in graph.graph.nodes if "op" in node.meta]
    added = [node for node in nodes if node.meta["op"].name == "add" and "bias_of" not in node.meta]
    assert [node.meta["precision"].output for node in added] == [stream] * 3
    norms = [node.meta["precision"].compute for node in nodes if node.meta["op"].name == "layer_norm"]
    assert norms == [torch.bfloat16 if level == "O3" else torch.float32] * 4
    casts = [node for node in gm.graph.nodes if node.meta.get("inserted") and node.args[0].op != "get_attr"]
    assert len(casts) == (level != "O3")  # of the logits: all others are within regions
