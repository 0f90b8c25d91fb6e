"""``python -m benchmarks others``: a model of another package trains each way, and one that fails is a row."""

from __future__ import annotations

import pytest

from benchmarks import others


@pytest.mark.slow
def test_a_model_trains_each_way() -> None:
    pytest.importorskip("transformers")
    seconds, losses = others.times(others.MODELS["opt"], True)
    assert len(seconds) == len(losses) == 4 and min(seconds) > 0
    assert losses[0] == losses[1]
    assert losses[2:] == pytest.approx([losses[0]] * 2, rel=1e-2)


def test_a_model_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(tiny: bool) -> None:
        raise ValueError("no such thing\nat all")

    monkeypatch.setitem(others.MODELS, "t5", fails)  # type: ignore[arg-type]
    assert others.main(["--check", "--only", "t5"]) == 1
    assert "failed: ValueError: no such thing" in capsys.readouterr().out
