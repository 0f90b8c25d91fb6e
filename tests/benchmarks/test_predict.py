"""``python -m benchmarks kernels --predict``: SASS, loops and bytes by hand, and times that follow from them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import kernel_tools
from benchmarks import kernels
from benchmarks.predict import model
from benchmarks.predict.against import forms_of
from benchmarks.predict.compared import Compared
from benchmarks.predict.machines import MACHINES
from benchmarks.predict.model import LAUNCH, Kernel, held, predict
from benchmarks.predict.sass import Instruction, Loop, SassError, flat, loops, path_of
from benchmarks.predict.trips import touched, trips
from fxprec.kernels.rows.emit.tiling import Tiling

H200 = MACHINES["H200"]


# -- SASS -------------------------------------------------------------------------------------------------------------


def code(*lines: str) -> str:
    """As nvdisasm prints it: labels, and instructions with "stall waits write read" behind a bar."""
    made, address = [], 0
    for line in lines:
        if line.endswith(":"):
            made.append(line)
            continue
        text, _, control = line.partition("|")
        stall, waits, write, read = map(int, control.split() or (1, 0, 7, 7))
        bits = stall | write << 5 | read << 8 | waits << 11
        made.append(f"        /*{address:04x}*/                   {text.strip()} ;   /* 0x00000a00ff017b82 */")
        made.append(f"                                         /* 0x{bits << 41:016x} */")
        address += 16
    return "\n".join(made)


def names(path) -> list:
    return [names(each.body) if isinstance(each, Loop) else each.op for each in path]


def test_control_bits_units_and_widths():
    first, second, third, fourth, *_ = path_of(
        code(
            "@!P3 LDG.E.128 R4, desc[UR4][R2.64] | 2 0 5 1", "FADD R1, R4, R5 | 4 33 7 7",
            "STG.E.U16 desc[UR4][R2.64], R1 | 1 0 7 0", "DEPBAR.LE SB0, 0x6 | 9 0 7 7", "EXIT",
        )
    )  # fmt: skip
    assert first == Instruction("LDG.E.128", "load", 16, 2, (5, 1), 0)
    assert second == Instruction("FADD", "fma", 0, 4, (-1, -1), 0b100001)
    assert (third.unit, third.width, third.sets) == ("store", 2, (-1, 0))
    assert (fourth.unit, fourth.groups, fourth.stall) == ("", 6, 9)


def test_the_way_goes_through_loops_and_around_calls_and_ends_at_the_exit():
    path = path_of(
        code(
            "@P0 BRA `(.L_x_9)", "MOV R1, RZ", ".L_x_0:", "FADD R1, R1, R2", ".L_x_1:", "FMUL R2, R2, R2",
            "@!P1 BRA `(.L_x_2)", "CALL.REL.NOINC `($slow)", ".L_x_2:", "@P2 BRA `(.L_x_1)", "@P3 BRA `(.L_x_0)",
            ".L_x_9:", "STG.E desc[UR4][R2.64], R1", "EXIT", ".L_x_7:", "BRA `(.L_x_7)", "NOP", "$slow:", "RET",
        )
    )  # fmt: skip
    inner = ["FMUL", "BRA", "BRA"]
    assert names(path) == ["BRA", "MOV", ["FADD", inner, "BRA"], "STG.E", "EXIT"]
    assert loops(path) == 2 and path[2].number == 0 and path[2].body[1].number == 1
    often = {each.op: times for each, times in flat(path, (3.0, 2.5))}
    assert often["FADD"] == 3 and often["FMUL"] == 7.5 and often["STG.E"] == 1


def test_of_two_ways_the_one_with_the_loop_is_gone():
    way = code(
        "@P0 BRA `(.L_x_0)", "MOV R1, RZ", "BRA `(.L_x_1)", ".L_x_0:", "FADD R1, R1, R2", ".L_x_2:", "FMUL R2, R2, R2",
        "@P2 BRA `(.L_x_2)", ".L_x_1:", "EXIT",
    )  # fmt: skip
    assert names(path_of(way)) == ["BRA", "FADD", ["FMUL", "BRA"], "EXIT"]


def test_code_that_is_not_understood():
    with pytest.raises(SassError, match="no instructions"):
        path_of("")
    with pytest.raises(SassError, match="a branch to nowhere"):
        path_of(code("BRA `(.L_x_5)", "EXIT"))


# -- Triton IR --------------------------------------------------------------------------------------------------------

TTIR = """
  tt.func public @k(%x: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("x"), %y: !tt.ptr<f32> loc("y"), %rows: i32) {
    %c0 = arith.constant 0 : i32 loc(#loc1)
    %c1 = arith.constant 1 : i32 loc(#loc1)
    %c4 = arith.constant 4 : i32 loc(#loc1)
    %pid = tt.get_program_id x : i32 loc(#loc1)
    %step = tt.get_num_programs x : i32 loc(#loc1)
    %p = tt.addptr %x, %pid : !tt.ptr<f32>, i32 loc(#loc1)
    %total:2 = scf.for %i = %pid to %rows step %step iter_args(%a = %c0, %q = %p) -> (i32, !tt.ptr<f32>)  : i32 {
      %v = tt.load %q : !tt.ptr<f32> loc(#loc1)
      scf.for %j = %c0 to %c4 step %c1  : i32 {
        tt.store %y, %v : !tt.ptr<f32> loc(#loc1)
      } loc(#loc1)
    } loc(#loc1)
    %even = arith.cmpi eq, %pid, %c0 : i32 loc(#loc1)
    scf.if %even {
      %sum = "tt.reduce"(%v) <{axis = 0 : i32}> ({
      ^bb0(%one: f32 loc("one"), %other: f32 loc("other")):
        tt.reduce.return %one : f32 loc(#loc1)
      }) : (tensor<4xf32>) -> f32 loc(#loc1)
      scf.for %k = %c0 to %rows step %c1  : i32 {
        tt.store %y, %v : !tt.ptr<f32> loc(#loc1)
      } loc(#loc1)
    } loc(#loc1)
    tt.return loc(#loc1)
"""


def test_how_often_loops_run_is_a_mean_over_programs():
    assert trips(TTIR, {"rows": 6}, (1, 1, 1)) == (6, 4, 6)
    # 0, 4 and 1, 5 of the first and second program, 2 and 3 of the others; of four programs one goes in.
    assert trips(TTIR, {"rows": 6}, (4, 1, 1)) == (1.5, 4, 1.5)
    assert trips("no loops", {}, (4, 1, 1)) == ()


def test_ends_of_loops_that_come_from_memory():
    with pytest.raises(ValueError, match="comes from memory"):
        trips(TTIR, {}, (2, 1, 1))
    assert trips(TTIR, {}, (2, 1, 1), unknown=8) == (8, 4, 4)


def test_tensors_that_are_read_and_written_through_what_loops_carry():
    assert touched(TTIR) == {"x": (1, 0), "y": (0, 2)}


# -- the model --------------------------------------------------------------------------------------------------------


def instruction(op: str, unit: str = "", width: int = 0, sets: int = -1, waits: int = 0) -> Instruction:
    return Instruction(op, unit, width, 1, (sets, -1), waits)


LOAD = instruction("LDG.E.128", "load", 16, sets=0)
STORE = instruction("STG.E.128", "store", 16, waits=1)


def kernel(*path, trips=(), registers=32, shared=0, warps=4, programs=132 * 2000, loaded=0.0, stored=0.0) -> Kernel:
    return Kernel(path, trips, registers, shared, warps, programs, loaded, stored)


def copy(programs: int, **options) -> Kernel:
    """Four loads of 16 bytes a thread, and as many stores."""
    each = 4 * 16 * 32 * options.get("warps", 4) * programs
    return kernel(*[LOAD] * 4, *[STORE] * 4, programs=programs, loaded=each, stored=each, **options)


@pytest.mark.parametrize(
    ("taken", "programs"),
    [
        ({"registers": 126, "warps": 1}, 16), ({"registers": 254, "warps": 1}, 8), ({"registers": 32, "warps": 8}, 8),
        ({"registers": 33, "warps": 8}, 6), ({"registers": 16, "warps": 1}, 32), ({"registers": 255, "warps": 16}, 1),
        ({"shared": 75 << 10}, 3), ({"shared": 76 << 10}, 2),
    ],
)  # fmt: skip
def test_programs_that_a_multiprocessor_holds(taken, programs):
    assert held(kernel(**taken), H200) == programs


def test_a_copy_takes_what_its_bytes_take():
    found = predict(copy(132 * 4000), H200)
    assert found.bound == pytest.approx(2 * 4 * 16 * 128 * 132 * 4000 / H200.achieved)
    assert found.bound + LAUNCH < found.seconds < 1.03 * found.bound + LAUNCH
    assert found.limit == "memory"


def test_a_program_alone_takes_the_latencies_one_after_the_other():
    wait = replace(LOAD, waits=1)  # for the load before it
    one, three = (predict(kernel(*path, programs=1, warps=1, loaded=512 * len(path)), H200) for path in (
        (LOAD, instruction("EXIT", waits=1)), (LOAD, wait, wait, instruction("EXIT", waits=1)),
    ))  # fmt: skip
    cycles = (three.seconds - one.seconds) * H200.clock
    assert cycles == pytest.approx(2 * (H200.memory + 512 / (H200.achieved / H200.clock)), abs=40)
    assert one.limit == "latency"


def test_too_little_on_its_way_is_slower_in_proportion():
    """Little's law: where latency bounds, half the programs take twice the time."""
    few, fewer = (
        predict(kernel(LOAD, STORE, warps=1, shared=shared, loaded=132 * 2000 * 512, stored=132 * 2000 * 512), H200)
        for shared in (110_000, 200_000)
    )
    assert (few.held, fewer.held) == (2, 1)
    assert fewer.seconds / few.seconds == pytest.approx(2, rel=0.1)
    assert few.seconds > 2 * few.bound


@pytest.mark.parametrize(("unit", "rate"), [("fma", 4), ("alu", 2), ("xu", 0.5), ("shuffle", 1)])
def test_units_and_the_issue_bound(unit, rate):
    count = 400
    found = predict(kernel(*[instruction("OP", unit)] * count, programs=132 * 160), H200)
    assert (found.seconds - LAUNCH) * H200.clock == pytest.approx(160 * 4 * count / rate, rel=0.1)
    assert found.busy[unit] > 0.9


def test_an_a100_computes_half_as_many_fp32_a_cycle():
    operations = kernel(*[instruction("FFMA", "fma")] * 400, programs=13200)
    slower, faster = (predict(operations, MACHINES[name]).seconds for name in ("A100", "H100"))
    assert slower / faster == pytest.approx(2 * 132 / 108 * 1.98 / 1.41, rel=0.1)


def test_a_barrier_waits_for_the_last_warp():
    """Which of four has its values last: until then nobody computes, and then all do."""
    meets = replace(instruction("BAR.SYNC", "barrier"), waits=1)
    load, work = replace(LOAD, width=1024), [instruction("FFMA", "fma", waits=1)] * 1000  # so that they come one by one
    apart, together = (
        predict(kernel(*path, programs=132, warps=16, loaded=132 * 16 * 32 * 1024), H200)
        for path in ((load, *work), (load, meets, *work))
    )
    assert (together.seconds - apart.seconds) * H200.clock == pytest.approx(3 * 1000, rel=0.1)


def test_loads_ahead_hide_the_latency():
    """Copies of two tiles are on their way while one is computed, where a loop of loads waits for each."""
    work = [instruction("FFMA", "fma")] * 400
    ahead = instruction("LDGSTS.E.BYPASS.128", "copy", 16), instruction("LDGDEPBAR")
    waits = replace(instruction("DEPBAR.LE"), groups=2)
    loop = Loop(0, (waits, *ahead, *work))
    staged = kernel(*ahead, *ahead, loop, trips=(50.0,), programs=132, warps=1, loaded=52 * 512 * 132)
    waiting = kernel(
        Loop(0, (LOAD, replace(work[0], waits=1), *work)), trips=(50.0,), programs=132, warps=1, loaded=50 * 512 * 132
    )
    cycles = [predict(each, H200).seconds * H200.clock for each in (staged, waiting)]
    assert cycles[1] - cycles[0] == pytest.approx(50 * H200.memory, rel=0.1)


def test_what_is_not_simulated_takes_what_is_simulated_takes(monkeypatch):
    body = (LOAD, *[instruction("FFMA", "fma", waits=1)] * 20, replace(STORE, waits=0))
    long = kernel(Loop(0, body), trips=(300.0,), programs=132 * 2, loaded=512e3 * 132, stored=512e3 * 132)
    waves = copy(132 * 400)
    all_of_it = [predict(each, H200).seconds for each in (long, waves)]
    monkeypatch.setattr(model, "_BUDGET", 3000)
    for each, wanted in zip((long, waves), all_of_it, strict=True):
        assert predict(each, H200).seconds == pytest.approx(wanted, rel=0.05)


# -- beside what was measured ------------------------------------------------------------------------------------------


def test_how_near_predictions_come():
    found = Compared("m", "r", "forward", ((10.0, 9.0), (10.2, 8.0), (20.0, 21.0), (40.0, 20.5)), 0)
    assert found.ratios == [0.9, 8.0 / 10.2, 1.05, 0.5125]
    assert found.pick == 1.02 and found.mean == pytest.approx((0.9 * 8 / 10.2 * 1.05 * 0.5125) ** 0.25)
    # Of six pairs one is too near to ask for, and of the others one is wrong.
    assert found.ordered == 4 / 5


def test_forms_are_the_fastest_the_slowest_and_some_between():
    rows = [
        [float(us), 1, 1024, 4, 3, resident, 528] for us, resident in zip(range(70, 10, -1), [0, 4] * 30, strict=True)
    ]
    found = forms_of({"kind": "tile", "forms": rows})
    assert len(found) == 24 and found[0][0] == 11.0 and found[-1][0] == 70.0
    assert found[0][1] == Tiling("tile", 1, 1024, 4, True, 3, 4) and found[-1][1] == Tiling(
        "tile", 1, 1024, 4, False, 3, 4
    )
    assert len(forms_of({"kind": "tile", "forms": rows[:9]})) == 9


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@kernel_tools.compiles
def test_the_command_writes_what_it_predicts(tmp_path, capsys):
    arguments = ["--predict", "H100", "H200", "--check", "--only", "max_pool2d", "--output", str(tmp_path)]
    assert kernels.main(arguments) == 0
    (file,) = tmp_path.rglob("*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["environment"]["device"] == file.parent.name == "predicted"
    said = {(row["direction"], row["machine"]) for row in found["rows"]}
    assert said == {(way, machine) for way in ("forward", "backward") for machine in ("H100", "H200")}
    assert all(2 < row["us"] < 20 and row["launches"] == 1 and row["why"] for row in found["rows"])
    assert "nothing was measured" in capsys.readouterr().out
