"""``python -m benchmarks inspection``: reports of real models are short, and what is printed is what there is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fxprec
from benchmarks import inspection
from benchmarks.inspection import CASES, look
from benchmarks.workloads.zoo import gpt2


@pytest.mark.slow
def test_a_row_is_what_there_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    report = fxprec.report
    monkeypatch.setattr(fxprec, "report", lambda model: seen.append(report(model)) or seen[-1])
    assert inspection.main(["--only", "gan"]) == 0
    (row,) = [line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if "gan" in line]
    name, lines, _, nodes, page, _ = (cell.strip() for cell in row)
    found = seen[-1]
    assert (name, int(lines), int(nodes)) == ("gan", len(str(found).splitlines()), len(str(found.nodes).splitlines()))
    assert int(page) == round(len(found._page().encode()) / 1e3)


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "gpt2"])
def test_reports_are_short(name: str) -> None:
    """Of a ResNet-50 on small images, and of a GPT-2 with enough layers for more nodes than a report has lines."""
    if name == "gpt2":
        pytest.importorskip("transformers", reason="wants transformers: the [zoo] extra")
        case = replace(CASES["gpt2-12"], build=lambda: gpt2(4))
    else:
        case = replace(CASES[name], inputs=lambda: {"input": torch.randn(2, 3, 32, 32)})
    found = look(case)
    assert 10 <= found.lines <= 40 < found.nodes and found.page_bytes < 1_000_000
