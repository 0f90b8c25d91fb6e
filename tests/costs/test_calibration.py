"""Measuring a device, keeping and finding its costs, the shipped ones, and ``python -m fxprec calibrate``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fxprec.command_line import main as command_line
from fxprec.command_line.main import main
from fxprec.costs import calibration
from fxprec.costs import files as cost_files
from fxprec.costs.calibration import calibrate
from fxprec.costs.files import costs_of, path_of, read, shipped, write
from fxprec.kernels.cpu import processor
from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.passes.costs.device_costs import LOOPS, Curve, DeviceCosts, Work
from fxprec.passes.policy.policy import Policy
from fxprec.settings import Settings

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FXPREC_CACHE_DIR", str(tmp_path))
    return tmp_path


def by_hand(**changes: object) -> DeviceCosts:
    """Costs as they would be measured here: every kind of work a microsecond a unit."""
    curves = {dtype: {work: Curve(((1.0, 1e-6),)) for work in Work} for dtype in (FP32, BF16, FP16)}
    name = cost_files.processor_name("cpu")
    return replace(DeviceCosts("cpu", name, torch.get_num_threads(), "calibrated on 2026-01-02", curves), **changes)


def test_costs_are_found_again():
    write(by_hand(), path_of("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert costs_of("cpu") == by_hand()
    assert os.listdir(path_of("cpu").parent) == [path_of("cpu").name], "nothing else is left behind"


def test_a_file_is_read_once_and_anew_when_it_changed():
    write(by_hand(), path_of("cpu"))
    found = costs_of("cpu")
    assert costs_of("cpu") is found
    write(by_hand(source="calibrated on 2026-01-03"), path_of("cpu"))
    assert costs_of("cpu").source == "calibrated on 2026-01-03"
    assert shipped("cpu", "a CPU", 1, "other") is shipped("cpu", "a CPU", 1, "other")


def test_without_a_file_shipped_costs_serve():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = costs_of("cpu")
    assert found.source.startswith("shipped for CPUs") and found.threads == torch.get_num_threads()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.3.4"}, "its torch is 2.3.4, here it is"),
        ({"name": "a Z80"}, "its processor is a Z80"),
        ({"threads": 1234}, "its threads is 1234"),
        ({"device": "cuda"}, "its device is cuda"),
        ({"curves": {FP32: shipped("cuda", "", 0, "none").curves[BF16]}}, "knows nothing of"),
    ],
)
def test_a_file_of_another_machine_is_passed_over_with_a_warning(changes, words):
    write(by_hand(**changes), path_of("cpu"))
    with pytest.warns(UserWarning, match=words) as caught:
        assert costs_of("cpu").source.startswith("shipped")
    assert "python -m fxprec calibrate --device cpu" in str(caught[0].message)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 0}', '{"format": 1, "device": "cpu"}'])
def test_a_broken_file_is_passed_over_with_a_warning(text):
    path_of("cpu").write_text(text)
    with pytest.warns(UserWarning, match="holds no costs that this version reads"):
        assert costs_of("cpu").source.startswith("shipped")


def test_a_folder_that_may_not_be_read_is_passed_over_with_a_warning(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.warns(UserWarning, match="PermissionError: permission denied"):
        assert costs_of("cpu").source.startswith("shipped")


def test_a_torch_build_is_no_other_version():
    write(by_hand(torch=torch.__version__.partition("+")[0] + "+another"), path_of("cpu"))
    assert costs_of("cpu").source.startswith("calibrated")


def test_where_files_belong(folder, monkeypatch):
    assert path_of("cpu").parent == folder
    name = path_of("cpu").name
    assert name.startswith("costs-cpu-") and name.endswith(f"-{torch.get_num_threads()}-threads.json")
    monkeypatch.delenv("FXPREC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "xdg"))
    assert path_of("cpu").parent == folder / "xdg" / "fxprec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert path_of("cpu").parent == Path.home() / ".cache" / "fxprec"


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA L4"])
def test_a_gpu_lowers_large_products_and_no_tiny_ones(name):
    costs = shipped("cuda", name, 0, "none")
    assert ("H100 and H200" in costs.source) is ("H" in name.removeprefix("NVIDIA ")[:1]) and "estimate" in costs.source
    for low in (BF16, FP16):
        gain = [costs.product(FP32, 2 * n**3, 3 * n**2) - costs.product(low, 2 * n**3, 3 * n**2) for n in (4096, 16)]
        assert gain[0] > 1e-3 and abs(gain[1]) < 1e-6
        assert costs.seconds(Work.CAST, low, 1) > 1e-6


def test_a_cpu_with_bfloat16_units_gains_where_products_are_large():
    costs = shipped("cpu", "a CPU", 1, "other")
    assert costs.product(BF16, 2 * 512**3, 3 * 512**2) < 0.6 * costs.product(FP32, 2 * 512**3, 3 * 512**2)
    assert costs.product(BF16, 2 * 32**3, 3 * 32**2) > 2 * costs.product(FP32, 2 * 32**3, 3 * 32**2)
    assert costs.product(FP16, 2 * 512**3, 3 * 512**2) > costs.product(FP32, 2 * 512**3, 3 * 512**2)
    two, more = shipped("cpu", "a CPU", 2, "other"), shipped("cpu", "a CPU", 8, "other")
    assert 1.5 < costs.product(FP32, 1e10, 1.0) / two.product(FP32, 1e10, 1.0) < 2.1
    assert 2 < two.product(FP32, 1e10, 1.0) / more.product(FP32, 1e10, 1.0) < 4
    assert more.seconds(Work.MATMUL, BF16, 1) == two.seconds(Work.MATMUL, BF16, 1), "a call costs the same"


def test_two_threads_stream_a_weight_little_faster_than_one_unless_it_is_low():
    """4 rows by 9216 x 128, the first linear layer of the tutorials' CNN: 1.0 ms in FP32 and 0.33 ms in bfloat16."""
    one, two = (shipped("cpu", "a CPU", threads, "other") for threads in (1, 2))
    elements = 4 * 9216 + 9216 * 128 + 4 * 128
    assert one.seconds(Work.STREAM, FP32, elements) < 1.6 * two.seconds(Work.STREAM, FP32, elements)
    assert two.seconds(Work.STREAM, FP32, elements) > 2 * two.seconds(Work.STREAM, BF16, elements)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({"amx_bf16", "avx512_bf16", "avx512f"}, "with AMX"),
        ({"avx512_bf16", "avx512f"}, "with bfloat16 units"),
        ({"bf16"}, "with bfloat16 units"),
        ({"avx2", "avx512f"}, "with AVX-512 without bfloat16 units, an estimate"),
        ({"avx2"}, "without bfloat16 units"),
        ({"neon"}, "without bfloat16 units"),
    ],
)
def test_a_cpu_gets_the_costs_of_its_class(flags, kind, monkeypatch):
    monkeypatch.setattr(processor, "cpu_flags", lambda: frozenset(flags))
    costs = cost_files.shipped_for_here("cpu")
    assert costs.source == f"shipped for CPUs {kind}" and costs.loops is not None


@pytest.mark.parametrize(
    ("limit", "kind"),
    [
        ("AVX512_CORE_BF16", "with bfloat16 units"),
        ("AVX2", "without bfloat16 units"),
        ("AVX512_CORE", "with AVX-512 without bfloat16 units, an estimate"),
        ("AVX10_1_512_AMX", "with AMX"),
        ("DEFAULT", "with AMX"),
        ("a typing error", "with AMX"),
    ],
)
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_cpu_is_what_onednn_is_held_to(variable, limit, kind, monkeypatch):
    monkeypatch.setattr(processor, "cpu_flags", lambda: frozenset({"amx_bf16", "avx512_bf16", "avx512f"}))
    monkeypatch.setenv(variable, limit)
    assert cost_files.shipped_for_here("cpu").source == f"shipped for CPUs {kind}"


def test_costs_of_a_cpu_that_is_held_back_are_another_cpus(folder, monkeypatch):
    whole = path_of("cpu")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    cost_files.processor_name.cache_clear()
    try:
        assert path_of("cpu") != whole and "held-to-avx512_core_bf16" in path_of("cpu").name
    finally:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
        cost_files.processor_name.cache_clear()
    assert path_of("cpu") == whole


def test_tiles_take_large_products_faster_and_small_ones_slower():
    amx, other = (shipped("cpu", "a CPU", 1, units) for units in ("amx", "other"))
    assert amx.seconds(Work.MATMUL, BF16, 2e9) < 0.8 * other.seconds(Work.MATMUL, BF16, 2e9)
    assert amx.seconds(Work.STREAM, BF16, 5e3) > 1.3 * other.seconds(Work.STREAM, BF16, 5e3)


def test_files_are_short_and_say_what_was_measured(folder):
    costs = shipped("cpu", "a CPU", 2, "other")
    write(costs, folder / "costs.json")
    assert read(folder / "costs.json") == costs
    assert len((folder / "costs.json").read_text().splitlines()) < 80, "a curve a line"


def test_a_cpu_that_converts_gains_nothing_from_arithmetic():
    costs = shipped("cpu", "a CPU", 4, "converted")
    assert "estimate" in costs.source
    for work in (Work.MATMUL, Work.CONVOLUTION, Work.THIN_CONVOLUTION_BACKWARD, Work.ATTENTION):
        assert all(costs.seconds(work, BF16, size) >= costs.seconds(work, FP32, size) for size in (1e4, 1e7, 1e10))


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_cpu_with_avx2_alone_gains_where_one_row_waits_for_its_weights(threads):
    costs = shipped("cpu", "a CPU", threads, "none")
    for size, elements in ((512, 512**2 + 2 * 512), (2048, 2048**2 + 2 * 2048)):
        assert costs.linear(BF16, 2 * size**2, elements) < 0.9 * costs.linear(FP32, 2 * size**2, elements)
    for rows in (16, 64, 1024):
        flop, elements = 2 * rows * 1024**2, 1024**2 + 2 * rows * 1024
        assert costs.linear(BF16, flop, elements) > 1.3 * costs.linear(FP32, flop, elements)
        assert costs.linear(FP32, flop, elements) == costs.product(FP32, flop, elements)
    # The products of the backward read the weight the other way, and lose with one row, too.
    assert costs.product(BF16, 2 * 512**2, 512**2) > costs.product(FP32, 2 * 512**2, 512**2)


def test_a_linear_layer_of_few_rows_is_between_one_row_and_several():
    costs = shipped("cpu", "a CPU", 2, "none")
    seconds = [costs.linear(BF16, 2 * rows * 1024**2, 1024**2 + 2 * rows * 1024) for rows in (1, 2, 4, 8)]
    assert seconds == sorted(seconds) and seconds[3] > 3 * seconds[0]


@pytest.mark.slow
def test_calibrate_measures_every_kind_of_work():
    found = calibrate("cpu", dtypes=(BF16,), quick=True)
    assert set(found.curves) == {FP32, BF16} and found.threads == torch.get_num_threads()
    assert found.loops is None if why_not() else found.loops is not None
    one_size = {Work.LOOP_TRAINED, Work.LOOP_SUMS}
    for of_work in found.curves.values():
        assert all(len(curve.points) == (1 if work in one_size else 2) for work, curve in of_work.items())
    assert found.source.startswith("calibrated on 20")
    assert all(0 < curve(1) < 1 for of_work in found.curves.values() for curve in of_work.values())


def test_without_a_compiler_loops_are_left_out_and_the_command_says_so(folder, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(calibration, "_CASES", {work: cases[:1] for work, cases in calibration._CASES.items()})
    into = folder / "costs.json"
    assert main(["calibrate", "--device", "cpu", "--quick", "--output", str(into)]) == 0
    assert "compiled loops were not measured: " in capsys.readouterr().err
    assert read(into).loops is None and Work.LOOP not in read(into).curves[BF16]


def test_costs_that_know_no_loops_leave_them_to_the_shipped_ones():
    whole = cost_files.shipped_for_here("cpu")
    assert whole.loops is not None
    without = {dtype: {w: c for w, c in of.items() if w not in LOOPS} for dtype, of in whole.curves.items()}
    some = {dtype: {w: c for w, c in of.items() if w is not Work.LOOP_SUMS} for dtype, of in whole.curves.items()}
    assert replace(whole, curves=without).loops is None and replace(whole, curves=some).loops is None
    own = replace(whole, curves={**whole.curves, BF16: {**whole.curves[BF16], Work.LOOP_SUMS: Curve(((1.0, 1.0),))}})
    for costs, sums in ((replace(whole, curves=without), whole.curves[BF16][Work.LOOP_SUMS](1)), (own, 1.0)):
        settings = Settings(Policy.preset("O1"), BF16, fuse=True, lower=costs)
        if why_not():  # without AVX-512 or a compiler nothing is priced that cannot run
            assert settings.regions == "" and settings.context().loops is None
        else:
            assert settings.regions == "loops" and settings.context().loops.loop_sums(1) == sums
    assert Settings(Policy.preset("O1"), BF16, fuse="auto").context().loops is None


def test_devices_that_cannot_be_measured():
    with pytest.raises(ValueError, match="costs of cpu and cuda"):
        calibrate("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            calibrate("cuda")


class Clock:
    """A machine on which run ``size`` takes ``size`` seconds, ``busy`` times in a row a hundred times as much."""

    def __init__(self, busy: dict[float, int]) -> None:
        self.busy = busy

    def __call__(self, run) -> float:
        size = run()
        self.busy[size] = self.busy.get(size, 0) - 1
        return size * (100 if self.busy[size] >= 0 else 1)


def bench(busy: dict[float, int]) -> calibration._Bench:
    sizes = (1e-5, 2e-5, 4e-5)
    cases = [calibration.Case(n, lambda device, dtype, size=size: lambda: size) for n, size in enumerate(sizes, 1)]
    made = calibration._Bench(Clock(busy), torch.device("cpu"), cases, 1e-9)
    made.run([FP32])
    return made


@pytest.mark.parametrize("size", [1e-5, 2e-5])
def test_what_a_busy_machine_disturbed_is_measured_again(size):
    calm, disturbed = bench({}), bench({size: 2 * calibration._RUNS})
    assert not disturbed.disturbed()
    assert disturbed.curves() == calm.curves()


@pytest.mark.slow
def test_a_machine_that_stays_busy_is_reported(monkeypatch):
    lasting = bench({2e-5: 1000})
    assert lasting.disturbed() == {1: [FP32]}
    curve = lasting.curves()[FP32]
    assert [seconds for _, seconds in curve.points] == pytest.approx([1e-5, 4e-5, 4e-5]), "no more than a larger size"
    monkeypatch.setattr(calibration, "_CASES", {work: cases[:1] for work, cases in calibration._CASES.items()})
    monkeypatch.setattr(calibration, "_TOO_LONG", 0.0)
    monkeypatch.setattr(calibration, "_SECONDS", 1e-9)
    with pytest.warns(UserWarning, match="machine was busy while matmul, stream"):
        calibrate("cpu", dtypes=(BF16,))


def test_a_size_is_too_large_once_a_call_took_long(monkeypatch):
    made = []

    def case(seconds):
        return calibration.Case(seconds, lambda device, dtype: made.append(seconds) or (lambda: seconds))

    cases = [case(0.01), case(0.05), case(0.2)]
    run = calibration._Bench(lambda run: run(), torch.device("cpu"), cases, 0.0)
    run.run([FP32])
    assert made == [0.01, 0.05] and len(run.curves()[FP32].points) == 2


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"FXPREC_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "fxprec", "calibrate", *arguments],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_command_measures_writes_and_shows(folder):
    into = folder / "here" / "costs.json"
    ran = command(folder, "--device", "cpu", "--threads", "1", "--quick", "--output", str(into))
    assert ran.returncode == 0, ran.stderr
    written = read(into)
    assert written.threads == 1 and set(written.curves) == {FP32, BF16, FP16}
    assert str(written) in ran.stdout and "convolution backward" in ran.stdout and str(into) in ran.stderr
    assert json.loads(into.read_text())["format"] == 1


def test_the_command_says_where_it_cannot_write(folder, monkeypatch, capsys):
    monkeypatch.setattr(command_line, "calibrate", lambda *_, **__: by_hand())
    (folder / "file").write_text("")
    (folder / "directory").mkdir()
    for path in (folder / "file" / "costs.json", folder / "directory"):
        assert main(["calibrate", "--device", "cpu", "--output", str(path)]) == 1
        shown = capsys.readouterr()
        assert f"not written to {path}: " in shown.err and "FXPREC_CACHE_DIR" in shown.err
        assert "calibrated on 2026-01-02" in shown.out, "what was measured is not lost"
    assert sorted(os.listdir(folder)) == ["directory", "file"], "nothing is left behind"


@pytest.mark.slow
def test_the_command_shows_what_serves(folder, monkeypatch):
    threads = torch.get_num_threads()
    write(by_hand(), path_of("cpu"))
    before = time.time()
    ran = command(folder, "--device", "cpu", "--threads", str(threads), "--show")
    assert ran.returncode == 0 and "calibrated on 2026-01-02" in ran.stdout
    assert path_of("cpu").stat().st_mtime <= before, "nothing was measured"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--quick"], "give --output"), (["--threads", "0"], "at least one"), (["--device", "tpu"], "invalid choice")],
)
def test_the_command_refuses(folder, arguments, words, capsys):
    try:
        status = main(["calibrate", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    told = capsys.readouterr().err
    assert status == 2 and words in told and told.count("\n") == 1 and not os.listdir(folder)
