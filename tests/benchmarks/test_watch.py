"""``python -m benchmarks watch``: a file a model, with every sample, and the table of them."""

from __future__ import annotations

import json

import pytest

from benchmarks import watch


@pytest.mark.slow
def test_a_run_at_tiny_sizes_writes_where_it_is_told(tmp_path, capsys):
    arguments = ["--size", "tiny", "--only", "mlp", "--level", "O0", "--seconds", "0.1", "--output", str(tmp_path)]
    assert watch.main(arguments) == 0
    (path,) = tmp_path.glob("*/watch-tiny-O0-mlp.json")
    data = json.loads(path.read_text())
    assert data["environment"]["device"] == path.parent.name and data["environment"]["threads"] == 1
    assert (data["model"], data["level"]) == ("mlp", "O0") and data["reads"]["amax"] == 1
    assert len(data["samples_ms"]["plain"]) == len(data["samples_ms"]["watched"]) > 0
    assert data["ratio"]["verdict"] in ("=", "slower", "faster") and data["ratio"]["value"] > 0
    assert "a training step within fxprec.numerics.watch" in capsys.readouterr().out
