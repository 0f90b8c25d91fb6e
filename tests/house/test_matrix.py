"""The table of ``make matrix``: how it counts, what it names, and when it is red."""

import sys
from pathlib import Path

import pytest
import torch

import matrix

TESTS = """
import pytest

pytestmark = pytest.mark.slow
def test_good(): pass
def test_other(): pass
def test_bad(): assert False
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken(): raise ValueError
def test_error(broken): pass
"""


def run(folder: Path, tests: str, monkeypatch: pytest.MonkeyPatch) -> matrix.Run:
    (folder / "test_some.py").write_text(tests)
    monkeypatch.setattr(matrix, "ENVIRONMENTS", folder)
    monkeypatch.setattr(matrix, "ROOT", folder)
    monkeypatch.setattr(matrix, "environment", lambda version: Path(sys.executable))
    return matrix.run("9.9.9", ["-q", "-p", "no:cacheprovider"])


def test_a_run_is_counted_and_its_failures_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(tmp_path, TESTS, monkeypatch)
    assert (done.torch, done.build, done.passed, done.skipped) == (
        "9.9.9",
        torch.__version__.partition("+")[2],
        2,
        1,
    ) and 0 < done.seconds < 60
    assert done.failures == ("test_some::test_bad", "test_some::test_error")


@pytest.mark.parametrize(("tests", "status"), [("", 5), ("import nowhere", 2)])
def test_no_result_is_red(tests: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_told", lambda *_: "")  # of builds, as the test above has it, in processes
    assert run(tmp_path, tests, monkeypatch).failures == (f"pytest ended with status {status}",)


def test_the_table_and_the_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {
        "2.10.0": matrix.Run("2.10.0", "cpu", "3.6.0", 7000, 12, 601.4, ()),
        "2.14.1": matrix.Run("2.14.1", "cu130", "3.8.0", 6999, 12, 99.5, ("tests.test_a::test_b",)),
    }
    given = []
    monkeypatch.setattr(matrix, "run", lambda version, arguments: (given.append(arguments), runs[version])[1])
    assert matrix.main(["2.10.0", "2.14.1", "--", "-k", "a"]) == 1
    assert (
        capsys.readouterr().out
        == """\
== torch 2.10.0
== torch 2.14.1
torch      build  triton    passed  failed skipped  seconds
2.10.0     cpu    3.6.0       7000       0      12      601
2.14.1     cu130  3.8.0       6999       1      12      100
    tests.test_a::test_b
"""
    )
    assert given == [["-k", "a"]] * 2
    assert matrix.main(["2.10.0"]) == 0
    assert matrix.main([]) == 1
