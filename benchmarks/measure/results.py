"""Where measurements are kept: ``benchmarks/results/DEVICE/NAME.json`` and a PNG beside it.

A file holds what its benchmark gives (every sample, not only medians) and, under ``environment``, the device, the
versions, the commit and the date. It names no path and no host. ``benchmarks.tables`` makes the tables of the pages
from these files.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
import re
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

import fxprec
from fxprec.costs.files import processor_name

__all__ = ["RESULTS", "ResultsError", "device_name", "environment", "load", "save", "save_figure"]

ROOT: Final = pathlib.Path(__file__).parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results"


class ResultsError(ValueError):
    """A file of results is missing or is none; the message says which, and which command writes it."""


def device_name(device: torch.device | None = None) -> str:
    """For people and for folders: "NVIDIA-H200", or a CPU with the threads that torch uses, "AMD-EPYC-2-threads".

    Args:
        device: None: the GPU where there is one, otherwise the CPU.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name = f"{processor_name('cpu')} {threads} thread{'s' if threads > 1 else ''}"
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Device, versions, threads, date, and commit: "+changes" where tracked files differ, "unknown" outside git."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "fxprec": fxprec.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def save(
    name: str, data: dict[str, Any], output: pathlib.Path | None = None, device: torch.device | None = None
) -> pathlib.Path:
    """Write ``data`` and the environment to OUTPUT/DEVICE/NAME.json, floats with six digits; returns the file's path.

    Args:
        name: that of the benchmark, for a run at other settings with them: "step", "step-float16".
        data: what json can hold; ``environment`` is added to it, unless it is there already (as measured at the start).
        output: None: ``benchmarks/results``.
        device: None: the GPU where there is one, otherwise the CPU.

    Raises:
        ValueError: ``data`` holds inf or nan.
    """
    data = {"environment": data.get("environment") or environment(device), **data}
    text = json.dumps(_rounded(data), allow_nan=False)  # also refuses what json cannot hold, before a file is touched
    path = _place(name, output, data["environment"]["device"], "json")
    path.write_text(_laid_out(json.loads(text)) + "\n", encoding="utf-8")
    return path


def load(name: str, device: str, root: pathlib.Path | None = None) -> dict[str, Any]:
    """What ``save`` wrote for a benchmark on a device.

    Raises:
        ResultsError: there is no such file, or it does not hold results.
    """
    root = root or RESULTS
    path = root / device / f"{name}.json"
    if not path.is_file():
        there = sorted(p.parent.name for p in root.glob(f"*/{name}.json"))
        known = f"there are results of {', '.join(there)}" if there else "there are none of any device"
        command = f"python -m benchmarks {name.partition('-')[0]}"
        raise ResultsError(f"no results of {name!r} on {device!r}: {known}; {command!r} writes them")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ResultsError(f"{device}/{path.name} is not JSON ({error}): measure again") from error
    if not isinstance(data, dict) or "environment" not in data:
        raise ResultsError(f"{device}/{path.name} names no environment: measure.results.save did not write it")
    return data


def save_figure(
    name: str,
    draw: Callable[[Any], object],
    output: pathlib.Path | None = None,
    *,
    size: tuple[float, float] = (8.0, 4.5),
    device: torch.device | None = None,
) -> pathlib.Path | None:
    """Write OUTPUT/DEVICE/NAME.png; without matplotlib print that there is none, and return None.

    Args:
        draw: is given an empty ``matplotlib.figure.Figure`` to draw on: nothing global, no window, no display.
        size: in inches, at 120 points an inch.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{name}.png is not written: matplotlib is not installed (pip install 'fxprec[bench]' brings it)")
        return None
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    draw(figure)
    path = _place(name, output, device_name(device), "png")
    figure.savefig(path, metadata={"Software": None})  # the same figures give the same file
    return path


def _place(name: str, output: pathlib.Path | None, device: str, suffix: str) -> pathlib.Path:
    folder = (output or RESULTS) / device
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.{suffix}"


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
    return value


def _laid_out(value: Any, indent: str = "") -> str:
    """JSON with a line for each entry, but lists of plain values, such as samples, on one."""
    deeper = f"{indent} "
    match value:
        case dict() if value:
            lines = [f"{json.dumps(key)}: {_laid_out(each, deeper)}" for key, each in value.items()]
            opened, closed = "{", "}"
        case list() if any(isinstance(each, dict | list) for each in value):
            lines = [_laid_out(each, deeper) for each in value]
            opened, closed = "[", "]"
        case _:
            return json.dumps(value)
    return f"{opened}\n" + ",\n".join(f"{deeper}{line}" for line in lines) + f"\n{indent}{closed}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _commit() -> str:
    # Results that were measured just now are no change of what was measured.
    head = _git("rev-parse", "--short=12", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    if head is None or changes is None:
        return "unknown"
    return f"{head}+changes" if changes else head


def _git(*arguments: str) -> str | None:
    """What git prints, without the newline; None where there is no git, or no repository."""
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
