"""docs/performance.md and docs/lowering.md: code, commands and excerpts are right. Tables have a test of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxprec
from benchmarks.__main__ import benchmarks
from fxprec.costs.files import shipped
from fxprec.passes.costs.device_costs import Work

DOCS = Path(__file__).parents[2] / "docs"
PERFORMANCE = (DOCS / "performance.md").read_text(encoding="utf-8")
LOWERING = (DOCS / "lowering.md").read_text(encoding="utf-8")


def test_the_code_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXPREC_CACHE_DIR", str(tmp_path))  # costs that nobody calibrated
    (block,) = re.findall(r"^```python\n(.*?)^```$", LOWERING, re.DOTALL | re.MULTILINE)
    space: dict[str, Any] = {"fxprec": fxprec, "model": nn.Linear(64, 192), "x": torch.randn(1, 32, 64)}
    exec(compile(block, "docs/lowering.md", "exec"), space)
    assert "costs " in capsys.readouterr().out


def test_the_excerpt_is_what_the_shipped_costs_say() -> None:
    costs = shipped("cpu", "a CPU", 1, "other")
    model, _ = fxprec.convert(nn.Linear(64, 192), (torch.randn(1, 32, 64),), lower=costs)
    (why,) = [node.meta["precision"].why for node in model.graph.nodes if node.name == "linear"]
    (excerpt,) = re.findall(r"^pays: .*$", LOWERING, re.MULTILINE)
    assert why.startswith(excerpt)


def test_every_benchmark_that_is_named_is_there() -> None:
    named = set(re.findall(r"python -m benchmarks\s+(\w+)", PERFORMANCE + LOWERING))
    assert named <= set(benchmarks()) and {"step", "memory", "others"} <= named
    (whole,) = re.findall(r"## How it is measured.*", PERFORMANCE, re.DOTALL)
    parts = re.findall(r"`(\w+)`", whole.partition("One part alone: ")[2].partition(" prints")[0])
    assert set(parts) <= set(benchmarks()) and len(parts) > 5


@pytest.mark.parametrize(
    ("row", "works", "least"),
    [
        ("matrix products", (Work.MATMUL,), 0),
        ("products of one row, with weights of 65,536 elements or more", (Work.ROW,), 256 * 256),
        ("convolutions of many channels, forward; backward", (Work.CONVOLUTION, Work.CONVOLUTION_BACKWARD), 0),
        ("attention, forward; backward", (Work.ATTENTION, Work.ATTENTION_BACKWARD), 0),
    ],
)
def test_bfloat16_on_a_cpu_with_avx2_alone(row: str, works: tuple[Work, ...], least: float) -> None:
    costs = shipped("cpu", "a CPU", 2, "none")
    (cell,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", PERFORMANCE, re.MULTILINE)
    told = [[float(number) for number in each.split(" to ")] for each in cell.split("; ")]
    for work, ends in zip(works, told, strict=True):
        sizes = [size for size, _ in costs.curves[torch.float32][work].points if size >= least]
        ratios = [
            costs.seconds(work, torch.bfloat16, size) / costs.seconds(work, torch.float32, size) for size in sizes
        ]
        assert ends == [pytest.approx(min(ratios), rel=0.05), pytest.approx(max(ratios), rel=0.05)]
