"""``python -m benchmarks forms``: candidates, launches that leave fxprec's own as they are, results, table and file."""

from __future__ import annotations

import ast
import json

import pytest
import torch
import torch.nn.functional as F

from benchmarks import forms
from benchmarks.measure.forms import Case, Operands, candidates, cases, launches
from benchmarks.measure.timing import HostClock
from benchmarks.reports.forms import COLUMNS, Found, Timed
from fxprec.kernels.rows.emit.tiling import Tiling, tiling_of
from fxprec.kernels.rows.run import kernel
from fxprec.kernels.rows.run.region import FusedRegion
from kernel_tools import DEVICES, INTERPRETING, run_in_the_interpreter
from region_tools import graph_of

CPU = torch.device("cpu")


def call(rows=16, columns=32):
    """A region with a norm, whose backward has partial sums."""
    inputs = [torch.empty(rows, columns, dtype=torch.bfloat16) for _ in range(2)]
    inputs += [torch.empty(columns, dtype=torch.bfloat16)]
    region = FusedRegion("fused_add_norm", graph_of(lambda x, y, w: F.rms_norm(x + y, (32,), w)), 0, 0, "aten")
    return region, tuple(x.requires_grad_() for x in inputs)


def both(**sizes) -> list[Case]:
    return cases([call(**sizes)], CPU)


# -- candidates -------------------------------------------------------------------------------------------------------


def test_candidates_of_a_tile_that_goes_on():
    found = [*candidates(Tiling("tile", 1, 1024, 1, True, 3, 4), 768)]
    assert len(found) == len(set(found)) == 5 * 2 * 3
    assert {(form.rows, form.warps) for form in found} == {(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)}
    assert {(form.stages, form.resident) for form in found} == {(s, r) for s in (1, 3) for r in (2, 4, 8)}
    assert {(form.kind, form.block, form.persistent) for form in found} == {("tile", 1024, True)}


def test_candidates_of_other_kinds():
    found = [*candidates(Tiling("blocks", 4, 512, 2, False), 3072)]
    assert {form.block for form in found} == {256, 512, 1024} and {form.rows for form in found} == {2, 4, 8}
    assert {(form.stages, form.resident) for form in found} == {(1, 4)}  # which change nothing here
    assert all(8 <= form.rows * form.block / form.warps / 32 <= 32 for form in found)
    assert {form.rows for kind in ("flat", "loop") for form in candidates(Tiling(kind, 1, 1024, 4, False), 9999)} == {1}
    assert {form.stages for form in candidates(Tiling("loop", 1, 4096, 8, True), 9999)} == {1}
    assert max(form.block for form in candidates(Tiling("blocks", 4, 512, 2, False), 300)) == 512  # a row's end


def test_launches_have_the_forms_and_leave_what_fxprec_builds():
    for case in both(rows=512):
        before = getattr(case.plan, f"{case.direction}_launch")
        present, *others = launches(case)
        assert (present.source, present.grid, present.tiling) == (before.source, before.grid, before.tiling)
        assert len(others) > 4 and len({(x.source, x.tiling.warps, x.grid) for x in (present, *others)}) == 1 + len(
            others
        )
        for launch in others:
            ast.parse(launch.source)
            assert f"ROWS: constexpr = {launch.tiling.rows}" in launch.source
            tiles = -(-512 // launch.tiling.rows)
            assert launch.grid[0] == (min(tiles, launch.tiling.resident) if launch.tiling.persistent else tiles)
        assert getattr(case.plan, f"{case.direction}_launch") is before and case.launch().source == before.source
        assert kernel.tiling_of is tiling_of and kernel._resident(CPU, 9999, 9) == kernel._INTERPRETED


def test_bytes_that_must_be_moved():
    forward, backward = both()
    tensor, weight, statistic = 2 * 16 * 32, 2 * 32, 4 * 16
    assert forward.moved == 3 * tensor + weight
    # both operands, the weight, what the forward kept of each row, the cotangent; the sum's gradient, stored once
    assert backward.moved == 4 * tensor + weight + statistic


def test_integers_have_no_forms():
    region = FusedRegion("fused_add", graph_of(lambda x: x + x), 0, 0, "aten")
    assert cases([(region, (torch.ones(8, dtype=torch.float64),))], CPU) == []


# -- results, in the interpreter --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_forms_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@pytest.mark.parametrize("device", DEVICES)
def test_all_forms_give_the_same_results(device):
    for case in cases([call(rows=70)], torch.device(device)):
        operands = Operands.of(case)
        present, *others = launches(case)
        wanted = operands.run(present)
        assert len(others) > 4 and [operands.differs(launch, wanted) for launch in others] == [""] * len(others)
        wrong = [wanted[0] * 1.1, *wanted[1:]]
        assert operands.differs(others[0], wrong).startswith("result 0 is off by")
        assert operands.differs(others[0], [wanted[0] * float("nan"), *wanted[1:]]).endswith("nan")


@pytest.mark.parametrize("device", DEVICES)
def test_a_sweep(device, monkeypatch, tmp_path, capsys):
    if not INTERPRETING:
        pytest.skip("times are a GPU's")
    monkeypatch.setattr(forms, "MODELS", {"Some Model": None})
    monkeypatch.setattr(forms, "calls", lambda *_: [call()])
    monkeypatch.setenv("COLUMNS", "150")
    assert forms.main(["--check", "--top", "2", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/forms-bfloat16-some-model.json")
    data = json.loads(path.read_text())
    assert data["model"] == "Some Model" and data["columns"] == list(COLUMNS)
    forward, backward = data["kernels"]
    assert (forward["pass"], backward["pass"]) == ("forward", "backward") and forward["failed"] == {}
    assert (forward["rows"], forward["columns"], forward["bytes"]) == (16, 32, 3136)
    assert forward["best_share"] >= forward["share"] > 0 and forward["present"][5] == 0 < backward["present"][5]
    times = [cells[0] for cells in forward["forms"]]
    assert times == sorted(times) and min(times) >= forward["best"][0]
    shown = capsys.readouterr().out
    assert shown.count("(present)") == 2 and shown.count("│ forward") == 3
    assert f"{2 + len(times) + len(backward['forms'])} forms of 2 kernels ran; 0 failed" in shown


@pytest.mark.parametrize("device", DEVICES)
def test_what_fails_and_what_is_wrong(device, monkeypatch):
    (case, _) = cases([call()], torch.device(device))
    said = iter(["", "result 0 is off by 1"])

    def differs(self, launch, wanted):
        for text in said:
            return text
        raise MemoryError("shared memory\nof 9 MB")

    monkeypatch.setattr(Operands, "differs", differs)
    found, count = forms.sweep(case, forms.Sweep(HostClock(), 1e9, 1))
    assert len(found.others) == 1 and found.wrong and count == 2 + len(found.failed)
    assert found.failed[:2] == ("wrong: result 0 is off by 1", "MemoryError: shared memory")


# -- the command ------------------------------------------------------------------------------------------------------


def small(monkeypatch, *found):
    monkeypatch.setattr(forms, "MODELS", {"Some Model": None})
    monkeypatch.setattr(forms, "calls", lambda *_: [*found])
    monkeypatch.setattr(forms, "interpreting", lambda: False)
    monkeypatch.setattr(kernel, "built", lambda *_: pytest.fail("launched"))


def test_checking_builds_all_and_launches_nothing(monkeypatch, capsys):
    small(monkeypatch, call())
    count = sum(len(launches(case)) for case in both())
    assert forms.main(["--check"]) == 0
    assert f"{count} forms of 2 kernels built; 0 failed" in capsys.readouterr().out


def test_a_kernel_that_does_not_run_is_told_and_the_rest_runs(monkeypatch, capsys):
    small(monkeypatch, call())
    sweep = forms.sweep

    def sometimes(case, how):
        if case.direction == "forward":
            raise RuntimeError("no such [kernel]")
        return sweep(case, how)

    monkeypatch.setattr(forms, "sweep", sometimes)
    assert forms.main(["--check"]) == 1
    shown = capsys.readouterr().out
    assert "Some Model: fused_add_norm forward failed: RuntimeError: no such [kernel]" in shown
    assert "of 1 kernels built; 1 failed" in shown


def test_a_wrong_form_is_a_failure(monkeypatch, capsys):
    small(monkeypatch, call())
    timed = Timed(1.0, 1, 32, 1, 1, 0, 16)
    found = Found("r", "forward", "tile", 16, 32, 3200, 1e9, timed, (), ("wrong: 1",))
    monkeypatch.setattr(forms, "sweep", lambda case, how: (found, 1))
    assert forms.main(["--check"]) == 1 and "1 failed: wrong: 1" in capsys.readouterr().out


def test_a_time_limit_names_what_is_left_out(monkeypatch, capsys):
    small(monkeypatch, call())
    assert forms.main(["--check", "--budget", "-1"]) == 1
    assert "no time for Some Model: fused_add_norm forward, Some Model: fused_add_norm" in capsys.readouterr().out


def test_bad_options(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, said in (
        (["--only", "gpt2-small"], "no model 'gpt2-small'; did you mean gpt-2-small?"),
        ([], "CUDA"),
    ):
        with pytest.raises(SystemExit) as raised:
            forms.main(arguments)
        assert raised.value.code == 2 and said in capsys.readouterr().err


def test_the_figures_of_a_kernel():
    present, other = Timed(50.0, 2, 1024, 4, 1, 0, 8192), Timed(40.0, 1, 1024, 1, 3, 4, 528)
    found = Found("r", "backward", "tile", 16384, 768, 100_000_000, 4e12, present, (other,), ("a", "a", "b"))
    assert found.best is other and found.share(other) == pytest.approx(0.625) and not found.wrong
    data = found.as_dict()
    assert (data["share"], data["best_share"]) == pytest.approx((0.5, 0.625)) and data["failed"] == {"a": 2, "b": 1}
    assert data["present"] == [50.0, 2, 1024, 4, 1, 0, 8192] and data["best"] == [40.0, 1, 1024, 1, 3, 4, 528]
    assert (str(present), str(other)) == ("2 x 1024, 4 warps", "1 x 1024, 1 warp, 3 stages, 528 programs")


@pytest.mark.zoo
@pytest.mark.slow
def test_forms_of_four_models_are_built(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(kernel, "built", lambda *_: pytest.fail("launched"))
    if INTERPRETING:
        pytest.skip("launches all of them")
    assert forms.main(["--check"]) == 0
    count, _, _, kernels, *_ = capsys.readouterr().out.splitlines()[-1].split()
    assert int(kernels) > 20 and int(count) > 5 * int(kernels)
