"""What a GPU would launch, on one that is pretended: compiled for its arguments, checked, not run.

The tests for a GPU, kernels at sizes and layouts where launches go wrong, random regions, real models. Here for 9.0 and
some of them. All, for any of 80, 90 and 100, in half an hour, and in less where Triton's cache knows them::

    PRETENDED_GPU=80 python -m pytest -s tests/gpu/test_pretended_gpu.py
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import Final

import pytest

import kernel_tools

ROOT: Final = pathlib.Path(__file__).parents[2]
CAPABILITY: Final = os.environ.get("PRETENDED_GPU", "90")
EVERYTHING: Final = "PRETENDED_GPU" in os.environ
#: Where the tests for a GPU are that are run, and the least numbers of tests, launches and compiled kernels.
SOME: Final = (
    ("rows/run", "rows/test_row_functions.py", "nn/test_group_norm.py", "optim/test_adam.py", "launch"), (190, 450, 150)
)  # fmt: skip
ALL: Final = (("",), (600, 1500, 700))
#: What is wrong with a kernel -> programs and elements of a launch, warps, its count, and what is said of it.
WRONG: Final = {
    "spills": (1, 4096, 1, 3, "bytes of local memory a thread"),
    "grid": (0, 16, 4, 3, "has a grid of"),
    "constant": (1, 16, 4, 1, "CompilationError"),
    "approximation": (1, 128, 4, 3, "tests/tools/approximations.py says nothing"),
    "address": (1, 16, 4, 3, "that divides by 16, and got"),
    "dtype": (1, 16, 4, 3, "and got torch.int32"),
    "count": (1, 16, 4, 16, "that divides by 16, and got 17"),
    "nothing": (1, 16, 4, 3, ""),
}


def run(*arguments: str, **variables: str) -> str:
    """What a program of Python prints that can import what tests share; it has to succeed."""
    env = {
        **os.environ,
        **variables,
        "PRETENDED_GPU": CAPABILITY,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "tools"), str(ROOT / "tests" / "gpu"))),
    }
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=env)
    print(done.stdout)
    return done.stdout + done.stderr[-2000:] * bool(done.returncode)


def pytest_with_plugin(*arguments: str, **variables: str) -> str:
    """What pytest prints with the plugin."""
    plugin = ("-m", "pytest", "-p", "pretended_gpu", "-q", "--tb=short", "-p", "no:cacheprovider")
    return run(*plugin, *arguments, **variables)


def check(output: str, least: tuple[int, ...] = (1, 1, 1)) -> None:
    """Nothing failed, and there were at least so many tests, launches and compiled kernels."""
    patterns = (r"(\d+) passed", r"launched (\d+) times", r"times, (\d+) compiled")
    found = [int(match[1]) if (match := re.search(pattern, output)) else 0 for pattern in patterns]
    assert not re.search(r" failed| error|[1-9]\d* faults", output), output[-4000:]
    assert all(number >= wanted for number, wanted in zip(found, least, strict=True)), output[-2000:]


@kernel_tools.compiles
@pytest.mark.slow
def test_every_launch_of_the_tests_keeps_its_promises() -> None:
    folders, least = ALL if EVERYTHING else SOME
    check(pytest_with_plugin("-m", "gpu and not slow", *(f"tests/kernels/{folder}" for folder in folders)), least)


@kernel_tools.compiles
@pytest.mark.slow
def test_kept_launches_random_regions_and_sizes_where_launches_go_wrong() -> None:
    """In one process, which takes longer to start than for some of them."""
    some = {} if EVERYTHING else {"PRETENDED_SIZES": "some", "PRETENDED_REGIONS": "10"}
    files = (f"tests/gpu/pretended_{what}.py" for what in ("launches", "sizes", "regions"))
    output = pytest_with_plugin(*files, **some)
    check(output, (60, 700, 230))
    assert int(re.search(r"random programs, triton: (\d+)", output)[1]) >= 10  # type: ignore[index]


@kernel_tools.compiles
@pytest.mark.slow
def test_real_models() -> None:
    chosen = () if EVERYTHING else ("cnn-wide", "--dtype", "bfloat16")
    output = run("tests/tools/zoo_launches.py", *chosen, "--capability", CAPABILITY)
    done = re.search(r"\d+ launches of \d+ compiled kernels for sm_\d+, (\d+) spills\n$", output)
    assert done is not None, output[-4000:]
    assert int(done[1]) <= (0 if CAPABILITY == "90" else 8), "a number that ptxas keeps in memory, for more warps"
    waiting = [line for line in output.splitlines() if "not captured" in line]
    assert all("modeling_wav2vec2.py" in line for line in waiting), waiting  # which asks labels for their maximum


@kernel_tools.compiles
def test_a_number_a_row_may_be_stored_narrow_and_a_tile_not() -> None:
    from zoo_launches import narrow  # which wants Triton

    tile = "    tl.store(out_0 + (row * COLUMNS)[:, None] + column, value_4, mask=inside)\n"
    number = "    tl.store(out_1 + row, tl.reshape(value_3, (ROWS,)), mask=within)\n"
    load = "    value_0 = tl.load(in_0 + (row * COLUMNS)[:, None] + column, mask=inside, other=0.0)\n"
    assert [*narrow(load + number, 16, 4)] == []
    assert [*narrow(load + number + tile, 8, 4)] == ["loads 8 bytes at once", "stores 4 bytes at once"]
    assert [*narrow(load + tile, 16, 16)] == []


@pytest.mark.slow
@kernel_tools.compiles
def test_what_is_wrong_fails(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_wrong.py").write_text(
        f"""
import pytest, torch, triton, triton.language as tl

@triton.jit
def wrong(x, y, count, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    value = tl.load(x + places).to(tl.float32)
    if FAULT == "constant":
        value *= count.to(tl.float32)
    if FAULT == "approximation":
        value = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [value], tl.float32, True, 1)
    total = value
    if FAULT == "spills":
        for other in range(count):
            value = tl.load(x + places + other) + value * value
            total += value * tl.sum(value)
    tl.store(y + places, total + value)

@pytest.mark.parametrize(("fault", "what"), {WRONG}.items())
def test_wrong(fault, what):
    x = torch.zeros(1 << 15, device="cuda")
    grid, block, warps, count, _ = what
    compiled = wrong[(grid,)](x, x, count, fault, BLOCK=block, num_warps=warps)
    again = {{"address": (x[1:], x, count), "dtype": (x, x.int(), count), "count": (x, x, 1 + count)}}.get(fault)
    if again is not None:
        compiled[(1, 1, 1)](*again, fault, block)
""",
        encoding="utf-8",
    )
    output = pytest_with_plugin(str(tmp_path / "test_wrong.py"), "--rootdir", str(tmp_path), "-c", os.devnull)
    assert "7 failed, 1 passed" in output, output
    assert all(said in output for *_, said in WRONG.values()), output
