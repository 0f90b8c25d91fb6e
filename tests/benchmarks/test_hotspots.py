"""``python -m benchmarks hotspots``: a file a model, the tables, variants that fail, and how a GPU's times are read."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fxprec
from benchmarks import hotspots
from benchmarks.measure.training_step import Setup
from benchmarks.measure.variants import VARIANTS
from benchmarks.reports.hotspots import KEPT, Profiled
from benchmarks.workloads.training import workloads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_run_at_tiny_sizes_writes_where_it_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    arguments = ["--check", "--only", "mlp", "--variants", "o1-own", "--top", "1", "--output", str(tmp_path)]
    assert hotspots.main(arguments) == 0
    (path,) = tmp_path.glob("*/hotspots-tiny-bfloat16-mlp.json")
    data = json.loads(path.read_text())
    assert data["environment"]["device"] == path.parent.name
    assert (data["model"], data["size"], data["dtype"]) == ("mlp", "tiny", "bfloat16")
    eager, ours = data["variants"]["autocast"], data["variants"]["o1-own"]
    assert eager["x_autocast"] == 1 and ours["x_autocast"] == pytest.approx(eager["ms"] / ours["ms"], rel=1e-4)
    # three layers forward; two products each backward, but of the first one, whose input wants no gradient
    assert eager["kernels"]["aten::addmm"][1] == 3 and eager["kernels"]["aten::mm"][1] == 5
    assert eager["launches"] > ours["launches"] > 8
    assert eager["busy_ms"] == pytest.approx(sum(us for us, _ in eager["kernels"].values()) / 1e3, rel=1e-3)
    assert [us for us, _ in eager["kernels"].values()] == sorted((us for us, _ in eager["kernels"].values()))[::-1]
    shown = capsys.readouterr().out
    assert "mlp, 3 x 16, batch 4, bfloat16" in shown and "o1-own: kernels of a step" in shown
    rows = [line for line in shown.splitlines() if line.startswith("│")]
    assert len(rows) == 2 + 1 + 1 and "0 variants failed" in shown


def test_nothing_is_written_of_tiny_sizes_unless_told(monkeypatch):
    monkeypatch.setattr(hotspots, "save", lambda *_: pytest.fail("written"))
    assert hotspots.main(["--check", "--only", "mlp", "--variants", "autocast"]) == 0


def test_a_variant_that_fails_is_a_row(tmp_path, capsys, monkeypatch):
    def refuse(workload, setup):
        raise fxprec.ConversionError("not this\nmore")

    base = VARIANTS["autocast"]
    bad = replace(base, name="bad", build=refuse)
    odd = [bad, replace(bad, name="declined", refuses=(fxprec.FxprecError,)), VARIANTS["fp32-tf32"]]
    monkeypatch.setattr(hotspots, "variants", lambda names: [base, *odd])
    monkeypatch.setenv("COLUMNS", "200")
    assert hotspots.main(["--check", "--only", "mlp", "--output", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "1 variants failed" in captured.out and "Traceback" in captured.err
    (path,) = tmp_path.glob("*/*.json")
    found = json.loads(path.read_text())["variants"]
    assert found["autocast"]["ms"] > 0
    assert found["bad"] == {"what": base.what, "trouble": "failed: ConversionError: not this"}
    assert found["declined"]["trouble"] == "refused: ConversionError: not this"
    assert found["fp32-tf32"]["trouble"].startswith("not here: TF32")
    assert all(each["trouble"] in captured.out for name, each in found.items() if name != "autocast")


def test_a_time_limit_names_what_is_left_out(capsys):
    assert hotspots.main(["--check", "--only", "mlp", "--budget", "1e-9"]) == 1
    assert "no time for mlp autocast, mlp o1-own, mlp o1-whole" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--check", "--only", "gtp"], "no model 'gtp'; did you mean gpt?"),
        (["--variants", "o1-wole"], "no variant 'o1-wole'; did you mean o1-whole?"),
        (["--size", "gpu", "--only", "gpt-50k"], "no gpt-50k of size gpu"),
    ],
)
def test_bad_options(arguments, said, capsys):
    with pytest.raises(SystemExit) as raised:
        hotspots.main(arguments)
    assert raised.value.code == 2 and said in capsys.readouterr().err


class Event:
    """A CUDA event of a device that takes 5 ms a step."""

    now = 0.0

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def synchronize(self):
        assert self.at is not None

    def elapsed_time(self, other):
        return other.at - self.at


def test_times_of_a_device(monkeypatch):
    """Of a GPU its own events count, of a CPU an operator without what it calls; each figure is of one step."""
    ran = []

    def step():
        ran.append(1)
        Event.now += 5.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ran.append("waited"))
    host, ms = hotspots._timed(step, 4, torch.device("cuda"))
    assert ms == 5.0 and 0 < host < 5.0 and ran == ["waited", 1, 1, 1, 1]
    on_device, on_host = SimpleNamespace(name="CUDA"), SimpleNamespace(name="CPU")
    events = [SimpleNamespace(name="gemm", device_type=on_device, device_time=30.0) for _ in range(4)]
    events += [SimpleNamespace(name="Memset", device_type=on_device, device_time=1.0)]
    events += [SimpleNamespace(name="cudaLaunchKernel", device_type=on_host, device_time=0.0)]

    profiling, left_after = [], []

    class Profile:
        def __init__(self, activities):
            profiling.extend(each.name for each in activities)

        def __enter__(self):
            return SimpleNamespace(events=lambda: events)

        def __exit__(self, *_):
            left_after.append(ran[-1])

    monkeypatch.setattr(hotspots, "profile", Profile)
    times, counts = hotspots._by_name(step, torch.device("cuda"))
    assert times == {"gemm": 60.0, "Memset": 0.5} and counts == {"gemm": 4, "Memset": 1}
    assert left_after == ["waited"]  # what was queued is done before the profiler ends
    events += [
        SimpleNamespace(name=name, device_type=on_host, self_cpu_time_total=own, cpu_time=9.0)
        for name, own in (("aten::linear", 1.0), ("aten::addmm", 8.0))
    ]
    del events[5]
    times, counts = hotspots._by_name(step, CPU)
    assert times == {"aten::linear": 0.5, "aten::addmm": 4.0} and profiling == ["CUDA", "CPU"]


def test_as_many_steps_as_the_seconds_allow(monkeypatch):
    (workload,) = workloads("tiny", ["mlp"])
    counts = []
    monkeypatch.setattr(hotspots, "_timed", lambda step, count, device: counts.append(count) or (1.0, 100.0))
    for seconds in (0.0, 1.0, 1000.0):
        assert hotspots.profiled(VARIANTS["autocast"], workload, Setup(CPU), seconds).ms == 100.0
    assert counts == [2, 3, 2, 10, 2, 50]


def test_a_file_holds_the_largest_kernels():
    kernels = {f"k{number}": (100.0 - number, 1.0) for number in range(KEPT + 5)}
    found = Profiled("o1", "words", "", 4.0, 1.0, 3.5, 80, kernels).as_dict(8.0)
    assert [*found["kernels"]] == [f"k{number}" for number in range(KEPT)] and found["x_autocast"] == 2.0
    assert Profiled("o1", "words", "", 4.0).as_dict(None)["x_autocast"] is None
