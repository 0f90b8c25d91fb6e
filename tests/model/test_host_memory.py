"""keep_memory: what malloc keeps is not faulted in again, and where it cannot be told a warning says so."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

import fxprec
from fxprec import host_memory

of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another malloc")


@pytest.mark.slow
@of_glibc
def test_memory_that_is_kept_is_not_faulted_in_again() -> None:
    """In a process of its own: what is told to malloc stays so."""
    program = """if True:
        import resource, sys, torch, fxprec
        def faults(megabytes=40):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(megabytes * 2**20 // 4)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert min(faults() for _ in range(3)) > 5000
        assert fxprec.keep_memory()
        faults(200)  # room for the next ones, wherever small blocks fall
        assert max(faults() for _ in range(3)) < 100
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@of_glibc
def test_of_what_a_step_frees_some_is_kept() -> None:
    """Steps of eleven blocks of 4 MB; not all of those of 32, and nothing where the user says so.

    In a process without torch, where nothing else lies on the heap: whatever does keeps what lies below it.
    """
    program = """if True:
        import ctypes, resource, runpy, sys, types
        sys.modules["fxprec.errors"] = types.SimpleNamespace(UnusedSettingWarning=UserWarning)
        keep_some_memory = runpy.run_path(sys.argv[1])["keep_some_memory"]
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        def faulted():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        def step(blocks):
            before = faulted()
            held = [libc.malloc(4 << 20) for _ in range(blocks)]
            for block in held:
                ctypes.memset(block, 1, 4 << 20)
            for block in held:
                libc.free(block)
            return faulted() - before
        given_back = [step(11) for _ in range(4)][-1]
        before = faulted()
        keep_some_memory()
        itself = faulted() - before
        keep_some_memory()  # once
        step(11)
        print(given_back, itself, step(11), [step(32) for _ in range(3)][-1])
    """

    def told(**surroundings: str) -> list[int]:
        command = [sys.executable, "-c", program, host_memory.__file__]
        done = subprocess.run(command, env=os.environ | surroundings, capture_output=True, text=True, check=True)
        return [*map(int, done.stdout.split())]

    given_back, itself, kept, of_more = told()
    assert given_back > 10_000
    assert itself < 100 and kept < 100 and of_more > 10_000
    assert told(MALLOC_TRIM_THRESHOLD_=str(1 << 20))[2] > 10_000


def test_convert_keeps_some_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    monkeypatch.setattr(sys.modules["fxprec.convert"], "keep_some_memory", lambda: kept.append(True))
    fxprec.convert(nn.Linear(2, 2))
    assert kept == [True]
    with pytest.raises(fxprec.ConversionError):
        fxprec.convert(nn.Linear(2, 2, dtype=torch.complex64))
    assert kept == [True]


def test_without_room_for_the_block_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    host_memory.keep_some_memory.cache_clear()
    monkeypatch.setattr(host_memory, "_BLOCK", sys.maxsize - 100)
    host_memory.keep_some_memory()


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
