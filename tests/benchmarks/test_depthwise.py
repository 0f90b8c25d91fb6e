"""``python -m benchmarks depthwise``: torch's and ours, and whether a converted model takes ours."""

from __future__ import annotations

import pytest

from benchmarks import depthwise
from benchmarks.depthwise import Size, measure


def test_both_are_measured_and_compared() -> None:
    found = measure(Size(4, 16, 20, 5), 0.0)
    assert found.torchs > 0 and found.ours > 0 and found.taken
    assert 0 < found.error < 1.2  # of torch's, which on a CPU with AVX2 alone is two and a half times ours
    assert not measure(Size(2, 4, 9, 3), 0.0).taken


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert depthwise.main(["--check"]) == 0
    assert "1 x 4 x 8, 5" in capsys.readouterr().out
