"""What README.md, CHANGELOG.md and docs/ claim, as far as a file of this checkout can contradict it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Sentences that were true before anything had run on a GPU.
STALE = re.compile(
    r"not (been )?timed on a GPU|figures measured on GPUs|once on a GPU|not there yet: steps on a GPU", re.IGNORECASE
)


def test_there_are_results_of_gpus():
    assert list((ROOT / "benchmarks" / "results").glob("NVIDIA-*/step-gpu-*.json"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_says_that_nothing_ran_on_a_gpu(page: Path):
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert not STALE.search(text), f"{page.name} is stale: results of GPUs lie in benchmarks/results"


def best_of_column(column: str) -> float:
    """The largest ratio of README.md's table of steps in one column."""
    head, _, *rows = (line for line in README.splitlines() if line.startswith("|") and line.count("|") > 10)
    place = [cell.strip() for cell in head.split("|")].index(column)
    cells = [row.split("|")[place].strip(" *") for row in rows]
    return max(float(cell) for cell in cells if re.fullmatch(r"[\d.]+", cell))


def test_the_first_paragraph_repeats_its_table():
    text = " ".join(README.split())
    (claimed,) = re.findall(r"transformers train up to ([\d.]+) times as fast as under `torch.autocast`", text)
    assert float(claimed) == pytest.approx(best_of_column("O1"), abs=0.05)


def test_the_demo_promises_less_than_a_minute_of_a_quiet_machine_only():
    (sentence,) = re.findall(r"[^.]*less than a minute[^.]*\.", " ".join(README.split()))
    assert "two cores that do nothing else" in sentence and "after the installation" in sentence


def test_sync_batch_norms_are_plain_ones_without_a_process_group():
    """As docs/migrating.md says."""
    torch.manual_seed(0)
    x, plain, sync = torch.randn(4, 3, 2, 2), nn.BatchNorm2d(3), nn.SyncBatchNorm(3)
    torch.testing.assert_close(sync(x), plain(x), rtol=0, atol=0)
