"""``python -m benchmarks step``: its report, its files and figure, and what it says of variants that fail."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import fxprec
from benchmarks import step
from benchmarks.measure.interleaved import Samples, Schedule, host_times
from benchmarks.measure.training_step import Setup, Step
from benchmarks.measure.variants import BASELINE, VARIANTS, Variant
from benchmarks.reports.step import Comparison, Row, draw, found_before
from benchmarks.workloads.training import workloads

CPU = torch.device("cpu")
MLP = workloads("tiny", ["mlp"])[0]
ONE_STEP = step.Plan(Schedule(warm_up=2, rounds=1, steps=1, settle=0), host_times, None)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# -- the report --------------------------------------------------------------------------------------------------------


def times(*medians):
    """A round for each."""
    return Samples(tuple((m, m, 2.0 * m) for m in medians))


def comparison(**rows):
    found = Comparison(MLP, Setup(CPU), Schedule(2, 3, 3, 0), "AMD-EPYC-2-threads")
    for name, samples in rows.items():
        name = name.replace("_", " ").replace("0", "-")
        found.rows.append(Row(name, f"what {name} is", samples=samples, first=1.5, losses=[2.0, 1.0], casts=7))
    return found


def report(found, width=250):
    console = Console(width=width, record=True, file=io.StringIO())
    found.show(console)
    return console.export_text()


def test_the_report_of_a_comparison():
    steady = dict(autocast=times(10, 10, 10), autocast_again=times(10.5, 10, 9.9), compile=times(20, 20, 20))
    found = comparison(**steady, fp32=times(30, 30, 30), o1=times(9.9, 9.9, 9.9), o10own=times(5, 5, 5))
    found.rows.append(Row("o1-pays", "pays", trouble="refused: ConversionError: no [cost] model"))
    text = report(found)
    assert "2.00 faster" in text and "1.01 =" in text and "0.33 slower" in text and "4.00 faster" in text
    assert "o1-pays: refused: ConversionError: no [cost] model" in text
    assert "loss after 2 steps 2.0000" in text and "'=' is within it" in text
    data = found.as_dict()
    assert data["noise"] == found.noise > 0.01
    own = data["variants"]["o1-own"]
    assert own["ratio"]["compile"] == {"value": 4.0, "fastest": 4.0, "verdict": "faster"}
    assert own["samples_ms"] == [[5.0, 5.0, 10.0]] * 3 and own["median_ms"] == 5.0 and own["mfu"] is None
    assert own["tflops"] == pytest.approx(MLP.flops() / 5e-3 / 1e12)
    assert data["variants"]["o1"]["ratio"]["autocast"]["verdict"] == "="
    assert data["variants"]["o1-pays"] == {"what": "pays", "trouble": "refused: ConversionError: no [cost] model"}
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_the_share_of_the_peak():
    found = comparison(autocast=times(10, 10, 10))
    found.setup = Setup(torch.device("cuda"))
    found.device_name = "NVIDIA-H200"
    (row,) = found.rows
    assert found.mfu(row) == pytest.approx(MLP.flops() / 10e-3 / 989.4e12)
    found.device_name = "NVIDIA-T4"
    assert found.mfu(row) is None


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_comparison_is_written_and_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    names = ["fp32", "o1", "o1-own", "fp32-tf32"]
    assert step.main(["--check", "--only", "mlp", "gpt", "--variants", *names, "--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "2 comparisons; 0 variants failed" in shown and "fp32-tf32: not here: TF32 is of NVIDIA's" in shown
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-tiny-bfloat16-gpt.json", "step-tiny-bfloat16-mlp.json", "step-tiny-bfloat16.png",
    ]  # fmt: skip
    data = found_before("tiny", "bfloat16", folder.name, tmp_path)["gpt"]
    assert {"device", "torch", "commit", "date"} <= data["environment"].keys()
    rows = data["variants"]
    assert [*rows] == ["fp32", "fp32-tf32", "autocast", "autocast again", "o1", "o1 again", "o1-own"]
    timed = {name: row for name, row in rows.items() if not row["trouble"]}
    assert len(timed) == 6 and all(len(row["samples_ms"]) == 1 for row in timed.values())
    assert [row["loss"][1] for row in timed.values()] == pytest.approx([rows["fp32"]["loss"][1]] * 6, rel=1e-3)
    assert rows["autocast"]["casts"] > rows["o1"]["casts"] > rows["fp32"]["casts"] == 0


def test_the_figure_has_a_panel_a_model_and_the_noise():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    found = comparison(autocast=times(10, 10, 10), autocast_again=times(11, 11, 11), o1=times(5, 5, 5)).as_dict()
    found["environment"] = {"device": "a device"}
    draw(figure, {"mlp": found, "gpt": found | {"noise": None}})
    assert [panel.get_title() for panel in figure.axes] == ["mlp: 3 x 16, batch 4", "gpt: 3 x 16, batch 4"]
    assert [bar.get_width() for bar in figure.axes[0].containers[0]] == [2.0]
    assert [len(panel.patches) for panel in figure.axes] == [2, 1]  # the bar, and the band


def failing(error):
    def build(workload, setup):
        raise error

    return build


@pytest.mark.slow
def test_a_variant_that_fails_is_a_row_and_the_rest_runs(capsys):
    refusing = Variant(
        "o1-pays", "x", failing(fxprec.ConversionError("no model\nof costs")), refuses=(fxprec.ConversionError,)
    )
    failed = Variant("o1-whole", "x", failing(RuntimeError("no such kernel\nat all")))
    found = step.compare(MLP, [VARIANTS[BASELINE], refusing, failed], Setup(CPU), ONE_STEP)
    assert {row.name: row.trouble for row in found.rows} == {
        "autocast": "", "autocast again": "", "o1-pays": "refused: ConversionError: no model",
        "o1-whole": "failed: RuntimeError: no such kernel",
    }  # fmt: skip
    assert [row.failed for row in found.rows] == [False, False, False, True]
    assert found.samples().keys() == {"autocast", "autocast again"}
    assert "no such kernel" in capsys.readouterr().err


@pytest.mark.slow
def test_the_status_says_what_failed(monkeypatch, capsys):
    monkeypatch.setitem(VARIANTS, "o1", replace(VARIANTS["o1"], build=failing(RuntimeError("no such kernel"))))
    assert step.main(["--check", "--only", "mlp", "--variants", "o1"]) == 1
    assert "1 comparisons; 2 variants failed" in capsys.readouterr().out  # o1 is built twice
    monkeypatch.setitem(VARIANTS, "o1", replace(VARIANTS["o1"], refuses=(RuntimeError,)))
    assert step.main(["--check", "--only", "mlp", "--variants", "o1"]) == 0


@pytest.mark.slow
def test_a_loss_that_is_not_finite_fails(capsys):
    def build(workload, setup):
        made = VARIANTS[BASELINE].build(workload, setup)
        return replace(made, train=lambda *batch: torch.tensor(float("nan")))

    found = step.compare(MLP, [VARIANTS[BASELINE], Variant("o1-low", "x", build)], Setup(CPU), ONE_STEP)
    assert found.rows[-1].trouble == "failed: the loss is nan after 2 steps"


def test_a_time_limit_names_what_is_left_out(capsys):
    assert step.main(["--check", "--only", "mlp", "gpt", "--budget", "1e-9"]) == 1
    assert "no time for mlp (tiny, bfloat16), gpt (tiny, bfloat16)" in capsys.readouterr().out.replace("\n", " ")


def test_partial_runs_write_only_where_they_are_told(monkeypatch, capsys, tmp_path):
    saved = []
    monkeypatch.setattr(step, "_write", lambda comparison, output: saved.append(output))
    monkeypatch.setattr(step, "compare", lambda *_: comparison(autocast=times(1, 1, 1)))
    for options, written in (
        ([], [None] * 17), (["--only", "gpt"], [None] * 2), (["--quick"], []), (["--variants", "o1"], []),
        (["--check"], []), (["--quick", "--output", str(tmp_path)], [tmp_path] * 6),
    ):  # fmt: skip
        saved.clear()
        step.main(options)
        assert saved == written
        assert ("nothing is written" in capsys.readouterr().out) == (not written)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "gtp"], "no model 'gtp'; did you mean gpt?"),
        (["--variants", "o1-onw"], "no variant 'o1-onw'; did you mean o1-own?"),
        (["--size", "huge"], "invalid choice: 'huge'"),
        (["--size", "gpu", "--only", "gpt-50k"], "no gpt-50k of size gpu"),
    ],
)
def test_unknown_names_are_errors(capsys, options, message):
    with pytest.raises(SystemExit) as raised:
        step.main(options)
    assert raised.value.code == 2 and message in capsys.readouterr().err


def test_what_a_cpu_compiles():
    resnet, setup = workloads("tiny", ["resnet50"])[0], Setup(CPU)
    plan = replace(ONE_STEP, compile_all=False)
    assert "--compile-all" in plan.unserved(VARIANTS["compile"], resnet, setup)
    assert "--compile-all" in plan.unserved(VARIANTS["o1-inductor"], resnet, setup)
    assert not plan.unserved(VARIANTS["compile"], MLP, setup) and not plan.unserved(VARIANTS["o1"], resnet, setup)
    assert not ONE_STEP.unserved(VARIANTS["compile"], resnet, setup)
    assert not plan.unserved(VARIANTS["compile"], resnet, Setup(torch.device("cuda")))


def watched(variant, made: list[Step]):
    """The variant, whose steps are remembered."""

    def build(workload, setup):
        made.append(variant.build(workload, setup))
        return made[-1]

    return replace(variant, build=build, counted=False)


@pytest.mark.slow
def test_all_have_done_the_same_steps():
    made: list[Step] = []
    plan = replace(ONE_STEP, schedule=Schedule(warm_up=3, rounds=2, steps=2, settle=1))
    found = step.compare(MLP, [watched(VARIANTS[name], made) for name in (BASELINE, "o1-own")], Setup(CPU), plan)
    assert [each.done for each in made[:2]] == [plan.schedule.total + 1, plan.schedule.total]  # counted after, once
    assert {len(row.losses) for row in found.rows} == {2}
    assert all(row.first is not None and 0 < row.first < 60 for row in found.rows)


@pytest.mark.slow
def test_builds_are_new_models_in_another_order_and_their_rounds_are_pooled():
    made: list[Step] = []
    plan = replace(ONE_STEP, schedule=Schedule(warm_up=1, rounds=4, steps=1, settle=0), builds=3, twice=())
    chosen = [watched(VARIANTS[name], made) for name in (BASELINE, "o1", "o1-own")]
    found = step.compare(MLP, chosen, Setup(CPU), plan)
    ours = [isinstance(each.optimizer, fxprec.optim.AdamW) for each in made]
    assert ours == [False, False, True, False, False, True, True, False, False]  # as ``order`` has them
    assert len({id(each) for each in made}) == 9
    assert all(param.grad is None for each in made[3:] for param in each.model.parameters())  # not counted after
    assert [len(row.samples.rounds) for row in found.rows] == [6, 6, 6]  # two of each build
    assert {len(row.losses) for row in found.rows} == {2} and "built 3 times" in report(found)
    assert found.as_dict()["builds"] == 3 and found.schedule.rounds == 6


@pytest.mark.slow
def test_a_variant_that_fails_when_it_is_built_again_has_no_figures():
    made: list[Step] = []

    def build(workload, setup):
        if made:
            raise OSError("no memory")
        made.append(VARIANTS["o1"].build(workload, setup))
        return made[0]

    plan = replace(ONE_STEP, builds=2, twice=())
    [base, again] = step.compare(MLP, [VARIANTS[BASELINE], Variant("o1", "x", build)], Setup(CPU), plan).rows
    assert len(base.samples.rounds) == 2 and again.samples is None and again.failed and "no memory" in again.trouble


def test_kernels_are_counted_without_copies(monkeypatch):
    class Profiler:
        def __init__(self, activities):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def events(self):
            named = [("CUDA", "ampere_gemm"), ("CUDA", "Memcpy DtoD"), ("CUDA", "Memset"), ("CPU", "cudaLaunchKernel")]
            return [SimpleNamespace(device_type=SimpleNamespace(name=kind), name=name) for kind, name in named]

    monkeypatch.setattr(step, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    made = VARIANTS["fp32"].build(MLP, Setup(CPU))
    assert step._kernels(made) == 1 and made.done == 1
