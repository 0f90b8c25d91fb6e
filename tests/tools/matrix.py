"""The suite on several versions of torch: ``make matrix``, or ``python tests/tools/matrix.py 2.10.0 2.14.1 -- -k amp``.

Each version has an environment of its own under ``.venvs``, made on first use, with that torch and otherwise the newest
of everything. One table at the end; the exit status is 1 where something failed. Where pip takes torch from PyPI these
are its builds with CUDA, which import without a device: what of their branches asks for none is tested, too, and the
pretended GPU is one of theirs.
"""

from __future__ import annotations

import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Run", "read", "table"]

ROOT: Final = Path(__file__).resolve().parents[2]
ENVIRONMENTS: Final = ROOT / ".venvs"


@dataclass(frozen=True)
class Run:
    """What became of the suite on one version.

    Attributes:
        build: of torch: "cpu", or the version of CUDA that it was built with, such as "cu130".
        failures: names of tests, or what kept them from running.
    """

    torch: str
    build: str
    triton: str
    passed: int
    skipped: int
    seconds: float
    failures: tuple[str, ...]


def read(torch: str, build: str, triton: str, junit: Path, status: int, seconds: float) -> Run:
    """A run from what pytest wrote, and its exit status: 0, or 1 where tests failed; else there is no result."""
    if status not in (0, 1) or not junit.exists():
        return Run(torch, build, triton, 0, 0, seconds, (f"pytest ended with status {status}",))
    cases = [*ET.parse(junit).getroot().iter("testcase")]
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    failures = tuple(dict.fromkeys(f"{case.get('classname')}::{case.get('name')}" for case in bad))
    return Run(torch, build, triton, len(cases) - len(bad) - skipped, skipped, seconds, failures)


def table(runs: Sequence[Run]) -> str:
    """One row a version, and below it the names of what failed."""
    lines = [f"{'torch':<10} {'build':<6} {'triton':<8} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}"]
    for run in runs:
        counts = f"{run.passed:>7} {len(run.failures):>7} {run.skipped:>7} {run.seconds:>8.0f}"
        lines += [f"{run.torch:<10} {run.build:<6} {run.triton:<8} {counts}", *(f"    {name}" for name in run.failures)]
    return "\n".join(lines)


def environment(version: str) -> Path:
    """The Python of an environment with this torch, made where there is none yet."""
    home = ENVIRONMENTS / version
    python, stamp = home / "bin" / "python", home / "installed"
    wanted = (ROOT / "pyproject.toml").read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pinned = ROOT / "constraints.txt"  # CI's torch with CI's Triton: a build for CPUs names none
        pins = ["-c", pinned] if f"torch=={version}\n" in pinned.read_text() else []
        subprocess.run([*pip, *pins, f"torch=={version}", "-e", f"{ROOT}[test]"], check=True, cwd=ROOT)
        stamp.write_text(wanted)
    return python


def run(version: str, arguments: Sequence[str]) -> Run:
    """The suite on one version."""
    start = time.monotonic()
    try:
        python = environment(version)
    except subprocess.CalledProcessError as error:
        return Run(version, "", "", 0, 0, time.monotonic() - start, (f"the environment could not be made: {error}",))
    triton = _told(python, "import importlib.metadata as m; print(m.version('triton'))") or "none"
    build = _told(python, "import torch; print(torch.__version__.partition('+')[2])") or "?"
    junit = ENVIRONMENTS / f"{version}.xml"
    junit.unlink(missing_ok=True)
    start = time.monotonic()
    done = subprocess.run([python, "-m", "pytest", f"--junitxml={junit}", *arguments], check=False, cwd=ROOT)
    return read(version, build, triton, junit, done.returncode, time.monotonic() - start)


def _told(python: Path, code: str) -> str:
    """What a line of Python prints; "" where it fails."""
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def main(arguments: Sequence[str]) -> int:
    """Versions, and after ``--`` arguments for pytest."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    runs: list[Run] = []
    for version in arguments[:split]:
        print(f"== torch {version}", flush=True)
        runs.append(run(version, arguments[split + 1 :]))
    print(table(runs), flush=True)
    return int(not runs or any(each.failures for each in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
