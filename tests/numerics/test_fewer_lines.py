"""A policy in fewer lines decides every node as the lines of the nodes do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.model.conversion import conversion_of
from fxprec.numerics import tune
from fxprec.numerics.overrides import Words, in_fewer_lines, overridden
from fxprec.numerics.problem import Problem
from fxprec.numerics.tune import Study
from fxprec.passes.graph.annotations import notes
from made_costs import device

BF16, FP32 = torch.bfloat16, torch.float32
COSTS = device(30, 10, cast=1, pointwise=(2, 1), attention=(30, 10), attention_backward=(60, 20))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(layers)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 16, generator=generator), torch.arange(8) % 4) for _ in range(count)]


def converted(**how: Any) -> nn.Module:
    torch.manual_seed(0)
    return fxprec.convert(Net(), (torch.randn(8, 16),), dtype=BF16, lower=COSTS, **how).module


def decisions(policy: fxprec.Policy) -> dict[str, tuple[str, str]]:
    """Of every node of a model under a policy: what it computes in and puts out, the casts among them."""
    (graph,) = fxprec.report(converted(policy=policy)).graphs
    return {row.node: (row.compute, row.output) for row in graph.rows}


def words_of(nodes: Mapping[str, torch.dtype], policy: fxprec.Policy | None = None) -> dict[str, Words]:
    model = converted(policy=policy)
    study = Study.of(Problem(model, F.cross_entropy), conversion_of(model).settings, batches(2))
    words = study._words(nodes)
    start = policy or fxprec.Policy.preset("O1")
    assert decisions(
        overridden(start, {words.get(name, ("nodes", name)): each for name, each in nodes.items()})
    ) == decisions(start.override(nodes=nodes))
    return words


UPS, DOWNS = ("linear", "linear_2", "linear_4"), ("linear_1", "linear_3", "linear_5")
CASES: dict[str, tuple[dict[str, torch.dtype], set[Words]]] = {
    "all of an op": (dict.fromkeys((*UPS, *DOWNS, "linear_6"), FP32), {("ops", "linear")}),
    "equal layers": (dict.fromkeys(UPS, FP32), {("modules", "blocks.*.up")}),
    "one module": ({"linear_6": FP32}, {("modules", "head")}),
    "one of several": ({"linear": FP32}, {("modules", "blocks.0.up")}),
    "a block": (dict.fromkeys(("layer_norm", "linear", "gelu", "linear_1", "add"), FP32), {("modules", "blocks.0")}),
    "two blocks": (
        dict.fromkeys(("layer_norm_1", "linear_2", "gelu_1", "linear_3", "linear_4", "linear_5", "gelu_2"), FP32),
        {("modules", "blocks.1"), ("modules", "blocks.2")},
    ),
    "both dtypes": ({"linear": FP32, "add": BF16}, {("modules", "blocks.0.up")}),
    "an op without a module": ({"gelu": FP32}, set()),
}


@pytest.mark.parametrize("case", CASES)
def test_words(case: str) -> None:
    nodes, expected = CASES[case]
    assert {*words_of(nodes).values()} == expected


def test_overrides_of_the_users_stay() -> None:
    """The op's line would be about the node that the user named, too."""
    mine = fxprec.Policy.preset("O1").override(modules={"blocks.0.up": BF16})
    assert {*words_of(dict.fromkeys((*UPS[1:], *DOWNS, "linear_6"), FP32), mine).values()} == {
        ("modules", "blocks.*.down"),
        ("modules", "blocks.1"),
        ("modules", "blocks.2"),
        ("modules", "head"),
    }


def test_tables_that_cannot_be_written_are_not_made() -> None:
    """A file has one [modules], and overrides of nodes stand behind it already."""
    mine = fxprec.Policy.preset("O1").override(modules={"blocks.0": BF16}).override(nodes={"gelu_1": FP32})
    assert not words_of(dict.fromkeys(UPS[1:], FP32), mine)


def test_many_layers_take_few_questions() -> None:
    model = converted()
    nodes = [node for gm in fxprec.graphs(model) for node in gm.graph.nodes if notes(node).op.name == "linear"]
    asked = []

    def alike(words: Mapping[str, Words]) -> bool:
        asked.append(words)
        refused = {"linear", "blocks", "blocks.*", "blocks.*.up", "blocks.1", "blocks.1.up"}
        return refused.isdisjoint(pattern for _, pattern in words.values())

    names = {node.name: FP32 for node in nodes}
    words = in_fewer_lines(names, nodes, {name for name, _ in model.named_modules()}, alike)
    assert {*words} == {*names} - {"linear_2"} and words["linear_3"] == ("modules", "blocks.*.down")
    assert len(asked) < 20


@pytest.mark.slow
def test_the_file_of_a_tuned_policy(tmp_path: Any) -> None:
    model = converted()
    tuned = tune(model, batches(8), F.cross_entropy, error=1e-7 + tune(
        model, batches(8), F.cross_entropy, time=5.0).tuned.predicted_error)  # fmt: skip
    (tmp_path / "tuned.toml").write_text(tuned.to_toml())
    again = fxprec.Policy.from_toml(tmp_path / "tuned.toml")
    assert (
        decisions(again)
        == decisions(tuned.policy)
        == decisions(
            fxprec.Policy.preset("O1").override(
                nodes={line.node: getattr(torch, line.precision) for line in tuned.lines}
            )
        )
    )
    assert len(tuned.overrides()) < len(tuned.lines) / 2, "a line a module or a type of op"


def test_a_line_is_about_modules_that_there_are_and_one_precision() -> None:
    (gm,) = fxprec.graphs(converted())
    names = {node.name: FP32 for node in gm.graph.nodes if notes(node).op.name == "layer_norm"} | {"linear_6": FP32}
    told = in_fewer_lines(names, [*gm.graph.nodes], {"head"}, lambda words: True)
    assert {*told.values()} == {("ops", "layer_norm"), ("modules", "head")}
    (norm, *norms) = (name for name in names if name != "linear_6")
    several = {norm: FP32} | dict.fromkeys(norms, BF16)
    assert set() == {*in_fewer_lines(several, [*gm.graph.nodes], {"blocks"}, lambda words: True).values()}
