"""The benchmarks that count (those that time are commands), and the README's table against them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import traffic
from benchmarks.casts import markdown, rows
from kernel_tools import skip_where_loops_cannot_be_interpreted

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"


def test_casts_of_a_12_layer_gpt():
    table = rows(12)
    casts = {variant: [int(figure) for figure in figures] for variant, *figures in table}
    total, weights = casts["fxprec O1"][:2]
    assert total <= 175
    assert weights == 0
    assert casts["fxprec O1, low gradients"][0] <= 80
    assert casts["fxprec O2"][0] <= 105
    assert casts["eager autocast"][:3] == [270, 97, 97]
    assert markdown(table) in README.read_text(encoding="utf-8")


def test_bytes_of_a_training_step():
    table = traffic.rows()
    moved = {variant: int(figures[4]) for variant, *figures in table}
    eager, converted, ours, low, cuda, cuda_low = moved.values()
    assert eager == converted == 60
    assert low < ours < eager
    assert (cuda, cuda_low) == (40, 30)
    assert traffic.markdown(table) in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def test_casts_with_fused_regions() -> None:
    pytest.importorskip("triton")
    skip_where_loops_cannot_be_interpreted()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.casts", "--fused", "--length", "4", "--markdown"]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() in (ROOT / "README.md").read_text(encoding="utf-8")
    casts = {line.split(" | ")[0].strip("| "): int(line.split(" | ")[1]) for line in run.stdout.splitlines()[2:]}
    assert casts["fxprec O1, fused"] <= 100 and casts["fxprec O1, fused, low gradients"] <= 4
