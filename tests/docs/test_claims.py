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


def test_the_claims_of_inference_are_those_of_the_table():
    """docs/performance.md says in words what its table of gains says in figures."""
    page = " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())
    told = re.findall(r"Frozen models run ([\d.]+) to ([\d.]+) times as fast as under autocast", page)
    rows = re.findall(r"\| inference: `freeze\(model\)` \| [\d.]+ \| ([\d.]+) to ([\d.]+) \|", page)
    assert len(told) == len(rows) == 2
    pairs = zip(
        sorted(told, key=lambda pair: float(pair[1])), sorted(rows, key=lambda pair: float(pair[1])), strict=True
    )
    for claimed, measured in pairs:
        assert [*map(float, claimed)] == [pytest.approx(float(each), rel=0.05) for each in measured]


def test_the_demo_promises_less_than_a_minute_of_a_quiet_machine_only():
    (sentence,) = re.findall(r"[^.]*less than a minute[^.]*\.", " ".join(README.split()))
    assert "two cores that do nothing else" in sentence and "after the installation" in sentence


def test_sync_batch_norms_are_plain_ones_without_a_process_group():
    """As docs/migrating.md says."""
    torch.manual_seed(0)
    x, plain, sync = torch.randn(4, 3, 2, 2), nn.BatchNorm2d(3), nn.SyncBatchNorm(3)
    torch.testing.assert_close(sync(x), plain(x), rtol=0, atol=0)
