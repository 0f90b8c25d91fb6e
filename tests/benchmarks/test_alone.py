"""``python -m benchmarks alone``: steps of processes of their own, with malloc as it comes and kept."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

import fxprec
from benchmarks import alone


def test_the_steps_of_this_process_and_what_malloc_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(fxprec, "keep_memory", lambda: told.append(True))
    ms, faults = alone.steps("mlp", "o1", "tiny", False, 3)
    assert 0.0 < ms < 1e4 and faults >= 0.0 and not told
    alone.steps("mlp", "o1", "tiny", True, 1)
    assert told == [True]


def test_each_process_is_told_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command[2:])
        return subprocess.CompletedProcess(command, 0, "something imported\n[12.5, 4096.0]\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert alone.measure("gpt", "o1", "cpu", True, 20) == (12.5, 4096.0)
    assert alone.measure("gpt", "o1", "cpu", False, 20) == (12.5, 4096.0)
    common = ["benchmarks.alone", "--size", "cpu", "--only", "gpt", "--one", "o1", "--steps", "20"]
    assert ran == [[*common, "--kept"], common]


def test_what_fails_says_where_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nConversionError: no C++ compiler was found")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"gpt, o1-fused: .*no C\+\+ compiler was found"):
        alone.measure("gpt", "o1-fused", "cpu", False, 1)


def test_a_way_that_fails_is_the_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nConversionError: no C++ compiler was found")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert alone.main(["--check"]) == 1
    assert "mlp, autocast: ConversionError: no C++ compiler was found" in capsys.readouterr().out


def test_ratios_are_over_autocast_with_malloc_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter((40.0, 30.0, 44.0, 20.0, 42.0, 30.0, 36.0, 20.0))
    order: list[tuple[str, bool]] = []

    def measure(model: str, variant: str, size: str, kept: bool, count: int) -> tuple[float, float]:
        order.append((variant, kept))
        return next(times), 10.0

    monkeypatch.setattr(alone, "measure", measure)
    assert alone.main(["--only", "mlp", "--variants", "o1", "--times", "2"]) == 0
    assert order == [("autocast", False), ("autocast", True), ("o1", False), ("o1", True)] * 2
    cells = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in cells] == [
        ["autocast", "41.0 (40.0 to 42.0)", "10", "1.00", "30.0 (30.0 to 30.0)", "10", "1.37"],
        ["o1", "40.0 (36.0 to 44.0)", "10", "1.02", "20.0 (20.0 to 20.0)", "10", "2.05"],
    ]


def test_a_name_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        alone.main(["--only", "gptt"])
    assert "gptt" in capsys.readouterr().err
