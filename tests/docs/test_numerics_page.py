"""docs/numerics.md: its code runs, and what it shows is what comes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.inspection.lock import parse_file

PAGE = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")


def blocks(language: str, heading: str) -> list[str]:
    """The code of a section, by a word of its heading."""
    section = re.search(rf"^## .*{heading}.*\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE)
    assert section is not None
    found = re.findall(r"^```(\w*)\n(.*?)^```$", section[1], re.DOTALL | re.MULTILINE)
    return [code for own, code in found if own == language]


@pytest.mark.slow
def test_audit_locate_and_tune(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = fxprec.convert(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), dtype=torch.bfloat16)[0]
    batches = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(4)]
    space: dict[str, Any] = {"torch": torch, "F": F, "fxprec": fxprec, "model": model, "batches": batches}
    audited, policy, savings = blocks("python", "`audit`")
    for code in (audited, policy, savings, *blocks("python", "`locate`"), *blocks("python", "`tune`")):
        exec(compile(code, "docs/numerics.md", "exec"), space)
    printed = capsys.readouterr().out
    assert printed.startswith("error of the loss over 4 batches: ") and "\nNone\n" in printed
    assert space["finding"] is None and space["policy"].overrides[0].name == space["worst"].module
    assert "at most 1 of the time: " in printed and "[policy]\nlevel = " in printed
    assert {line.node for line in space["tuned"].lines} <= {"linear", "relu", "linear_1"}
    assert space["model"](batches[0][0]).dtype is torch.float32


def test_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    model = fxprec.convert(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), dtype=torch.bfloat16)[0]
    batches = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    space: dict[str, Any] = {"torch": torch, "F": F, "fxprec": fxprec, "model": model, "batches": batches}
    [block] = blocks("python", "`ranges`")
    exec(compile(block, "docs/numerics.md", "exec"), space)
    assert capsys.readouterr().out.startswith("float16 fits; largest safe loss scale for float16: ")
    assert space["scaler"].get_scale() == space["found"].scale


def test_the_lock() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(8, 8)}) for _ in range(3))
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer["fc"](x).relu()
            return self.head(x).softmax(-1)

    asked: list[nn.Module] = []
    space: dict[str, Any] = {"torch": torch, "fxprec": fxprec, "Net": Net}
    [block] = blocks("python", "lock")
    exec(compile(block, "docs/numerics.md", "exec"), space)
    space["test_precision"](asked.append)
    assert len(asked) == 1
    file, review = blocks("", "lock")
    assert len(parse_file(file)["Net"].dtypes) == 8 and review.count("layers.1-2.fc") == 1 and "now float32" in review
