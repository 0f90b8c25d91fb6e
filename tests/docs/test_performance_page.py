"""docs/performance.md: its code runs, its commands and its excerpt are right. Its tables have a test of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxprec
from benchmarks.__main__ import benchmarks
from fxprec.costs.shipped import shipped

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")


def test_the_code_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXPREC_CACHE_DIR", str(tmp_path))  # costs that nobody calibrated
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    space: dict[str, Any] = {"fxprec": fxprec, "model": nn.Linear(64, 192), "x": torch.randn(1, 32, 64)}
    exec(compile(block, "docs/performance.md", "exec"), space)
    assert "costs " in capsys.readouterr().out


def test_the_excerpt_is_what_the_shipped_costs_say() -> None:
    costs = shipped("cpu", "a CPU", 1, "other")
    model, _ = fxprec.convert(nn.Linear(64, 192), (torch.randn(1, 32, 64),), lower=costs)
    (why,) = [node.meta["precision"].why for node in model.graph.nodes if node.name == "linear"]
    (excerpt,) = re.findall(r"^pays: .*$", PAGE, re.MULTILINE)
    assert why.startswith(excerpt)


def test_every_benchmark_that_is_named_is_there() -> None:
    named = set(re.findall(r"python -m benchmarks (\w+)", PAGE))
    assert named <= set(benchmarks()) and {"step", "memory", "accuracy", "convert", "kernels", "tables"} <= named
