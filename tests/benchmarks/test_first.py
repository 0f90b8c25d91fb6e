"""``python -m benchmarks first``: first steps in processes of their own, with caches that are empty and then full."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

import pytest

from benchmarks import first
from benchmarks.tables import rendered
from fxprec.kernels.cpu.cpp import why_no_compiler


def test_a_first_step_is_timed_from_the_model_in_memory() -> None:
    seconds = first.first_step("mlp", "o1", "tiny")
    assert 0.0 < seconds < 60.0


def test_each_process_has_the_caches_that_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    ran: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append((command, env))
        return subprocess.CompletedProcess(command, 0, "something imported\n1.25\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert first.measure("gpt", "o1-fused", "cpu", tmp_path) == 1.25
    [(command, env)] = ran
    assert command[2:] == ["benchmarks.first", "--size", "cpu", "--only", "gpt", "--one", "o1-fused"]
    assert all(env[name] == str(tmp_path / name) for name in first.CACHES)


def test_what_fails_says_where_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nConversionError: no C++ compiler was found")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"gpt, o1-fused: .*no C\+\+ compiler was found"):
        first.measure("gpt", "o1-fused", "cpu", tmp_path)


def test_what_compiles_is_measured_twice_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, set[pathlib.Path]] = {}
    times = iter((0.2, 0.5, 4.0, 0.75))

    def measure(model: str, variant: str, size: str, caches: pathlib.Path) -> float:
        seen.setdefault(variant, set()).add(caches)
        return next(times)

    monkeypatch.setattr(first, "measure", measure)
    options = ["--only", "gpt", "--variants", "autocast", "o1", "o1-fused", "--output", str(tmp_path)]
    assert first.main(options) == 0
    assert [len(each) for each in seen.values()] == [1, 1, 1] and len(set.union(*seen.values())) == 3
    assert "gpt, o1-fused: 4.00 s, 0.75 s" in capsys.readouterr().out
    [path] = tmp_path.glob("*/first-cpu-bfloat16.json")
    assert json.loads(path.read_text())["rows"][-1] == {
        "model": "gpt", "variant": "o1-fused", "empty_s": 4.0, "full_s": 0.75,
    }  # fmt: skip
    table, _ = rendered("<!-- table: first cpu -->\n<!-- end -->\n", tmp_path)
    assert "| model | autocast | O1 | O1, fuse=True |" in table and "| gpt | 0.20 | 0.50 | 0.75 (4.00) |" in table


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler())
def test_a_real_process_fills_the_caches_that_it_is_given(tmp_path: pathlib.Path) -> None:
    assert 0.0 < first.measure("mlp", "o1-compiled", "tiny", tmp_path) < 60.0
    assert any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_check_is_of_two_variants(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(first, "measure", lambda model, variant, size, caches: {"tiny": 0.5}[size])
    assert first.main(["--check"]) == 0
    told = capsys.readouterr().out
    assert "mlp, autocast: 0.50 s\n" in told and "mlp, o1-compiled: 0.50 s, 0.50 s\n" in told


def test_unknown_names_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--only", "gtp"], ["--variants", "o1-fuse"]):
        with pytest.raises(SystemExit, match="2"):
            first.main(options)
        assert "did you mean" in capsys.readouterr().err
