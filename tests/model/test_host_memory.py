"""keep_memory: what malloc keeps is not faulted in again, and where it cannot be told a warning says so."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

import fxprec
from fxprec import host_memory


@pytest.mark.skipif(sys.platform != "linux", reason="page faults as Linux counts them")
def test_memory_that_is_kept_is_not_faulted_in_again() -> None:
    """In a process of its own: what is told to malloc stays so."""
    program = """if True:
        import resource, sys, torch, fxprec
        def faults(megabytes=40):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(megabytes * 2**20 // 4)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert min(faults() for _ in range(3)) > 5000
        if not fxprec.keep_memory():
            sys.exit("not glibc")
        faults(200)  # room for the next ones, wherever small blocks fall
        assert max(faults() for _ in range(3)) < 100
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if "not glibc" in done.stderr:
        pytest.skip("another C library")
    assert done.returncode == 0, done.stderr


class Library:
    """A C library whose malloc takes what ``takes`` says yes to; None: it has no mallopt."""

    def __init__(self, takes) -> None:
        if takes is not None:
            self.mallopt = takes


@pytest.mark.parametrize(
    ("platform", "takes"), [("linux", None), ("linux", lambda option, value: option == -1), ("darwin", lambda *_: 1)]
)
def test_where_malloc_is_not_glibcs_a_warning_says_so(platform, takes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(takes))
    with pytest.warns(fxprec.UnusedSettingWarning, match="changes nothing.*jemalloc") as caught:
        assert fxprec.keep_memory() is False
    assert caught[0].filename == __file__


def test_malloc_is_told_both(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(lambda *option: told.append(option) or 1))
    assert fxprec.keep_memory() is True
    assert told == [*host_memory._KEPT]
