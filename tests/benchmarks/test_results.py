"""``benchmarks.measure.results``: what is kept of a measurement, where, and of which machine; figures."""

from __future__ import annotations

import builtins
import json
import platform
import re
import socket
import subprocess

import pytest
import torch

from benchmarks.measure import results
from benchmarks.measure.plots import bars, curves, stacked

CPU = torch.device("cpu")


def test_round_trip(tmp_path):
    data = {"rows": [{"samples": [1.0, 0.5], "name": "a"}, {"samples": [], "name": "ü"}], "none": None, "pair": (1, 2)}
    path = results.save("step", data, tmp_path, CPU)
    assert path == tmp_path / results.device_name(CPU) / "step.json"
    found = results.load("step", results.device_name(CPU), tmp_path)
    environment = found.pop("environment")
    assert found == data | {"pair": [1, 2]}
    assert environment.keys() == results.environment(CPU).keys()


def test_the_same_data_is_the_same_text(tmp_path):
    """Six digits, samples on one line, keys in the order given."""
    data = {"environment": {"device": "D"}, "b": {"times": [1 / 3, 2e-9, 3], "empty": {}}, "a": [{"x": True}, []]}
    text = results.save("x", data, tmp_path).read_text(encoding="utf-8")
    assert text == (
        '{\n "environment": {\n  "device": "D"\n },\n "b": {\n  "times": [0.333333, 2e-09, 3],\n  "empty": {}\n },\n'
        ' "a": [\n  {\n   "x": true\n  },\n  []\n ]\n}\n'
    )
    assert (tmp_path / "D" / "x.json").is_file()  # where it was measured, not where it was written
    assert json.loads(text)["b"]["times"] == [0.333333, 2e-9, 3]


def test_what_json_cannot_hold_leaves_the_file_alone(tmp_path):
    path = results.save("x", {"a": 1}, tmp_path, CPU)
    before = path.read_text(encoding="utf-8")
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            results.save("x", {"a": bad}, tmp_path, CPU)
    with pytest.raises(TypeError):
        results.save("x", {"a": CPU}, tmp_path, CPU)
    assert path.read_text(encoding="utf-8") == before


def test_environment_names_no_host_and_no_path():
    found = results.environment(CPU)
    assert found["torch"] == torch.__version__ and found["python"] == platform.python_version()
    assert found["threads"] == torch.get_num_threads()
    assert re.fullmatch(r"unknown|[0-9a-f]{12}(\+changes)?", found["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])
    text = json.dumps(found)
    assert str(results.ROOT) not in text and socket.gethostname() not in text


@pytest.mark.parametrize(
    ("head", "status", "commit"),
    [
        ("abc", "", "abc"),
        ("abc", " M fxprec/model/net.py", "abc+changes"),
        (None, "", "unknown"),
        ("abc", None, "unknown"),
    ],
)
def test_commit(monkeypatch, head, status, commit):
    def run(command, **_):
        answer = head if command[1] == "rev-parse" else status
        return subprocess.CompletedProcess(command, 128 if answer is None else 0, answer or "", "")

    monkeypatch.setattr(results.subprocess, "run", run)
    assert results.environment(CPU)["commit"] == commit


def test_without_git(monkeypatch):
    def run(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(results.subprocess, "run", run)
    assert results.environment(CPU)["commit"] == "unknown"


def test_device_names(monkeypatch):
    monkeypatch.setattr(results, "processor_name", lambda device: "Intel(R) Xeon(R) CPU @ 2.20GHz")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert results.device_name(CPU) == "Intel-R-Xeon-R-CPU-2.20GHz-4-threads"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert results.device_name(CPU).endswith("2.20GHz-1-thread")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert results.device_name(torch.device("cuda")) == "NVIDIA-H200"


def test_load_says_what_there_is(tmp_path):
    with pytest.raises(results.ResultsError, match=r"'step-x' on 'D': there are none of any device; 'python -m benchm"):
        results.load("step-x", "D", tmp_path)
    path = results.save("step-x", {}, tmp_path, CPU)
    with pytest.raises(results.ResultsError, match=re.escape(f"there are results of {results.device_name(CPU)}")):
        results.load("step-x", "D", tmp_path)
    path.write_text('{"a": 1', encoding="utf-8")
    with pytest.raises(results.ResultsError, match=r"step-x.json is not JSON .* measure again"):
        results.load("step-x", results.device_name(CPU), tmp_path)
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(results.ResultsError, match="names no environment"):
        results.load("step-x", results.device_name(CPU), tmp_path)


# -- figures ----------------------------------------------------------------------------------------------------------


def draw_curves(figure):
    curves(figure, {"a": ([1.0, 10.0], [2.0, 20.0])}, x="nodes", y="seconds", log=True)


def test_figures_are_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    path = results.save_figure("x", draw_curves, tmp_path, device=CPU)
    assert path == tmp_path / results.device_name(CPU) / "x.png"
    first = path.read_bytes()
    assert first.startswith(b"\x89PNG")
    results.save_figure("x", draw_curves, tmp_path, device=CPU)
    assert path.read_bytes() == first


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    found = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert results.save_figure("x", draw_curves, tmp_path) is None
    assert capsys.readouterr().out.splitlines() == [
        "x.png is not written: matplotlib is not installed (pip install 'fxprec[bench]' brings it)"
    ]
    assert not [*tmp_path.iterdir()]


def test_charts_show_their_figures():
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure()
    stacked(figure, {"gpt": {"o1": {"w": 1.0, "g": 2.0}, "o2": {"w": 3.0, "g": 4.0}}})
    places = [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches]
    assert places == [(0.0, 1.0), (0.0, 3.0), (1.0, 2.0), (3.0, 4.0)]
    figure = figures.Figure()
    draw_curves(figure)
    assert figure.axes[0].get_xscale() == "log" and figure.axes[0].lines[0].get_ydata().tolist() == [2.0, 20.0]
    figure = figures.Figure()
    bars(figure, {"loss": {"a": [1.0, 3.0]}, "accuracy": {"a": [5.0]}})
    assert [axes.patches[0].get_height() for axes in figure.axes] == [2.0, 5.0]
