"""explain: what each node of a part reads, computes and puts out, through its casts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.passes.graph.annotations import Rule


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 8))
        self.idle = nn.Linear(2, 2)

    def forward(self, x):
        return F.softmax(self.body(x), -1)


@pytest.fixture
def model():
    return fxprec.convert(Net(), (torch.randn(2, 8),), dtype=torch.bfloat16).module


def test_a_module_covers_all_below_it(model):
    text = fxprec.explain(model, "body")
    assert text.split("\n")[0] == "body: 4 nodes"
    assert "body.0.weight as its bfloat16 shadow" in text
    assert "%x cast from float32 to bfloat16" in text
    assert "softmax  (" not in text
    assert repr(text) == str(text)


def test_a_cast_shows_at_both_its_ends(model):
    low = fxprec.explain(model, "body.3")
    assert "bfloat16 (float32 in the original), cast to float32 for %softmax" in low
    full = fxprec.explain(model, "op:softmax")
    assert "cast from bfloat16 to float32" in full
    assert "computes  float32" in full
    assert "because   full: " in full
    assert "test_explanation.py:" in full


def test_a_cast_can_be_asked_for_by_name(model):
    (cast,) = [n for n in fxprec.graph_module(model).graph.nodes if n.meta.get("inserted") and n.args[0].name == "x"]
    assert f"%{cast.name} = cast" in fxprec.explain(model, cast.name)


def test_each_graph_is_explained():
    model, _ = fxprec.convert(Net(), dtype=torch.bfloat16)
    model(torch.randn(2, 8))
    model.eval()(torch.randn(2, 8))
    count = len(fxprec.graphs(model))
    assert count >= 2
    assert f"op:softmax in graph {count} of {count}: 1 node" in fxprec.explain(model, "op:softmax")


def test_an_unknown_name_suggests_the_nearest(model):
    with pytest.raises(ValueError, match=r"did you mean .*'body'"):
        fxprec.explain(model, "boddy")


def test_a_module_that_made_no_node_is_told_from_an_unknown_one(model):
    with pytest.raises(ValueError, match="not called"):
        fxprec.explain(model, "idle")


class Deep(nn.Module):
    """Blocks on (2, 8), the fourth one of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU() if number == 3 else nn.GELU())
            for number in range(12)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture(scope="module")
def deep():
    return fxprec.convert(Deep(), (torch.randn(2, 8),), dtype=torch.bfloat16).module


def test_layers_that_are_alike_are_told_once(deep):
    lines = str(fxprec.explain(deep, "blocks")).split("\n")
    assert lines[0] == "blocks: 36 nodes"
    assert [line for line in lines if "alike" in line] == [
        "blocks.0-2,4-11: 11 alike, 3 nodes each; the first one's:",
    ]
    shown = [line for line in lines if line.startswith("%")]
    assert len(shown) == 6, "of the first layer, and of the one that is another kind"
    assert any("relu" in line and "blocks.3.2" in line for line in shown)


def test_one_of_them_by_its_number(deep):
    text = str(fxprec.explain(deep, "blocks.5"))
    assert text.startswith("blocks.5: 3 nodes") and "alike" not in text and "blocks.5.1" in text


def test_what_a_policy_changes_in_one_layer_is_told_apart():
    policy = fxprec.Policy.preset("O1").override(modules={"blocks.7.1": Rule.FULL})
    model = fxprec.convert(Deep(), (torch.randn(2, 8),), dtype=torch.bfloat16, policy=policy).module
    text = str(fxprec.explain(model, "blocks"))
    assert "blocks.0-2,4-6,8-11: 10 alike" in text and "in blocks.7.1" in text
