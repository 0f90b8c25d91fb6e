"""C++ that is compiled where it runs: found again on disk, refused where others may write, and errors that say why."""

from __future__ import annotations

import multiprocessing
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxprec.kernels.cpu import cpp

SOURCE = 'extern "C" int answer() { return 42; }\n'

pytestmark = pytest.mark.skipif(bool(cpp.why_no_compiler()), reason=cpp.why_no_compiler())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and a package whose sources lie in a folder of the test."""
    monkeypatch.setenv("FXPREC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cpp, "files", lambda _package: tmp_path)
    (tmp_path / "answer.cpp").write_text(SOURCE)
    cpp.compiled.cache_clear()
    yield tmp_path
    cpp.compiled.cache_clear()


def libraries(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "cpp").glob("*.so"))


def test_it_is_compiled_once_and_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpp.compiled("answer.cpp").answer() == 42
    (library,) = libraries(folder)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    cpp.compiled.cache_clear()
    monkeypatch.setattr(cpp, "_compile", lambda *_: pytest.fail("it is there"))
    assert cpp.compiled("answer.cpp").answer() == 42


def test_another_source_or_cpu_is_another_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpp.compiled("answer.cpp")
    (folder / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    cpp.compiled.cache_clear()
    assert cpp.compiled("answer.cpp").answer() == 43
    monkeypatch.setattr(cpp, "_cpu", lambda: "another one")
    cpp.compiled.cache_clear()
    assert cpp.compiled("answer.cpp").answer() == 43
    assert len(libraries(folder)) == 3


def test_what_the_compiler_says_is_told_and_nothing_is_left(folder: Path) -> None:
    (folder / "answer.cpp").write_text("no C++ at all")
    with pytest.raises(cpp.CompilerError, match="failed with status 1") as caught:
        cpp.compiled("answer.cpp")
    assert "error" in str(caught.value)
    assert not [*(folder / "cache" / "cpp").iterdir()]


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(folder: Path, mode: int) -> None:
    cpp.compiled("answer.cpp")
    cpp.compiled.cache_clear()
    (folder / "cache" / "cpp").chmod(mode)
    with pytest.raises(cpp.CompilerError, match="is not run"):
        cpp.compiled("answer.cpp")


def test_a_library_that_others_may_write_to_is_refused(folder: Path) -> None:
    cpp.compiled("answer.cpp")
    cpp.compiled.cache_clear()
    libraries(folder)[0].chmod(0o777)
    with pytest.raises(cpp.CompilerError, match="is not run"):
        cpp.compiled("answer.cpp")


@pytest.mark.parametrize(("cxx", "path"), [("not-a-compiler", None), (None, "/nowhere")])
def test_without_a_compiler(cxx: str | None, path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    if path is not None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", path)
    why = cpp.why_no_compiler()
    assert why.startswith("no C++ compiler was found") and (cxx or "g++") in why
    with pytest.raises(cpp.CompilerError, match="Install g\\+\\+"):
        cpp.compiled("answer.cpp")


def test_two_processes_at_once(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_child) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(libraries(folder)) == 1


def _child() -> None:
    os._exit(0 if cpp.compiled("answer.cpp").answer() == 42 else 1)
