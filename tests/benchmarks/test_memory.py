"""``benchmarks.memory``: the counter on known allocations, categories that add up, budgets, the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import memory
from benchmarks.measure import peak
from benchmarks.measure.peak import HostMeter, Marks, Peak, Segment, graph_pools, meter, peak_of, watched
from benchmarks.measure.training_step import Setup
from benchmarks.measure.variants import VARIANTS
from benchmarks.reports import memory as memory_report
from benchmarks.reports.memory import CATEGORIES, Row, ratio, verdicts
from benchmarks.workloads.training import workloads

CPU = torch.device("cpu")
SETUP = Setup(CPU, clip=1.0)
KB = 1024


def floats(kilobytes: int) -> torch.Tensor:
    return torch.empty(kilobytes * KB // 4)


# -- the counter ------------------------------------------------------------------------------------------------------


def test_known_allocations():
    """10 live, 10 + 30, then 30 freed: the peak is 40 although 50 were allocated."""

    def step():
        kept = floats(10)
        floats(30)
        return kept, floats(10)

    [segment] = HostMeter().measure(step, Marks())
    assert (segment.end, segment.peak) == ("end", 40 * KB)


def test_a_step_whose_peak_is_known():
    """One linear map without bias: 256 x 64 inputs, 64 x 64 weight."""
    model = nn.Linear(64, 64, bias=False)
    x = torch.randn(256, 64)

    def step():
        model(x).pow(2).sum().backward()

    step()
    model.zero_grad()
    with watched(model) as marks:
        segments = HostMeter().measure(step, marks)
    assert [segment.end for segment in segments] == ["backward", "gradient", "update", "end"]
    forward, gradient, update, end = segments
    output = 256 * 64 * 4
    assert output < forward.live < output + KB  # the linear's, kept by pow; pow's own is gone after the sum
    assert 2 * output <= forward.peak < 2 * output + KB
    assert gradient.gradient == 64 * 64 * 4
    assert update.live == 64 * 64 * 4 or update.live - 64 * 64 * 4 < KB
    assert end.peak == update.live < forward.peak  # each segment has a peak of its own
    found = peak_of(segments)
    assert found.kept == forward.live and found.bytes >= 2 * output


def test_the_meter_lets_go_of_the_marks_and_of_backward(monkeypatch):
    model = nn.Linear(2, 2)
    before = torch.Tensor.backward
    with watched(model) as marks:
        with pytest.raises(ZeroDivisionError):
            HostMeter().measure(lambda: 1 / 0, marks)
        monkeypatch.setattr(peak, "record_function", lambda _: 1 / 0)
        model(torch.randn(1, 2)).sum().backward()  # marks nothing, and works
    assert torch.Tensor.backward is before
    assert not model.weight._post_accumulate_grad_hooks


def test_phases():
    """Each peak is in the phase in which its segment ends; gradients are those from before it."""
    forward = Segment("backward", 0, 100, 60)
    first, second = Segment("gradient", 10, 90, 50), Segment("gradient", 20, 80, 40)
    update, end = Segment("update", 0, 40, 30), Segment("end", 0, 35, 30)
    assert peak_of([forward, first, second, update, end]) == Peak(100, "forward", 0, 60)
    assert peak_of([forward, first, replace(second, peak=120), update, end]) == Peak(120, "backward", 10, 60)
    assert peak_of([forward, first, second, update, replace(end, peak=130)]) == Peak(130, "update", 30, 60)
    assert peak_of([Segment("end", 0, 7, 7)]) == Peak(7, "forward", 0, 0)


def test_a_cpu_has_no_graphs():
    assert graph_pools(CPU) == 0
    assert isinstance(meter(CPU), HostMeter)


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> dict[str, Row]:
    [mlp] = workloads("launch", ["mlp"])
    names = ("fp32", "autocast", "bfloat16", "o1", "o1-own", "o1-low")
    return {name: memory.measure(mlp, VARIANTS[name], SETUP) for name in names}


def test_categories_are_what_they_are_called(measured):
    """Three linears of 256 with biases: n parameters, AdamW's two moments."""
    [mlp] = workloads("launch", ["mlp"])
    n = mlp.parameters()
    for name, row in measured.items():
        width = 2 if name == "bfloat16" else 4
        assert row.weights == width * n
        assert abs(row.optimizer - 2 * width * n) < KB  # and a step count each
        assert (row.shadows > 0) == name.startswith("o1")
        assert row.gradients <= width * n and row.activations > 0
        assert row.peak == sum(getattr(row, each) for each in CATEGORIES)
        assert row.step == row.peak - row.weights - row.optimizer
    assert measured["o1"].shadows == 2 * n
    assert measured["o1-low"].gradients <= 2 * n
    assert measured["autocast"].kept > measured["o1"].kept  # which has its low weights from before


def test_a_peak_is_gradients_and_the_rest(monkeypatch):
    """Of 100 bytes at the peak 30 are gradients; a CUDA graph's memory is among the rest."""
    segments = [Segment("backward", 0, 60, 50), Segment("gradient", 30, 80, 70), Segment("end", 0, 100, 30)]
    monkeypatch.setattr(HostMeter, "measure", lambda *_: segments)
    [mlp] = workloads("tiny", ["mlp"])
    found = memory.measure(mlp, VARIANTS["fp32"], SETUP)
    assert (found.gradients, found.activations, found.kept, found.phase) == (30, 70, 50, "backward")
    monkeypatch.setattr(memory, "graph_pools", lambda _: 1000)
    captured = memory.measure(mlp, VARIANTS["fp32"], SETUP)
    assert captured.activations == 1070
    assert captured.gradients == 30 + 4 * mlp.parameters()  # not freed before: the graph writes to them


def test_nothing_that_is_held_is_forgotten(measured):
    """What building and training leave allocated is what the categories name, and the data."""
    [mlp] = workloads("launch", ["mlp"])
    kept = []

    def build():
        step = VARIANTS["o1-own"].build(mlp, SETUP)
        step()
        step.optimizer.zero_grad()
        kept.append(step)

    build()
    kept.clear()
    [segment] = HostMeter().measure(build, Marks())
    row = measured["o1-own"]
    data = sum(x.nbytes for batch in kept[0].batches for x in batch)
    named = row.weights + row.optimizer + row.shadows + data
    assert abs(segment.live - named) < 16 * KB < 0.02 * named


def test_measuring_twice_gives_the_same(measured):
    [mlp] = workloads("launch", ["mlp"])
    assert memory.measure(mlp, VARIANTS["autocast"], SETUP) == measured["autocast"]


def test_a_chunked_loss_is_the_same_loss():
    [gpt] = workloads("tiny", ["gpt"])
    chunked = memory.chunked(gpt, torch.float32)
    batch = gpt.batches(1, CPU)[0]
    torch.manual_seed(0)
    expected = gpt.loss(gpt.make()(*batch[:-1]), batch[-1])
    torch.manual_seed(0)
    model = chunked.make()
    torch.testing.assert_close(chunked.loss(model(*batch[:-1]), batch[-1]), expected)
    [mlp] = workloads("tiny", ["mlp"])
    with pytest.raises(ValueError, match="mlp has no head over a vocabulary; gpt, gpt-50k, llama, bert have one"):
        memory.chunked(mlp, torch.float32)


def test_what_is_left_out_says_why():
    [mlp] = workloads("tiny", ["mlp"])
    left_out: dict[str, str] = {}
    refuses = replace(VARIANTS["o1"], name="refuses", build=lambda *_: 1 / 0, refuses=(ZeroDivisionError,))
    asked = [*memory.chosen(["compile-graphs", "o1-chunked"]), refuses]
    rows = memory.rows_of(mlp, asked, SETUP, left_out)
    assert [row.variant for row in rows] == ["autocast"]
    assert left_out.keys() == {"mlp, compile-graphs", "mlp, refuses"}
    assert left_out["mlp, refuses"] == "ZeroDivisionError: division by zero"
    [vit] = workloads("tiny", ["vit"])
    assert not memory.rows_of(vit, [VARIANTS["compile"]], SETUP, left_out, compile_all=False)
    assert "--compile-all" in left_out["vit, compile"]


# -- ratios and budgets -----------------------------------------------------------------------------------------------


def row(variant: str, shadows: int, workload: str = "gpt") -> Row:
    return Row(workload, "", variant, 40, 80, shadows, 0, 80, "backward", 0)


def test_ratios_are_to_eager_autocast_of_the_same_model():
    rows = [row("autocast", 0), row("o1", 20), row("autocast", 200, "mlp")]
    assert ratio(rows[1], rows) == 220 / 200
    assert ratio(rows[1], rows, lambda each: each.step) == 100 / 80
    assert ratio(rows[1], rows[1:]) is None
    assert rows[1].as_dict(rows)["ratio"] == 1.1


def test_verdicts_on_the_budget():
    rows = [row("autocast", 0), row("o1", -40), row("o2", -39), row("fp32", -50), row("o1", -50, "mlp")]
    assert verdicts(rows, "cpu") == [
        "gpt, o1: 0.80 x autocast, budget 0.8: met",
        "gpt, o2: 0.81 x autocast, budget 0.8: missed",
    ]
    assert all(line.endswith("missed") for line in verdicts(rows, "cuda"))


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    arguments = ["--size", "tiny", "--only", "mlp", "gpt", "--variants", "o1", "o1-chunked"]
    assert memory.main([*arguments, "--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "gpt, o1-chunked:" in shown and "missed" in shown
    [path] = tmp_path.glob("*/memory-tiny-bfloat16.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    pairs = [(each["workload"], each["variant"]) for each in found["rows"]]
    assert pairs == [("mlp", "autocast"), ("mlp", "o1"), ("gpt", "autocast"), ("gpt", "o1"), ("gpt", "o1-chunked")]
    assert all(each["peak"] == sum(each[name] for name in CATEGORIES) for each in found["rows"])


def test_a_run_of_some_of_it_writes_nothing(tmp_path, monkeypatch, capsys):
    def no_file(*_, **__):
        raise AssertionError("written")

    monkeypatch.setattr(memory, "save", no_file)
    monkeypatch.setattr(memory, "save_figure", no_file)
    assert memory.main(["--size", "tiny", "--only", "mlp", "--variants", "fp32"]) == 0
    assert "wants --output FOLDER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "gtp"], "no model 'gtp'; did you mean gpt?"),
        (["--variants", "o1-chunk"], "no variant 'o1-chunk'; did you mean o1-chunked?"),
        (["--size", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_unknown_names(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        memory.main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_the_figure(measured):
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure()
    memory_report.draw(figure, [*measured.values()])
    [panel] = figure.axes
    ends = {round(bar.get_x() + bar.get_width(), 6) for bar in panel.patches}
    assert {round(each.peak / 1e6, 6) for each in measured.values()} <= ends


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_known_allocations_on_a_device():
    device = torch.device("cuda")
    model = nn.Linear(1024, 1024, bias=False, device=device)  # 4 MiB
    x = torch.randn(2048, 1024, device=device)

    def step():
        model(x).pow(2).sum().backward()

    step()
    model.zero_grad()
    with watched(model) as marks:
        segments = meter(device).measure(step, marks)
    assert [segment.end for segment in segments] == ["backward", "gradient", "update", "end"]
    found, output, weight = peak_of(segments), 8 << 20, 4 << 20
    assert output <= found.kept < output + weight and found.bytes >= 2 * output
    assert segments[1].gradient == weight == segments[-1].live
