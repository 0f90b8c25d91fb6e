"""``python -m benchmarks writes``: what the samples of weights cost."""

from __future__ import annotations

import pytest

from benchmarks import writes


def test_it_prints_a_step_and_forwards(capsys: pytest.CaptureFixture[str]) -> None:
    assert writes.main(["--size", "tiny", "--steps", "1", "--rounds", "5"]) == 0
    step, *forwards = capsys.readouterr().out.splitlines()
    assert step.startswith("a step of gpt (tiny)") and "0.0 us" not in step
    assert [line.split(":")[0] for line in forwards] == [f"no_grad, {n} weights" for n in (10, 100, 400)]
