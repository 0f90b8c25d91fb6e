"""docs/numerics.md: its code runs, one block after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec

PAGE = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TEXTS = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / x.norm(dim=-1, keepdim=True)


@pytest.mark.filterwarnings("ignore::fxprec.NonFiniteWarning", "ignore::fxprec.SlowDtypeWarning")
def test_the_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    model, scaler = fxprec.convert(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    loader[1][0][2] = 0
    space: dict[str, Any] = {
        "torch": torch, "F": F, "fxprec": fxprec, "model": model, "optimizer": optimizer, "scaler": scaler,
        "loader": loader,
    }  # fmt: skip
    for block in BLOCKS:
        exec(compile(block, "docs/numerics.md", "exec"), space)
    told, written = capsys.readouterr().out, TEXTS[0]
    assert _unnumbered(told) == _unnumbered(written)


def _unnumbered(text: str) -> str:
    """Without lines of code and values."""
    return re.sub(r"\([\w./]+:\d+\)|-?\d\.\d+|-?inf", "", text).strip()
