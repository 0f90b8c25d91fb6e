"""What was measured stands at the right nodes of a page, and what was measured elsewhere is refused."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.inspection.measured import add_measured
from fxprec.numerics import audit, ranges
from page_data import data_of
from tests.page.test_page import written


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).softmax(-1)


BATCHES = [(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3)]


def converted(model: nn.Module | None = None, **how: Any) -> nn.Module:
    return fxprec.convert(model or Net(), dtype=torch.bfloat16, **how).module


def measured(model: nn.Module, **how: Any) -> dict[str, dict[str, Any]]:
    """Node -> its row, with what ``add_measured`` gave it."""
    report = fxprec.report(model)
    data = report.to_dict()
    add_measured(data["graphs"], report.subject, how.get("ledger"), how.get("ranges"))
    return {row["node"]: row for graph in data["graphs"] for row in graph["rows"]}


@pytest.mark.parametrize("gradients", [False, True])
def test_parts_in_an_error_stand_at_their_nodes(gradients: bool) -> None:
    model = converted()
    ledger = audit(model, BATCHES, F.cross_entropy, gradients=gradients)
    rows = measured(model, ledger=ledger)
    shares: dict[str, float] = defaultdict(float)
    for row in ledger.rows:
        if row.kind != "outside":
            shares[{"first": "linear", "last": "linear_1"}[row.module] if row.kind == "weight" else row.node] += (
                row.share
            )
    assert {name: sum(share for _, share in row["errors"]) for name, row in rows.items() if "errors" in row} == (
        pytest.approx(dict(shares))
    )
    labels = [label for label, _ in rows["linear"]["errors"]]
    own = ["forward", "backward"] if gradients else ["forward"]
    assert labels[: len(own)] == own and {*labels[len(own) :]} >= {"low copy of first.weight", "low copy of first.bias"}


def test_what_has_no_node_is_told(tmp_path: Path) -> None:
    model = converted()
    ledger = audit(model, BATCHES, lambda output, target: F.cross_entropy(output.bfloat16(), target).float())
    assert sum(row.share for row in ledger.rows if row.kind == "outside") > 0.0005
    lines = dict(data_of(written(fxprec.report(model), tmp_path, ledger=ledger))["lines"])
    assert lines["error"].startswith(f"{ledger.headline}; ") and lines["error"].endswith(
        "in the loss or outside of the graphs"
    )


def test_ranges_stand_at_their_nodes() -> None:
    model = converted()
    found = ranges(model, BATCHES, F.cross_entropy)
    rows = measured(model, ranges=found)
    ours = {(label, dtype): figures for label, dtype, figures in rows["linear"]["ranges"]}
    assert [label for label, _ in ours] == [
        "forward", "backward", "low copy of first.weight", "low copy of first.bias", "gradient of first.weight",
        "gradient of first.bias",
    ]  # fmt: skip
    (row,) = [row for row in found.rows if (row.node, row.phase) == ("linear", "forward")]
    lowest, tall, headroom, zeros, saturated, flushed, in_float16 = ours["forward", "bfloat16"]
    exponents = row.values.exponents
    assert lowest == min(exponents) and len(tall) == max(exponents) - lowest + 1
    assert {each + lowest for each, digit in enumerate(tall) if digit != "0"} == {*exponents}
    assert tall[max(exponents, key=exponents.__getitem__) - lowest] == "9"
    assert headroom == round(row.headroom, 1) and (zeros, saturated, flushed) == (row.zeros, row.saturated, None)
    assert in_float16 == row.flushed_in(torch.float16)


def test_of_zeros_there_is_no_headroom() -> None:
    model = converted()
    rows = measured(model, ranges=ranges(model, [(torch.zeros(5, 4), BATCHES[0][1])], F.cross_entropy))
    assert [figures for label, _, figures in rows["x_bf16"]["ranges"] if label == "forward"] == [
        [0, "", None, 1.0, 0.0, None, 0.0]
    ]


OTHERS = {
    "level": (lambda: converted(level="O2"), "settings: O2, bfloat16, mincut in the audit, O1, bfloat16, mincut"),
    "class": (lambda: converted(nn.Sequential(nn.Linear(4, 3))), "model: Sequential in the audit, Net in the report"),
    "width": (lambda: converted(Net(6)), "bytes of parameters: {'float32': 204} in the audit, {'float32': 268}"),
    "policy": (
        lambda: converted(policy=fxprec.Policy.preset("O1").override(modules={"last": torch.float32})),
        "%linear_1 of graph 1 computes float32, puts out float32 in the audit, computes bfloat16, puts out bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_a_ledger_of_another_conversion_is_refused(other: str, tmp_path: Path) -> None:
    make, words = OTHERS[other]
    ledger = audit(make(), BATCHES, F.cross_entropy)
    with pytest.raises(
        ValueError, match=r"^ledger was measured on another conversion than the report is of: "
    ) as refused:
        fxprec.report(converted()).to_html(tmp_path / "page.html", ledger=ledger)
    assert words in str(refused.value) and "first fxprec.numerics.audit(model, ...), then" in str(refused.value)
    assert not (tmp_path / "page.html").exists()


def test_what_is_no_table_or_is_folded_is_refused(tmp_path: Path) -> None:
    model = converted()
    ledger, found = audit(model, BATCHES, F.cross_entropy), ranges(model, BATCHES, F.cross_entropy)
    page = tmp_path / "page.html"
    for argument, by, own, other in (("ledger", "audit", ledger, found), ("ranges", "ranges", found, ledger)):
        for wrong, error, words in (
            ({}, TypeError, "not a dict"),
            (other, TypeError, f"not what fxprec.numerics.{'ranges' if by == 'audit' else 'audit'} returns"),
            (own.folded(), ValueError, "not folded"),
        ):
            with pytest.raises(error, match=f"^{argument} must be what fxprec.numerics.{by} returns, {words}"):
                fxprec.report(model).to_html(page, **{argument: wrong})
    fxprec.report(model).to_html(page, ledger=ledger, ranges=found)


def test_a_graph_that_was_captured_since_does_no_harm_and_one_that_is_gone_does(tmp_path: Path) -> None:
    model = converted(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    found = ranges(model, BATCHES, F.cross_entropy)
    model.eval()
    model(BATCHES[0][0])
    assert len(fxprec.report(model).graphs) == 2
    fxprec.report(model).to_html(tmp_path / "page.html", ranges=found)
    both = ranges(model, BATCHES, F.cross_entropy)
    fresh = converted(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    with pytest.raises(ValueError, match="graphs: 2 in the ranges, 1 in the report"):
        fxprec.report(fresh).to_html(tmp_path / "page.html", ranges=both)
