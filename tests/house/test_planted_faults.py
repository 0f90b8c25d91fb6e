"""The table of planted faults fits the code, and the command that plants them tells what was found."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import planted


def test_there_are_ten_of_each_room() -> None:
    assert Counter(fault.room for fault in planted.faults()) == dict.fromkeys(
        ("passes", "capture", "kernels", "training"), 10
    )


@pytest.mark.parametrize("fault", planted.faults(), ids=lambda fault: fault.says)
def test_each_can_be_planted_and_is_still_python(fault: planted.Fault) -> None:
    source = (planted.ROOT / fault.file).read_text()
    compile(fault.planted(source), fault.file, "exec")
    assert (planted.ROOT / fault.near).is_dir()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one function, one test and one link, whose runs of pytest import no plugins for nothing."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio -p no:pytest_fxprec")
    (tmp_path / "doubled.py").write_text("def doubled(x):\n    return 2 * x\n\n\ndef halved(x):\n    return x / 2\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_doubled.py").write_text(
        "from linked import doubled\n\n\ndef test_doubled():\n    assert doubled(3) == 6\n"
    )
    (tmp_path / "linked.py").symlink_to("doubled.py")
    subprocess.run("git init -q && git add -A", cwd=tmp_path, shell=True, check=True)
    monkeypatch.setattr(planted, "ROOT", tmp_path)
    return tmp_path


def test_a_fault_is_found_by_the_first_test_that_fails(project: Path) -> None:
    fault = planted.Fault("passes", "twice is thrice", "doubled.py", "2 * x", "3 * x", "tests")
    assert planted.look_for(fault).found_by == "tests/test_doubled.py::test_doubled"
    assert "2 * x" in (project / "doubled.py").read_text()  # the tree itself is as it was


def test_a_fault_that_no_test_finds_is_told(project: Path) -> None:
    fault = planted.Fault("passes", "half is a third", "doubled.py", "x / 2", "x / 3", "tests")
    assert planted.look_for(fault).found_by == ""


def test_only_the_tests_that_are_asked_for_run(project: Path) -> None:
    (project / "tests/elsewhere").mkdir()
    (project / "tests/elsewhere/test_nothing.py").write_text("def test_nothing():\n    pass\n")
    subprocess.run("git add -A", cwd=project, shell=True, check=True)
    fault = planted.Fault("passes", "twice is thrice", "doubled.py", "2 * x", "3 * x", "tests/elsewhere")
    assert planted.look_for(fault, "near").found_by == ""
    assert planted.look_for(fault).found_by == "tests/test_doubled.py::test_doubled"


def test_a_row_that_no_longer_fits_is_an_error(project: Path) -> None:
    fault = planted.Fault("passes", "gone", "doubled.py", "4 * x", "3 * x", "tests")
    with pytest.raises(ValueError, match=re.escape("doubled.py has 0 times '4 * x', for 'gone': change its row")):
        planted.look_for(fault)


def test_a_run_that_tells_nothing_is_an_error(project: Path) -> None:
    fault = planted.Fault("passes", "no such folder", "doubled.py", "2 * x", "3 * x", "elsewhere")
    with pytest.raises(RuntimeError, match="no tests ran"):
        planted.look_for(fault)
