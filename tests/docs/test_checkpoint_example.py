"""examples/checkpoint.py: its files are whole or not there, and a run that is often killed ends like any other.

The processes to kill are forked from one that has imported everything, since importing takes longer than all the rest.
"""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxprec
from examples import checkpoint as example

ROOT = Path(__file__).parents[2]
STEPS, KILLS = 18, 3
SIZE = ["--steps", str(STEPS), "--every", "1", "--width", "2", "--batch", "16"]


def forked(folder: Path) -> int:
    """A process that trains on in ``folder`` and writes to ``folder/log``; its id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with (folder / "log").open("a") as sys.stdout:
                example.main([*SIZE, "--folder", str(folder)])
            status = 0
        finally:
            os._exit(status)
    return pid


def reported(folder: Path) -> list[int]:
    """The steps that the log calls safe."""
    log = (folder / "log").read_text() if (folder / "log").exists() else ""
    return [int(line[5:13]) for line in log.splitlines() if " is safe" in line]


def opened(folder: Path) -> set[tuple[str, int]]:
    """Unfinished files, and when they were opened or written to last."""
    found: set[tuple[str, int]] = set()
    for part in folder.glob("*.part"):
        try:
            found.add((part.name, part.stat().st_mtime_ns))
        except FileNotFoundError:
            continue  # finished meanwhile
    return found


def until(condition: Any, pid: int) -> bool:
    """Wait for it; False: the process has ended."""
    limit = time.monotonic() + 60
    while not condition():
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        assert time.monotonic() < limit, "no checkpoint within a minute"
        time.sleep(2e-4)
    return True


def kill_many_times(folder: Path) -> Iterator[dict[str, Any]]:
    """Train with ``kill -9`` at random moments, most of them within a save; what was found after each."""
    chance = random.Random(0)
    for _ in range(KILLS):
        first = len(reported(folder)) + chance.choice((0, 0, 1, 2))
        pid = forked(folder)
        ended = not until(lambda first=first: len(reported(folder)) >= first, pid)
        if not ended:
            before = opened(folder)
            ended = not until(lambda before=before: opened(folder) - before, pid)
        if ended:
            return
        time.sleep(chance.choice((0, 0, chance.uniform(0, 0.01))))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        every = [torch.load(path, weights_only=True)["done"] for path in example.checkpoints(folder)]
        yield {"safe": max(reported(folder), default=0), "found": every, "unfinished": len(opened(folder))}


def serve(folder: str) -> None:
    """In a process of its own: the kills in one folder, a run without any in another; what was found, as JSON."""
    torch.set_num_threads(1)
    model, _ = fxprec.convert(example.DigitsCNN(2))  # imports what the processes below will need. (No backward pass:
    example.AdamW(model.parameters())  # where torch sees a GPU, autograd's threads would not survive a fork.)
    with torch.no_grad():
        model(torch.zeros(2, 1, 28, 28))
    killed, straight = Path(folder, "killed"), Path(folder, "straight")
    for each in (killed, straight):
        each.mkdir()
    beside = forked(straight)
    found = [*kill_many_times(killed)]
    assert os.waitstatus_to_exitcode(os.waitpid(beside, 0)[1]) == 0
    print(json.dumps(found))


def python(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300, stdout=subprocess.PIPE)
    return done.stdout.decode()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(*as_bytes)
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork and SIGKILL")
def test_kill_9_loses_at_most_the_checkpoint_being_written(tmp_path: Path):
    code = "import sys, tests.docs.test_checkpoint_example as here; here.serve(sys.argv[1])"
    found = json.loads(python("-c", code, str(tmp_path)))
    assert len(found) >= KILLS // 2
    assert sum(after["unfinished"] for after in found) >= 2, "the kills did not hit saves"
    newest = [max(after["found"], default=0) for after in found]
    for after, done in zip(found, newest, strict=True):
        assert done - after["safe"] in (0, 1), after  # 1: whole, and killed before the log could say so
    assert newest[-1] > newest[0]
    last = python("examples/checkpoint.py", *SIZE, "--folder", str(tmp_path / "killed"))
    assert f"going on after step {newest[-1]}" in last
    names = [f"step-{STEPS - 1:08}.pt", f"step-{STEPS:08}.pt"]
    for name in names:
        ours, straight = (torch.load(tmp_path / run / name, weights_only=True) for run in ("killed", "straight"))
        assert ours["done"] == straight["done"]
        assert same(ours, straight), name
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["log", *names]


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    sync, replace = os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        calls.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        sync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        calls.append(f"rename {source.name} to {target.name}")
        assert torch.load(source, weights_only=True) == {"done": 1}
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    example.save(tmp_path / "step-00000001.pt", {"done": 1})
    wanted = ["sync file", "rename step-00000001.pt.part to step-00000001.pt", "sync folder"]
    assert calls == (wanted if os.name == "posix" else wanted[:2])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.pt"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "step-00000001.pt"
    example.save(path, {"done": 1})

    def full(values: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        example.save(path, {"done": 2})
    assert example.newest(tmp_path) == {"done": 1}


def test_damaged_files_are_passed_over_aloud_and_never_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert example.newest(tmp_path) is None
    for done in (1, 2, 3):
        example.save(tmp_path / f"step-{done:08}.pt", {"done": done, "weights": torch.ones(100)})
    whole = (tmp_path / "step-00000003.pt").read_bytes()
    (tmp_path / "step-00000004.pt.part").write_bytes(whole)
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "step-00000003.pt").write_bytes(whole[:length])
        found = example.newest(tmp_path)
        assert found is not None and found["done"] == 2
        assert "step-00000003.pt is damaged, trying the one before it" in capsys.readouterr().out
    for path in example.checkpoints(tmp_path):
        path.write_bytes(whole[:-1])
    with pytest.raises(RuntimeError, match=r"every checkpoint in .* is damaged; move them away to start anew"):
        example.newest(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:float16 on a CPU:UserWarning")
def test_it_goes_on_at_another_level_and_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    size = ["--width", "2", "--batch", "4", "--every", "2", "--folder", str(tmp_path)]
    example.main([*size, "--steps", "3"])
    assert [path.name for path in example.checkpoints(tmp_path)] == ["step-00000002.pt", "step-00000003.pt"]
    capsys.readouterr()
    example.main([*size, "--steps", "4", "--level", "O2", "--dtype", "float16", "--keep", "1"])
    printed = capsys.readouterr().out
    assert "going on after step 3" in printed and "step-00000004.pt is safe" in printed
    (last,) = (torch.load(path, weights_only=True) for path in example.checkpoints(tmp_path))
    assert last["done"] == 4 and last["scaler"]["scale"] > 1
    assert all(bool(value.isfinite().all()) for value in last["model"].values())
    with pytest.raises(SystemExit):
        example.main(["--every", "0"])
