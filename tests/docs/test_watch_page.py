"""docs/watch.md: its code runs, and warns of what stands below it, once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec

PAGE = (Path(__file__).parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")
TEXTS = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / x.norm(dim=-1, keepdim=True)


@pytest.mark.filterwarnings("ignore::fxprec.SlowDtypeWarning")
def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    batches[1][0][2] = 0
    space: dict[str, Any] = {"torch": torch, "F": F, "fxprec": fxprec, "original": Net(), "batches": batches}
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    text, _ = TEXTS
    with pytest.warns(fxprec.NonFiniteWarning) as told:
        exec(compile(block, "docs/watch.md", "exec"), space)
    assert [_unnumbered(str(each.message)) for each in told] == [_unnumbered(text)]
    assert [_unnumbered(str(trip)) for trip in space["watcher"].trips] == [_unnumbered(text)]
    assert not capsys.readouterr().out, "else it stands there twice"


@pytest.mark.filterwarnings("ignore::fxprec.NonFiniteWarning", "ignore::fxprec.SlowDtypeWarning")
def test_an_optimizer_that_divides_by_0() -> None:
    model, _ = fxprec.convert(nn.Sequential(nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), eps=0.0)
    x, y = torch.randn(4, 8), torch.randint(3, (4,))
    x[:, 0] = 0
    with fxprec.numerics.watch(model, optimizer) as watcher:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert [*map(str, watcher.trips)] == [TEXTS[1].strip()]


def _unnumbered(text: str) -> str:
    """Without lines of code and values."""
    return re.sub(r"\([\w./]+:\d+\)|-?\d\.\d+|-?inf", "", text).strip()
