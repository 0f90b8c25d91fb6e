"""docs/fusion.md: its code runs, and its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec import kernels

PAGE = (Path(__file__).parents[2] / "docs" / "fusion.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(self.norm(x)) * 2)))


def test_the_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {"torch": torch, "F": F, "fxprec": fxprec, "model": Block(), "x": torch.randn(4, 16)}
    assert len(BLOCKS) == 2
    for block in BLOCKS:
        exec(compile(block, "docs/fusion.md", "exec"), space)
    printed = capsys.readouterr().out
    assert re.search(r"\d fused: \d aten \(fuse='aten'\)", printed) and "fused_" in printed
    assert space["head"].grad.isfinite().all()


def test_every_kernel_is_in_the_table() -> None:
    (table,) = re.findall(r"^\| function \| .*\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(kernels.__all__)
    assert all(callable(getattr(kernels, name)) and getattr(kernels, name).__doc__ for name in named)


def test_an_unknown_kernel_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'relu'"):
        _ = kernels.relu
