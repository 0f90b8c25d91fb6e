"""docs/training.md: its code runs, one block after the other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_blocks_run_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    before = [p.detach().clone() for p in model.parameters()]
    loader = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    space: dict[str, Any] = {"torch": torch, "F": F, "fxprec": fxprec, "model": model, "loader": loader}
    space["path"] = tmp_path / "checkpoint.pt"
    assert len(BLOCKS) == 6
    for block in BLOCKS:
        exec(compile(block, "docs/training.md", "exec"), space)
    assert space["scaler"].get_scale(1) == 65536
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert set(space["saved"]) == {"model", "optimizer", "schedule", "scaler", "random"}
    assert "overflow" not in capsys.readouterr().out


def test_the_table_of_arguments_is_that_of_the_constructor():
    (table,) = re.findall(r"^\| argument \| meaning \|\n(.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)
    first = [row.split("|")[1] for row in table.splitlines()]
    documented = {name for cell in first for name in re.findall(r"`(\w+)", cell)}
    assert documented | {"device", "self"} == set(inspect.signature(fxprec.LossScaler.__init__).parameters)


def test_the_table_of_warnings_has_every_class():
    (table,) = re.findall(r"^\| class \| what it says \|\n(.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)
    classes = {name for name in fxprec.__all__ if name.endswith("Warning")} - {"FxprecWarning"}
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == classes
    assert all(issubclass(getattr(fxprec, name), fxprec.FxprecWarning) for name in classes)
