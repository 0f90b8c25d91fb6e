"""``benchmarks.tables``: tables from results, markers, and whether the pages of this checkout are up to date."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import tables
from benchmarks.measure.results import ResultsError, save
from benchmarks.tables import rendered

ENVIRONMENT = {
    "device": "Some-CPU-2-threads", "torch": "2.13.0", "triton": "none", "cuda": "none", "python": "3.11.7",
    "fxprec": "0.1.0", "instructions": "AVX512", "threads": 2, "commit": "abc123", "date": "2026-01-02T03:04:05+00:00",
}  # fmt: skip
MEASURED = "Some-CPU-2-threads; torch 2.13.0, triton none, Python 3.11.7; 2026-01-02, commit abc123."


def ratio(value: float, verdict: str) -> dict[str, object]:
    return {"autocast": {"value": value, "fastest": value, "verdict": verdict}}


def step(model: str, noise: float, variants: dict[str, object], **environment: str) -> dict[str, object]:
    return {
        "environment": ENVIRONMENT | environment, "model": model, "shape": f"{model}'s", "noise": noise,
        "variants": {"autocast": {"median_ms": 12.345, "ratio": {}}, **variants},
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: pathlib.Path) -> pathlib.Path:
    root = tmp_path / "results"
    o1 = {"median_ms": 10.0, "ratio": ratio(1.234, "faster")}
    failed = {"what": "", "trouble": "refused"}
    save("step-cpu-bfloat16-mlp", step("mlp", 0.02, {"o1": o1, "o1-own": {"ratio": ratio(1.019, "=")}}), root)
    gpt = step("gpt", 0.03, {"o1": {"ratio": ratio(0.9, "slower")}, "o1-own": failed}, commit="def456")
    save("step-cpu-bfloat16-gpt", gpt, root)
    rows = [
        {"workload": "gpt", "shape": "small", "variant": name, "peak": peak, "ratio": peak / 2e8, "step_ratio": over}
        for name, peak, over in (("autocast", 200_000_000, 1.0), ("o1", 160_000_000, 0.7))
    ]
    save("memory-cpu-bfloat16", {"environment": ENVIRONMENT, "rows": rows}, root)
    spread = {"mean": 0.5, "range": 0.25}
    variants = {
        "fp32": {"what": "FP32", "epoch_s": 2.0, "loss": spread, "accuracy": spread},
        "o1": {
            "what": "fxprec O1", "epoch_s": 1.0, "ratio": {"value": 1.9, "verdict": "faster"},
            "loss": spread | {"verdict": "equal"}, "accuracy": spread | {"verdict": "worse"},
        },
    }  # fmt: skip
    accuracy = {
        "environment": ENVIRONMENT,
        "shape": "CNN",
        "seeds": 3,
        "epochs": 8,
        "noise": 0.01,
        "variants": variants,
    }
    base = {"median_ms": 12.345}
    frozen = [{"ratio": ratio(value, verdict), "prepare_s": 0.5} for value, verdict in ((4.0, "faster"), (1.01, "="))]
    batches = [
        {"batch": size, "noise": 0.02, "variants": {"autocast": base, "frozen": each}}
        for size, each in zip((1, 16), frozen, strict=True)
    ]
    inference = {"environment": ENVIRONMENT, "model": "mlp", "shape": "mlp's", "batches": batches}
    save("inference-cpu-mlp", inference, root)
    save("accuracy-bfloat16-digits", accuracy, root)
    stacks = [
        {
            "blocks": 12,
            "nodes": 134,
            "seconds": {"convert": [0.5, 0.25], "torch.compile": [30.0]},
            "over_capture": {"convert": 2.5},
        },
        {"blocks": 50, "nodes": 552, "seconds": {"convert": [1.0]}, "over_capture": {"convert": None}},
    ]
    budgets = [
        {"what": "fuse", "value": 123.4, "limit": 300.0, "unit": " ms", "met": True},
        {"what": "x", "value": 4.4, "limit": 1.2, "unit": " x", "met": False},
    ]
    save("convert", {"environment": ENVIRONMENT, "limit_s": 60.0, "stacks": stacks, "budgets": budgets}, root)
    cost = {"own_times": 3.14, "times": 9.5, "memory": 1.25, "own_memory": 3.75}
    summed = {
        "measured": 1e-4, "residual": -2e-20, "adds_up": True, "bend": 0.0123, "first": "linear_1", "cost": cost
    }  # fmt: skip
    wrong = summed | {"residual": 1e-9, "adds_up": False, "cost": None, "first": "other"}
    save("ledger-adds-up-mlp", {"environment": ENVIRONMENT, "model": "mlp", "sums": [summed, summed]}, root)
    save("ledger-adds-up-loop", {"environment": ENVIRONMENT, "model": "loop", "sums": [wrong, summed]}, root)
    found = {"due": 4, "found": 3, "first": 5, "median_elsewhere": 2.5, "by_run": [6, 5], "by_float64": [7, 6]}
    save("ledger-planted-gpt", {"environment": ENVIRONMENT, "model": "gpt", "places": [{}] * 9, **found}, root)
    figures = {
        "samples": 512, "predicted": 1e-4, "measured": 1.2e-4, "low": 1.1e-4, "high": 1.3e-4, "inside": False,
        "off_diagonal": 0.5, "explained": 1.22e-4, "ratio_low": 0.9, "ratio_high": 1.1, "accounted_for": True,
    }  # fmt: skip
    for name, value, verdict in (("gpt", 1.0021, "="), ("cnn", 1.0816, "slower")):
        slower = {"value": value, "error": 0.0123, "verdict": verdict}
        watched = {
            "model": name, "shape": f"{name}'s", "plain_ms": 1201.4, "ratio": slower, "noise": 0.0341,
            "ops": {"amax": 1, "stack": 3}, "reads": {"sum": 2, "amax": 1},
        }  # fmt: skip
        save(f"watch-cpu-O0-{name}", {"environment": ENVIRONMENT, "level": "O0", **watched}, root)
    save("ledger-variances-vit", {"environment": ENVIRONMENT, "model": "vit", **figures}, root)
    stepped = {"what": "", "ms": 1201.4, "host_ms": 30.54, "busy_ms": 27.764, "launches": 978, "x_autocast": 1.0}
    variants = {"autocast": stepped, "o1": stepped | {"x_autocast": 1.136}, "o1-whole": failed}
    save(
        "hotspots-gpu-bfloat16-gpt",
        {"environment": ENVIRONMENT, "model": "gpt", "shape": "big", "variants": variants},
        root,
    )
    swept = {
        "region": "fused_add", "pass": "backward", "share": 0.4412, "best_share": 0.8527,
        "present": [93.8, 2, 1024, 8, 1, 0, 512], "best": [48.4, 1, 1024, 1, 3, 8, 1056], "forms": [[]] * 13,
    }  # fmt: skip
    data = {"model": "Llama 1B", "copy_bytes_a_second": 4.27e12, "timing": "in turns", "kernels": [swept]}
    save("forms-bfloat16-llama-1b", {"environment": ENVIRONMENT, **data}, root)
    return root


def page(*specs: str) -> str:
    return (
        "# Title\n\n" + "\ntext\n\n".join(f"<!-- table: {spec} -->\nold\n<!-- end -->\n" for spec in specs) + "\nend\n"
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def test_step(results):
    """A win is bold, what lies within the noise is no number, what has no figure is a dash; the models in order."""
    assert rendered(page("step cpu"), results)[0] == (
        "# Title\n\n<!-- table: step cpu -->\n\n"
        "| model |  | autocast, ms | O1 | O1, own optimizer |\n| --- | --- | --- | --- | --- |\n"
        "| mlp | mlp's | 12.3 | **1.23** | = |\n| gpt | gpt's | 12.3 | 0.90 | – |\n\n"  # noqa: RUF001
        "How many times as fast as eager autocast; =: within the noise (at most 3.0 %). bfloat16; "
        + MEASURED.replace("abc123", "abc123, def456")
        + "\n\n<!-- end -->\n\nend\n"
    )


def test_only_some_columns(results):
    text, _ = rendered(page("step cpu only=o1-own"), results)
    assert "| model |  | autocast, ms | O1, own optimizer |\n" in text and "| mlp | mlp's | 12.3 | = |\n" in text
    text, _ = rendered(page("inference cpu only=frozen,fp32"), results)
    assert "| model | batch | autocast, ms | frozen |\n" in text


def test_gains(results):
    """A row a device and use: geometric mean, extremes, and how many are faster, alike and slower."""
    text, _ = rendered(page("gains"), results)
    row = "| Some-CPU-2-threads | training: `convert(model)` | 1.05 | 0.90 to 1.23 | 1 / 0 / 1 | 2.13.0; 2026-01-02 |\n"
    assert row in text
    assert "| inference: `freeze(model)` | 2.01 | 1.01 to 4.00 | 1 / 1 / 0 |" in text
    with pytest.raises(ResultsError, match="no results of step or inference"):
        rendered(page("gains device=GPU"), results)


def test_a_page_of_a_device_has_its_tables(results):
    gpu = step("mlp", 0.02, {"o1": {"ratio": ratio(1.5, "faster")}}) | {"environment": ENVIRONMENT | {"device": "GPU"}}
    save("step-cpu-bfloat16-mlp", gpu, results)
    with pytest.raises(ResultsError, match="say which with device=NAME"):
        rendered(page("step cpu"), results)
    assert "| mlp | mlp's | 12.3 | **1.50** |" in rendered(page("step cpu"), results, "GPU")[0]
    assert "**1.23**" in rendered(page("step cpu device=Some-CPU-2-threads"), results, "GPU")[0]


def test_memory(results):
    text, _ = rendered(page("memory cpu bfloat16"), results)
    assert "| model |  | autocast, MB | O1 |\n" in text
    assert "| gpt | small | 200 | 0.80 (0.70) |\n" in text and MEASURED in text


def test_inference(results):
    text, _ = rendered(page("inference cpu"), results)
    assert "| model | batch | autocast, ms | frozen |\n" in text
    assert "| mlp | 1 | 12.3 | **4.00** |\n| mlp | 16 | 12.3 | = |\n" in text
    assert "geometric mean 2.01, least 1.01; ready after 0.50 s at most" in text and MEASURED in text


def test_accuracy(results):
    text, _ = rendered(page("accuracy digits"), results)
    assert "| FP32 | 2.00 | – | 0.5000 ± 0.2500 | – | 50.00 ± 25.00 | – |\n" in text  # noqa: RUF001
    assert "| fxprec O1 | 1.00 | **1.90** | 0.5000 ± 0.2500 | equal | 50.00 ± 25.00 | worse |\n" in text
    assert "CNN. Mean and half the range of 3 seeds, 8 epochs" in text and "the noise (1.0 %)" in text


def test_convert(results):
    text, count = rendered(page("convert", "convert-budgets"), results)
    assert count == 2 and text.count(MEASURED) == 2
    assert "| blocks | nodes | convert | x | torch.compile |\n" in text
    assert "| 12 | 134 | 0.25 | 2.50 | 30.00 |\n| 50 | 552 | 1.00 | – | – |\n" in text  # noqa: RUF001
    assert "| fuse | 123 ms | 300 ms | met |\n| x | 4.4 x | 1.2 x | **missed** |\n" in text


def test_ledger(results):
    text, count = rendered(page("ledger adds-up", "ledger planted", "ledger variances"), results)
    assert count == 3 and text.count(MEASURED) == 3
    assert "| mlp | 2 | 2e-16 | +1.0e-04 | 1.2 % | `linear_1` | 3.1 (9.5) | 1.2 (3.8) |\n" in text
    assert "| loop | **1 of 2** | 1e-05 | +1.0e-04 | 1.2 % | `other` | – | – |\n" in text  # noqa: RUF001
    assert "| gpt | 9 | 4 | 3 | 5 | 2.5 | 5 of 6 | 6 of 7 |\n" in text
    assert (
        "| vit | 512 | 1.00e-04 | 1.20e-04 | 1.10e-04 to 1.30e-04 | no | +50 % | 1.22e-04 | 0.90 to 1.10 | yes |"
        in text
    )


def test_watch(results):
    text, _ = rendered(page("watch cpu O0"), results)
    assert "| model |  | plain, ms | watched / plain |  | noise | more ops | of them reads |\n" in text
    assert "| gpt | gpt's | 1201 | 1.002 ± 0.012 | = | 0.034 | 4 | 1 amax, 2 sum |\n" in text
    assert "| cnn | cnn's | 1201 | 1.082 ± 0.012 | slower | 0.034 | 4 | 1 amax, 2 sum |\n" in text
    assert "O0, one thread; " + MEASURED in text


def test_hotspots(results):
    text, _ = rendered(page("hotspots gpu"), results)
    assert "| model |  | variant | ms a step | device busy, ms | host, ms | kernels | x autocast |\n" in text
    assert "| gpt | big | autocast | 1201 | 27.8 | 30.5 | 978 | – |\n" in text  # noqa: RUF001
    assert "| gpt | big | o1 | 1201 | 27.8 | 30.5 | 978 | 1.14 |\n" in text
    assert "| gpt | big | o1-whole | – | – | – | – | – |\n" in text  # noqa: RUF001
    assert "not in turns" in text and f"bfloat16; {MEASURED}" in text


def test_forms(results):
    text, _ = rendered(page("forms"), results)
    assert (
        "| Llama 1B | `fused_add` | backward | 2 x 1024, 8 warps | 44 % | 1 x 1024, 1 warp, 3 stages, 1056 programs "
        "| 85 % | 14 |\n"
    ) in text
    assert "Timed in turns. Of a copy: " in text and "copy's 4270 GB/s" in text and f"bfloat16; {MEASURED}" in text


def test_what_was_generated_stays(results):
    once, count = rendered(page("step cpu", "memory cpu"), results)
    assert rendered(once, results) == (once, count) == (once, 2)
    assert once.startswith("# Title\n") and once.endswith("\nend\n") and once.count("\ntext\n") == 1


def test_a_page_without_tables(results):
    assert rendered("no table\n", results) == ("no table\n", 0)


def test_several_devices(results):
    save(
        "convert",
        {"environment": ENVIRONMENT | {"device": "GPU"}, "limit_s": 1.0, "stacks": [], "budgets": []},
        results,
    )
    with pytest.raises(
        ResultsError, match="convert was measured on GPU, Some-CPU-2-threads: say which with device=NAM"
    ):
        rendered(page("convert-budgets"), results)
    assert "| fuse |" in rendered(page("convert-budgets device=Some-CPU-2-threads"), results)[0]
    assert "| fuse |" not in rendered(page("convert-budgets device=GPU"), results)[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (page("stp cpu"), "no table 'stp'; there are gains, step, memory, accuracy, convert"),
        (page("step gpu"), "no results of step-gpu-bfloat16-mlp: 'python -m benchmarks step' writes them"),
        (page("step cpu device=X"), "no results of 'step-cpu-bfloat16-mlp' on 'X': there are results of Some-CPU"),
        (page("step"), r"a table is 'step SIZE \[DTYPE\]'"),
        (page("step cpu only=o1,o9"), "only=o9: there are fp32, compile"),
        (page("gains cpu"), "'gains' takes nothing but device=NAME"),
        (page("watch"), r"a table is 'watch SIZE \[LEVEL\]'"),
        (page("watch cpu"), "no results of watch-cpu-O1-mlp: 'python -m benchmarks watch' writes them"),
        (page("hotspots"), r"a table is 'hotspots SIZE \[DTYPE\]'"),
        (page("forms cpu bfloat16"), r"a table is 'forms \[DTYPE\]'"),
        (page("forms float16"), "no results of forms-float16-gpt-2-small: 'python -m benchmarks forms' writes them"),
        (page("ledger adds"), "'adds': a table is 'ledger QUESTION', with one of adds-up, planted, variances"),
        (page("convert cpu"), "'convert' takes nothing but device=NAME"),
        ("<!-- table: step cpu -->\n", "1 tables begin and 0 are complete: one has no '<!-- end -->'"),
        (
            "<!-- table: convert -->\n" + page("convert"),
            "'<!-- table: convert -->' has no '<!-- end -->' before the next",
        ),
    ],
)
def test_errors(results, text, message):
    with pytest.raises(ResultsError, match=message):
        rendered(text, results)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_and_checks(results, tmp_path, capsys):
    found = tmp_path / "page.md"
    found.write_text(page("step cpu"), encoding="utf-8")
    arguments = ["--pages", str(found), "--results", str(results)]
    assert tables.main([*arguments, "--check"]) == 1
    assert "page.md is out of date: 'python -m benchmarks tables'" in capsys.readouterr().err
    assert found.read_text(encoding="utf-8") == page("step cpu")  # checking writes nothing
    assert tables.main(arguments) == 0
    assert tables.main([*arguments, "--check"]) == 0
    assert "page.md: 1 tables, up to date" in capsys.readouterr().out
    save("step-cpu-bfloat16-mlp", step("mlp", 0.02, {"o1": {"ratio": ratio(1.0, "=")}}), results)
    assert tables.main([*arguments, "--check"]) == 1


def test_the_command_names_page_and_trouble(results, tmp_path, capsys):
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text(page("convert"), encoding="utf-8")
    bad.write_text(page("memory gpu"), encoding="utf-8")
    assert tables.main(["--pages", str(bad), str(good), "--results", str(results)]) == 1
    assert "bad.md: no results of memory-gpu-bfloat16" in capsys.readouterr().err
    assert "| 12 |" in good.read_text(encoding="utf-8") and bad.read_text(encoding="utf-8") == page("memory gpu")


def test_the_pages_of_this_checkout_are_up_to_date(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


def test_large_figures_have_no_exponent():
    assert [*map(tables._three_digits, (0.8684, 62.66, 642.82, 1160.7, 26667.0))] == [
        "0.868",
        "62.7",
        "643",
        "1161",
        "26667",
    ]
