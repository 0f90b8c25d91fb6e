"""``python -m benchmarks loops``: a table of both ways beside their prices, and what the choice takes."""

from __future__ import annotations

import pytest

from benchmarks import loops
from fxprec.kernels.cpu.compiled_attention import why_not


def test_a_choice_takes_what_its_way_takes() -> None:
    one = loops.Compared("x", (1, 1), False, 2.0, 3.0, 5.0, 4.0)
    assert one.chosen == 3.0 and one.best == 2.0
    other = loops.Compared("x", (1, 1), False, 2.0, 3.0, 4.0, 5.0)
    assert other.chosen == other.best == 2.0


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_run_prints_both_ways_and_their_prices(capsys: pytest.CaptureFixture[str]) -> None:
    assert loops.main(["--check"]) == 0
    told = capsys.readouterr().out
    assert "rms_norm" in told and "x best: as priced " in told and "always a loop " in told


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert loops.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("no loops here: ")
