"""``python -m benchmarks inference``: what it says, its files and figure, and the variants that fail."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from benchmarks import inference
from benchmarks.measure.interleaved import Samples
from benchmarks.reports.inference import Batch, Found, Row, draw, found_before
from benchmarks.workloads.training import workloads


def times(*medians):
    return Samples(tuple((each, each) for each in medians))


def found():
    rows = [
        Row("autocast", "torch.autocast", samples=times(10, 10), prepare=0.1, error=4e-3),
        Row("autocast again", "torch.autocast", samples=times(10.5, 10), prepare=0.1, error=4e-3),
        Row("frozen", "fxprec O1, frozen", samples=times(5, 5), prepare=0.25, error=3e-3),
        Row("fp32", "FP32", trouble="failed: RuntimeError: no memory"),
    ]
    return Found("mlp", "cpu", "3 x 2048", "Some-CPU", [Batch(16, rows)])


def test_the_table_of_a_batch():
    console = Console(width=160, record=True, file=io.StringIO())
    found().show(console, found().batches[0])
    text = console.export_text()
    assert (
        "mlp, batch 16 (3 x 2048); Some-CPU" in text and "2.00 faster" in text and "0.25" in text and "3.0e-03" in text
    )
    assert "torch.autocast again" in text and "failed: RuntimeError: no memory" in text and "noise" in text


def test_without_a_variant_built_twice_nothing_is_faster():
    batch = found().batches[0]
    del batch.rows[1]
    assert math.isinf(batch.noise) and batch.as_dict()["noise"] is None
    assert batch.as_dict()["variants"]["frozen"]["ratio"]["autocast"]["verdict"] == "="


def test_a_file_has_every_sample():
    data = json.loads(json.dumps(found().as_dict()))
    frozen = data["batches"][0]["variants"]["frozen"]
    assert frozen["ratio"]["autocast"]["value"] == 2 and frozen["samples_ms"] == [[5, 5], [5, 5]]
    assert data["batches"][0]["variants"]["fp32"] == {"what": "FP32", "trouble": "failed: RuntimeError: no memory"}
    assert found().file == "inference-cpu-mlp"


@pytest.mark.slow
def test_a_run_of_everything_at_tiny_sizes_writes_where_it_is_told(tmp_path, capsys):
    assert inference.main(["--check", "--only", "mlp", "cnn", "--output", str(tmp_path)]) == 0
    (device,) = tmp_path.iterdir()
    assert {"inference-tiny-mlp.json", "inference-tiny-cnn.json"} <= {each.name for each in device.iterdir()}
    before = found_before("tiny", ["mlp", "cnn", "gpt"], device.name, tmp_path)
    assert [*before] == ["mlp", "cnn"]
    variants = before["cnn"]["batches"][0]["variants"]
    assert variants["frozen"]["error"] < 0.05 and variants["frozen"]["prepare_s"] > 0
    assert "frozen again" in variants and "compile" not in variants
    assert "nothing is written" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_variant_that_fails_is_a_row(monkeypatch):
    def fails(model, inputs):
        raise RuntimeError("no such thing\nat all")

    monkeypatch.setitem(inference.VARIANTS, "fp32", inference.Variant("FP32", fails))
    (workload,) = workloads("tiny", ["mlp"])
    batch = inference.compare(workload, 6, ["autocast", "fp32"], None)
    assert batch.size == 6 and [row.name for row in batch.rows] == ["autocast", "autocast again", "fp32"]
    assert batch.rows[2].trouble == "failed: RuntimeError: no such thing" and batch.rows[2].samples is None


@pytest.mark.slow
def test_nothing_is_written_by_a_part(monkeypatch, capsys):
    monkeypatch.setattr(inference.results, "save", lambda *_: pytest.fail("written"))
    assert inference.main(["--check", "--only", "mlp"]) == 0
    assert "wants --output FOLDER" in capsys.readouterr().out


def test_an_unknown_model_is_told_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        inference.main(["--only", "mpl"])
    assert "did you mean mlp?" in capsys.readouterr().err


def test_the_figure_has_a_panel_a_model():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    data = found().as_dict() | {"environment": {"device": "Some-CPU"}}
    draw(figure, {"mlp": data})
    assert [each.get_text() for each in figure.axes[0].get_yticklabels()] == ["frozen, 16"]
