"""``python -m benchmarks kernels``: every case runs and is right at a tiny size; its clock, its figures, its report."""

from __future__ import annotations

import json
import runpy
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from _pytest.assertion.rewrite import AssertionRewritingHook
from torch import Tensor

from benchmarks import __main__ as dispatcher
from benchmarks import kernels
from benchmarks.measure import timing
from benchmarks.measure.timing import DeviceClock, HostClock, Series, Work
from benchmarks.reports.kernels import COLUMNS, Report, Row
from benchmarks.workloads.problems import PROBLEMS, Problem, Setup, Source
from kernel_tools import DEVICES, run_in_the_interpreter

# -- python -m benchmarks ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_dispatcher_lists_what_there_is(capsys):
    assert dispatcher.main([]) == 0
    listed = capsys.readouterr().out
    assert {"casts", "convert", "kernels", "traffic"} <= dispatcher.benchmarks().keys()
    assert not {"models", "timing", "problems"} & dispatcher.benchmarks().keys()
    assert "  casts      Casts executed in forward and backward" in listed
    assert dispatcher.main(["kernal"]) == 2
    assert "no benchmark 'kernal'; did you mean kernels?" in capsys.readouterr().err


@pytest.mark.parametrize("form", [["benchmarks", "casts"], ["benchmarks.casts"]])
def test_both_ways_to_run_a_benchmark(form, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*form, "--layers", "1", "--markdown"])
    # pytest's loader, which rewrites the modules of packages that bring it plugins, gives runpy no code.
    monkeypatch.setattr(
        sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, AssertionRewritingHook)]
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # runpy's: it is imported already
        try:
            runpy.run_module(form[0], run_name="__main__", alter_sys=True)  # as python -m does
        except SystemExit as ended:
            assert not ended.code
    assert capsys.readouterr().out.startswith("| variant | all |")


# -- kernels -----------------------------------------------------------------------------------------------------------


def on_the_host(monkeypatch, *chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if chosen:
        monkeypatch.setattr(kernels, "sources", lambda quick, only="": [*chosen])


def source(**changes):
    """One that is right, but for the changes."""

    def make(setup):
        x = setup.activation(3, 8)
        yield replace(Problem("twice", "3x8", lambda x: x * 2, lambda x: x + x, (x,), (96, 96)), **changes)

    return Source("twice", make)


def test_kernels_want_a_device(monkeypatch, capsys):
    on_the_host(monkeypatch)
    with pytest.raises(SystemExit) as raised:
        kernels.main(["--quick"])
    assert raised.value.code == 2 and "error: needs a CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit) as raised:
        kernels.main(["--check", "--only", "nothing such"])
    assert raised.value.code == 2 and "names none of: cross_entropy, " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "chosen", "count"),
    [("bfloat16", PROBLEMS, 2 * len(PROBLEMS) - 2), ("float16", PROBLEMS[:1], 2)],
    ids=["bfloat16", "float16"],
)
def test_every_kernel_runs_and_is_right(monkeypatch, capsys, tmp_path, dtype, chosen, count):
    on_the_host(monkeypatch, *chosen)
    assert kernels.main(["--check", "--dtype", dtype, "--output", str(tmp_path)]) == 0
    assert f"{count} rows ran" in capsys.readouterr().out
    (path,) = tmp_path.glob(f"kernels-check-CPU-{dtype}-*.json")
    found = json.loads(path.read_text())
    assert {"device", "torch", "triton", "cuda", "python", "fxprec", "revision", "date"} == found["machine"].keys()
    for row in found["rows"]:
        assert {"ours", "eager", "compile", "ours again"} <= row["microseconds"].keys()
        assert row["bytes"] is None or row["bytes"] > 0
        assert row["kernel"].startswith("linear") == (row["bytes"] is None)
    table = path.with_suffix(".md").read_text()
    assert f"| {' | '.join(COLUMNS)} |" in table and table.count("\n| ") == len(found["rows"]) + 2


@pytest.mark.zoo
@pytest.mark.slow
def test_regions_of_four_models_run(monkeypatch, capsys):
    pytest.importorskip("transformers")
    on_the_host(monkeypatch)
    assert kernels.main(["--check", "--only", "regions of"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{model}: fused_" in shown for model in ("GPT-2 small", "BERT-base", "Llama 1B", "ViT-B/16"))


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_of_triton(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--check", "--only", "max_pool2d"]) == 0
    assert "4 rows ran;" in capsys.readouterr().out


def test_the_quick_ones_are_ten_rows(monkeypatch):
    quick = kernels.sources(True)
    assert [each.quick for each in quick] == [True] * 5
    assert kernels.sources(False)[: len(quick) - 1] == quick[:-1]  # first, where time runs out
    setup = Setup(torch.device("cpu"), torch.bfloat16, tiny=True)
    assert all(not problem.together for each in quick[:-1] for problem in each.make(setup))


def test_what_is_wrong_or_fails_is_said_and_the_rest_runs(monkeypatch, capsys):
    def refuse(x):
        raise RuntimeError("no such kernel")

    odd = [source(ours=lambda x: x * 2.1), source(ours=lambda x: x.detach() * 2), source(ours=refuse)]
    on_the_host(monkeypatch, *odd, source(compared=False, ours=lambda x: x * 3), source())
    monkeypatch.setenv("COLUMNS", "250")
    assert kernels.main(["--check"]) == 1
    captured = capsys.readouterr()
    for text in ("wrong: result 0 is off by", "wrong: a gradient is missing", "failed: RuntimeError: no such kernel"):
        assert text in captured.out
    assert "9 rows ran; 5 wrong or failed" in captured.out and "no such kernel" in captured.err


def test_nan_is_wrong():
    setup = Setup(torch.device("cpu"), torch.bfloat16, tiny=True)
    (problem,) = source(ours=lambda x: x * float("nan")).make(setup)
    assert kernels.check(problem, setup).startswith("wrong: result 0 is off by nan")


def test_a_time_limit_names_what_is_left_out(monkeypatch, capsys):
    on_the_host(monkeypatch, source(), source())
    assert kernels.main(["--check", "--budget", "1e-9"]) == 1
    assert "0 rows ran; no time for twice, twice" in capsys.readouterr().out


def series(median, **more):
    return Series(median, median, median, 1.0, 20, **more)


def row(ours=100.0, again=101.0, compiled=120.0, moved: int | None = 400_000_000, copied=4.5e12):
    times = {"ours": ours, "ours again": again, "eager": 300.0, "compile": compiled, "copy": 95.0}
    found = {name: series(time, memory=200 if name == "eager" else 50) for name, time in times.items()}
    return Row("k", "8x8", "forward", moved, copied, found)


def test_the_figures_of_a_row():
    assert row().cells() == (
        "k", "8x8", "forward", "100.0", "4000", "89 %", "95 %", "3.00", "1.20", "0.25", "1 %", "pass"
    )  # fmt: skip
    assert row(copied=4.8e12).goal == "misses bandwidth"
    assert row(compiled=97.0).goal == "misses compile"
    assert row(compiled=97.0, again=104.0).goal == "pass"  # within the noise
    assert row(compiled=99.0).goal == "pass"
    assert row(copied=5e12, compiled=50.0).goal == "misses bandwidth and compile"
    assert row(moved=None).goal == "pass" and row(moved=None).cells()[4:6] == ("", "")
    assert replace(row(), trouble="wrong: 7").goal == "wrong: 7"


def test_the_report_of_several_rows(tmp_path):
    machine = {"device": "NVIDIA H200", "torch": "2", "triton": "3", "date": "2026-01-02T03"}
    report = Report(machine, "float16", 4.5e12, tmp_path, quick=True)
    report.add(row())
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        f"kernels-quick-NVIDIA_H200-float16-2026_01_02.{kind}" for kind in ("json", "md")
    ]  # at each row
    report.add(row(copied=5e12))
    assert report.headline == "1 of 2 rows pass, median 89 % of the copy's bandwidth" and not report.failed


def test_series_and_host_clock():
    found = Series.of([5.0, 1.0, 2.0, 4.0, 3.0, 100.0], [2.0, 1.0, 9.0])
    assert (found.median, found.p20, found.p80, found.host, found.runs) == (3.5, 2.0, 5.0, 2.0, 6)
    ran = []
    works = {"a": Work(ran.append, lambda: "state of a"), "b": Work(ran.append)}
    assert HostClock().measure(works, 1.0).keys() == {"a", "b"} and ran == ["state of a", None]


class Event:
    """A CUDA event on a device whose clock the test sets."""

    now = 0.0

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.at = None

    def record(self):
        self.at = Event.now

    def synchronize(self):
        assert self.at is not None

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.fixture
def device_clock(monkeypatch):
    """A DeviceClock of a device that is not there: 1000 cycles a microsecond, 1 GB allocated."""
    log = []

    def sleep(cycles):
        Event.now += cycles / 1e6
        log.append(("sleep", cycles))

    fakes = {
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1 << 10),
        "Event": Event, "_sleep": sleep, "synchronize": lambda: None, "memory_allocated": lambda: 1 << 30,
        "reset_peak_memory_stats": lambda: None, "max_memory_allocated": lambda: (1 << 30) + 77,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(timing, "_WARM_SECONDS", 0.0)
    clock = DeviceClock(torch.device("cpu"))
    assert clock._flush.nbytes >= 1 << 28 and clock._cycles == pytest.approx(1000.0)
    monkeypatch.setattr(clock, "_flush", SimpleNamespace(zero_=lambda: log.append(("flush", 0))))
    log.clear()
    return clock, log


def test_the_device_clock(device_clock):
    clock, log = device_clock

    def work(name, milliseconds):
        def run(state):
            log.append((name, state))
            Event.now += milliseconds

        def prepare():
            log.append(("prepare", name))
            Event.now += 50.0  # is not timed
            return name.upper()

        return Work(run, prepare)

    found = clock.measure({"a": work("a", 0.2), "b": work("b", 0.1)}, seconds=1e-6)
    assert {name: round(each.median, 3) for name, each in found.items()} == {"a": 200.0, "b": 100.0}
    assert {each.runs for each in found.values()} == {20} and {each.memory for each in found.values()} == {77}
    ran = [entry for entry in log if entry[0] in ("a", "b")][-40:]
    assert ran[:4] == [("a", "A"), ("b", "B"), ("b", "B"), ("a", "A")]  # in turns, another first each time
    kinds = [kind for kind, _ in log[-8:]]
    assert kinds == ["prepare", "flush", "sleep", "b", "prepare", "flush", "sleep", "a"]
    assert all(cycles >= 10_000 for kind, cycles in log[-8:] if kind == "sleep")  # the device waits for the host


def test_backward_runs_are_of_a_forward_each():
    forwards = []

    def function(x: Tensor) -> Tensor:
        forwards.append(None)
        return (x * x).sum()

    x = torch.tensor([3.0], requires_grad=True)
    work = kernels._work(function, (x,), "backward")
    for count in (1, 2):
        outputs = work.prepare()
        (gradient,) = work.run(outputs)
        assert gradient.item() == 6.0 and len(forwards) == count and not outputs
