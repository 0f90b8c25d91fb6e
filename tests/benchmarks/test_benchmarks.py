"""The benchmarks that count (those that time are commands), and the table of docs/design.md against them."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import traffic
from benchmarks.casts import FUSED, markdown, rows
from kernel_tools import DEVICES, run_in_the_interpreter

ROOT = pathlib.Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design.md"


@pytest.mark.slow
def test_casts_of_a_12_layer_gpt():
    table = rows(12)
    casts = {variant: [int(figure) for figure in figures] for variant, *figures in table}
    total, weights = casts["fxprec O1"][:2]
    assert total <= 175
    assert weights == 0
    assert casts["fxprec O1, low gradients"][0] <= 80
    assert casts["fxprec O2"][0] <= 105
    assert casts["eager autocast"][:3] == [270, 97, 97]
    assert markdown(table) in DESIGN.read_text(encoding="utf-8")


def test_bytes_of_a_training_step():
    table = traffic.rows()
    moved = {variant: int(figures[4]) for variant, *figures in table}
    eager, converted, ours, low, cuda, cuda_low = moved.values()
    assert eager == converted == 60
    assert low < ours < eager
    assert (cuda, cuda_low) == (40, 30)
    assert traffic.markdown(table) in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_regions_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@pytest.mark.parametrize("device", DEVICES)
def test_casts_with_fused_regions(device: str) -> None:
    if device != "cpu":
        pytest.skip("the table of docs/design.md is a CPU's")
    table = rows(12, FUSED, length=4)
    assert markdown(table) in DESIGN.read_text(encoding="utf-8")
    casts = {variant: int(figures[0]) for variant, *figures in table}
    assert casts["fxprec O1, fused"] <= 100 and casts["fxprec O1, fused, low gradients"] <= 4
