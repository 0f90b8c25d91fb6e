"""docs/migrating.md: its code runs, block after block, and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec import amp
from fxprec.amp._amp_state import AmpState, state

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    before = dict(vars(state))
    vars(state).update(vars(AmpState()))
    yield
    vars(state).update(before)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.sigmoid(self.norm(self.body(x))))


def names() -> dict[str, Any]:
    """What the page takes for granted."""
    loader = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(2)]
    return {"torch": torch, "F": F, "Model": Model, "loader": loader, "nn": nn}


def run(*numbers: int) -> dict[str, Any]:
    """Run these blocks one after the other."""
    space = names()
    for number in numbers:
        exec(compile(BLOCKS[number], f"docs/migrating.md, block {number}", "exec"), space)
    return space


@pytest.mark.slow
def test_all_blocks_run_in_order():
    space = run(*range(len(BLOCKS)))
    assert len(BLOCKS) == 11
    assert space["scaler"].is_enabled() is False  # the last one: torch.amp's loop, converted, in bfloat16
    assert type(space["model"]).__name__ == "Model" and space["loss"].isfinite()


def test_the_cheap_way_trains_in_low_precision(tools, capsys):
    space = run(0)
    model = space["model"]
    assert tools.matmul_dtypes(model, space["x"]) == {torch.bfloat16: 2}
    assert all(p.grad.isfinite().all() for p in amp.master_params(space["optimizer"]))
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 2}}
    assert "O1" in capsys.readouterr().out


def test_the_line_of_an_overflow_is_the_one_that_is_printed(capsys):
    model = Model()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with amp.scale_loss(model(torch.randn(4, 8)).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    (line,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert capsys.readouterr().out.endswith(line)


def test_a_scale_goes_on_in_a_scaler():
    space = run(0, 1, 2, 5, 6)
    assert space["scaler"].get_scale() == 65536.0
    assert set(space["checkpoint"]["amp"]) == {"loss_scaler0"}


def options_of(table_after: str) -> list[tuple[str, str]]:
    """Rows of the first table after a heading."""
    text = PAGE.split(table_after, 1)[1]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return [(left, right) for left, right in rows if not left.startswith("-")]


@pytest.mark.parametrize("row", options_of("## From apex.amp: the idiomatic way"), ids=lambda row: row[0][:30])
def test_what_replaces_an_argument_exists(row):
    """Each ``policy=`` and ``scaler=`` of the table is accepted by ``convert``, each name is there."""
    code = re.findall(r"`([^`]+)`", row[1])
    for text in code:
        if text.startswith(("policy=", "level=", "dtype=", "scaler=", "keep_output_dtype=")):
            text = text.replace("min_scale=..., max_scale=...", "min_scale=1.0, max_scale=2.0**20")
            text = text.replace("decoder.loss", "head")
            space = {"convert": fxprec.convert, "fxprec": fxprec, "torch": torch, "M": Model}
            space |= {"o1": fxprec.Policy.preset("O1"), "o2": fxprec.Policy.preset("O2")}
            model, _ = eval(f"convert(M(), {text})", space)
            assert model(torch.randn(4, 8)).shape == (4, 3)
        elif text.startswith(("LossScaler", "scaler.")):
            name = text.removeprefix("scaler.").split("(")[0]
            assert hasattr(fxprec if name == "LossScaler" else fxprec.LossScaler, name)


def test_the_imports_of_the_first_table_work():
    for _, new in options_of("## From apex.amp: the cheap way")[1:5]:
        exec(new.strip("`"), {})


def test_links_and_names_are_there():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
    for name in re.findall(r"`amp\.(\w+)", PAGE):
        assert hasattr(amp, name) or name == "init", name
    assert not hasattr(amp, "init")
