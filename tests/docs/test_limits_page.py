"""docs/limits.md and docs/command_line.md: their code runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.command_line.main import main

DOCS = Path(__file__).parents[2] / "docs"
LIMITS, COMMANDS = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("limits", "command_line"))


def blocks(page: str, language: str) -> list[str]:
    """Return a page's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_accumulation_and_deployment() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
    loader = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(3)]
    names: dict[str, Any] = {"torch": torch, "F": F, "fxprec": fxprec, "loader": loader}
    names |= {"model": model, "x": loader[0][0]}
    accumulation, deployment = blocks(LIMITS, "python")
    exec(compile(accumulation, "docs/limits.md", "exec"), names)
    assert all(p.grad is not None for p in names["model"].parameters())
    assert "unknown" not in str(fxprec.report(names["model"]).headline.activations)
    exec(compile(deployment, "docs/limits.md", "exec"), names)
    model, x = names["model"], names["x"]
    exported = names["program"].module()(x)
    assert exported.dtype is torch.float32
    torch.testing.assert_close(exported, fxprec.graph_module(model)(x))
    torch.testing.assert_close(exported, model(x), rtol=2**-7, atol=2**-7)  # a packed weight's product adds otherwise
    assert {p.dtype for name, p in model.named_parameters() if name.startswith(("0", "3"))} == {torch.bfloat16}


@pytest.mark.slow
def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (source,) = blocks(COMMANDS, "python")
    (tmp_path / "model.py").write_text(source, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(source, "model.py", "exec"), names)
    model, batches, _ = names["factory"]()
    assert isinstance(model, nn.Module) and len(batches) == 64
    lines = [line for block in blocks(COMMANDS, "console") for line in block.splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert main(line.removeprefix("python -m fxprec ").split()) == 0, line
    assert (tmp_path / "page.html").exists() and fxprec.Policy.from_toml(tmp_path / "policy.toml")
    assert capsys.readouterr().out.endswith("all is finite, and nothing was flushed that counts\n")
