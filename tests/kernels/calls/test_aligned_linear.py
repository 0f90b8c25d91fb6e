"""Linears whose rows are no whole 16 bytes, on a pretended GPU: which are called, and what they run as."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxprec.kernels.calls import aligned_linear as aligned
from fxprec.passes.graph.annotations import notes


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd, self.bias = nn.Parameter(torch.randn(37, 16)), nn.Parameter(torch.randn(37))
        self.even, self.last = nn.Parameter(torch.randn(40, 16)), nn.Parameter(torch.randn(4097, 40))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.odd, self.bias), F.linear(F.relu(F.linear(x, self.even)), self.last)


def fused(tools: Any, **options: Any) -> list[Any]:
    options = {"device": "cuda"} | options
    gm = tools.rewritten(tools.traced(Heads(), torch.randn(2, 16)), tools.context(**options), until="move_wide")
    return [node.target for node in gm.graph.nodes if notes(node).op.name == "linear"]


@pytest.mark.parametrize("regions", ["", "triton", "aten"])
def test_those_of_odd_rows_are_called(tools: Any, regions: str) -> None:
    assert fused(tools, regions=regions) == [aligned.aligned_linear, F.linear, aligned.aligned_linear]


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"native_mixed": False}, {"level": "O0"}])
def test_elsewhere_none_is(tools: Any, options: dict[str, Any]) -> None:
    assert fused(tools, **options) == [F.linear] * 3


def readers(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    cut, loss, given = (F.linear(x, w) for _ in range(3))
    flat = F.linear(x, w).flatten(0, 1)
    rows = F.linear(x, w).view(-1, 9)
    halves = F.linear(x, w).view(-1, 3)
    return (
        cut.view(2, 15, 3), F.cross_entropy(loss.flatten(0, 1), t), given,
        F.cross_entropy(flat, t), F.log_softmax(rows, -1), halves * 2,
    )  # fmt: skip


def test_rows_lie_apart_only_where_no_reader_minds(tools: Any) -> None:
    inputs = torch.randn(2, 5, 16), torch.randn(9, 16), torch.zeros(10, dtype=torch.long)
    gm = tools.traced(readers, *inputs)
    for node in gm.graph.find_nodes(op="placeholder", target="w"):
        node.meta["sizes"] = (9, 16)
    gm = tools.rewritten(gm, tools.context(device="cuda", keep_output_dtype=False), until="move_wide")
    found = [node.kwargs["apart"] for node in gm.graph.nodes if node.target is aligned.aligned_linear]
    assert found == [False, True, False, True, True, False]


def test_what_a_reader_minds_is_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned, "FEWEST", 1)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    x, weight = torch.randn(3, 16, dtype=torch.bfloat16), torch.randn(9, 16, dtype=torch.bfloat16)
    assert aligned.aligned_linear(x, weight, apart=True).stride() == (16, 1)
    assert aligned.aligned_linear(x, weight).view(9, 3).stride() == (3, 1)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_is_large_and_not_watched_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    module = types.SimpleNamespace(aligned_linear=lambda x, w, b: taken.append(len(w)) or F.linear(x, w, b))
    monkeypatch.setitem(sys.modules, "fxprec.kernels.nn.aligned_linear", module)
    monkeypatch.setattr(aligned, "FEWEST", 3 * 16 * 37)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    x, weight = torch.randn(3, 16, dtype=torch.bfloat16), torch.randn(37, 16, dtype=torch.bfloat16)
    assert torch.equal(aligned.aligned_linear(x, weight), F.linear(x, weight)) and taken == [37]
    aligned.aligned_linear(x, nn.Parameter(weight))
    assert taken == [37, 37]
    aligned.aligned_linear(x[:2], weight)  # small
    aligned.aligned_linear(x.float(), weight.float())
    with Seen():
        aligned.aligned_linear(x, weight)
    torch.func.vmap(lambda row: aligned.aligned_linear(row, weight))(torch.stack([x, x]))
    assert taken == [37, 37]
