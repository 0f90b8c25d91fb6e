"""``benchmarks.savings``: its ranks, and what it judges the columns of an audit by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import savings
from benchmarks.savings import KINDS, judged, rank
from benchmarks.workloads.subjects import small
from fxprec.numerics import audit


def test_ranks_are_spearmans():
    assert rank([1.0, 2.0, 3.0], [10.0, 20.0, 90.0]) == pytest.approx(1)
    assert rank([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert rank([1.0, 1.0, 2.0, 2.0], [1.0, 2.0, 1.0, 2.0]) == pytest.approx(0)
    assert rank([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(0.8660, abs=1e-4)


@pytest.mark.slow
def test_columns_are_judged_by_batches_that_were_not_audited():
    subject = small("mlp")
    found = judged("mlp", subject, 2, 6, 3)
    assert len(found.overrides) == 3 and found.model == "mlp"
    assert found.pairs >= max(found.right_by_share, found.right_by_saves) >= 0
    batches = [subject.batch(seed) for seed in range(2)]
    ledger = audit(savings._converted(subject, ()), batches, subject.loss, savings=3)
    for each in found.overrides:
        rows = [row for row in ledger.rows if row.override == each.nodes]
        assert each.share == max(row.share for row in rows) and {row.saves for row in rows} == {each.saves}
    changed = judged("mlp", subject, 2, 8, 3)
    assert [each.saves for each in changed.overrides] == [each.saves for each in found.overrides]
    assert [each.held_out for each in changed.overrides] != [each.held_out for each in found.overrides]


def test_errors_of_outputs_are_those_of_all_their_elements():
    subject = small("mlp")
    found = judged("mlp", subject, 2, 4, 3, "outputs")
    model, nodes = savings._converted(subject, ()), found.overrides[0].nodes
    exact, other = subject.seeded().double(), savings._converted(subject, nodes)
    start = left = 0.0
    for inputs, _ in (subject.batch(seed) for seed in range(2, 6)):
        true = exact(inputs.double())
        start += float((model(inputs) - true).square().sum().detach())
        left += float((other(inputs) - true).square().sum().detach())
    assert found.overrides[0].held_out == pytest.approx(1 - left / start)
    ledger = audit(model, [subject.batch(seed)[:1] for seed in range(2)], savings=3)
    assert {row.saves for row in ledger.rows if row.override == nodes} == {found.overrides[0].saves}


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--batches", "2", "--held-out", "4", "--overrides", "2", "--output", str(tmp_path)]
    assert savings.main(["--only", "recurrent", *options]) == 0
    printed = capsys.readouterr().out
    assert "recurrent: linear_7: share " in printed and "told apart" in printed
    (written,) = tmp_path.rglob("savings.json")
    assert [each["model"] for each in json.loads(written.read_text())["models"]] == ["recurrent"]
    for wrong in (["--only", "resnext"], ["--batches", "1"], ["--held-out", "2"]):
        with pytest.raises(SystemExit):
            savings.main(wrong)
    assert "did you mean resnet?" in capsys.readouterr().err
    assert len(KINDS) >= 4
