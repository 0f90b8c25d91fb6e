"""Plant the faults of ``planted_faults.toml`` one at a time, and say which the tests find.

A command, from the root of the project::

    python tests/tools/planted.py                  each fault against all tests, those near it first
    python tests/tools/planted.py --near           against those near it alone
    python tests/tools/planted.py --core           against those of ``make check`` alone
    python tests/tools/planted.py --only 3 17      some of them, by their place in the table

Each fault gets a copy of the tracked files as they are now, so that nothing of this tree is changed; tests run until
the first one fails. The status is 1 where a fault was not found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TABLE: Final = Path(__file__).with_name("planted_faults.toml")

#: What pytest says first of a test that failed, or of a file that it could not import.
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One row of the table, which documents the fields.

    Raises:
        ValueError: ``was`` does not stand in the file, or more than once.
    """

    room: str
    says: str
    file: str
    was: str
    becomes: str
    near: str

    def planted(self, source: str) -> str:
        """Return the file's text with the fault in it."""
        if (count := source.count(self.was)) != 1:
            raise ValueError(
                f"{self.file} has {count} times {self.was!r}, for {self.says!r}: change its row in {TABLE}"
            )
        return source.replace(self.was, self.becomes)


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: the first test that failed, "" where none did; seconds until then."""

    room: str
    says: str
    found_by: str
    seconds: float


def faults() -> list[Fault]:
    """Return the table."""
    return [Fault(**row) for row in tomllib.loads(TABLE.read_text())["fault"]]


def look_for(fault: Fault, which: str = "all") -> Outcome:
    """Plant a fault in a copy and run tests until one fails: "all", those "near" it, or the "core"."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        copy_project(copy)
        path = copy / fault.file
        path.write_text(fault.planted(path.read_text()))
        runs = {"core": [["-m", "core"]], "near": [[fault.near]], "all": [[fault.near], []]}[which]
        found_by = next(filter(None, (_first_failure(copy, run) for run in runs)), "")
    return Outcome(fault.room, fault.says, found_by, round(time.perf_counter() - started, 1))


def copy_project(to: Path) -> None:
    """Copy the tracked files, and links as links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def _first_failure(copy: Path, arguments: list[str]) -> str:
    """Run pytest in a copy; return the first test that failed, or "".

    Raises:
        RuntimeError: pytest ended for another reason.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(copy)}  # before an installed one
    run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return ""
    failed = _FAILED.search(run.stdout)
    if failed is None:
        raise RuntimeError(
            f"{' '.join(command)} ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
        )
    return failed[1]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its status."""
    parser = argparse.ArgumentParser(description="Plant faults one at a time, and say which the tests find.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--core", action="store_const", dest="which", const="core", help="the tests of make check alone")
    which.add_argument("--near", action="store_const", dest="which", const="near", help="the tests near each alone")
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="some, by their place in the table, from 1 on")
    parser.add_argument("--output", type=Path, metavar="FILE", help="what was found, as JSON")
    asked = parser.parse_args(arguments)
    table = faults()
    chosen = [table[number - 1] for number in asked.only] if asked.only else table
    outcomes: list[Outcome] = []
    for fault in chosen:
        outcomes.append(outcome := look_for(fault, asked.which or "all"))
        print(f"{outcome.seconds:6.1f} s  {fault.room:9} {fault.says}: {outcome.found_by or 'NOT FOUND'}", flush=True)
        if asked.output is not None:
            asked.output.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    missed = sum(not outcome.found_by for outcome in outcomes)
    print(f"{len(outcomes) - missed} of {len(outcomes)} faults found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
