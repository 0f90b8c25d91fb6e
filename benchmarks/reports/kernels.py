"""What ``benchmarks.kernels`` found: rows, their goal, the table on the screen, JSON and markdown."""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
import re
import subprocess
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

import fxprec
from benchmarks.measure.timing import Series

__all__ = ["COLUMNS", "GOAL", "Report", "Row", "machine"]

#: Share of the copy's bandwidth that a kernel is to reach.
GOAL: Final = 0.85
#: Two medians that lie no further apart are the same.
_SAME: Final = 0.02
COLUMNS: Final = (
    "kernel", "shape", "pass", "us", "GB/s", "% copy", "% same size", "x eager", "x compile", "memory", "noise", "goal",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The forward or the backward of a kernel at a shape; without ``series`` it failed.

    Attributes:
        moved: bytes; None where arithmetic is the limit.
        copied: bytes a second of the large copy.
        trouble: "", or why its figures are worth nothing.
    """

    kernel: str
    shape: str
    direction: str
    moved: int | None
    copied: float
    series: dict[str, Series]
    trouble: str = ""

    @property
    def microseconds(self) -> float:
        return self.series["ours"].median

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second."""
        return self.moved / (1e-6 * self.microseconds) if self.moved else None

    @property
    def share(self) -> float | None:
        """Of the bandwidth of the large copy."""
        return self.bandwidth / self.copied if self.bandwidth else None

    @property
    def share_of_same_size(self) -> float | None:
        return self.series["copy"].median / self.microseconds if "copy" in self.series else None

    @property
    def noise(self) -> float:
        return abs(self.series["ours again"].median / self.microseconds - 1)

    def times(self, variant: str) -> float:
        """Time of a variant over ours."""
        return self.series[variant].median / self.microseconds

    @property
    def memory(self) -> float | None:
        """Ours over eager's."""
        eager = self.series["eager"].memory
        return self.series["ours"].memory / eager if eager else None

    @property
    def goal(self) -> str:
        """ "pass", or what it misses."""
        if self.trouble:
            return self.trouble
        missed = []
        if self.share is not None and self.share < GOAL:
            missed.append("bandwidth")
        if self.times("compile") < 1 - max(self.noise, _SAME):
            missed.append("compile")
        return f"misses {' and '.join(missed)}" if missed else "pass"

    def cells(self) -> tuple[str, ...]:
        """As ``COLUMNS`` has them."""
        place = (self.kernel, self.shape, self.direction)
        if not self.series:
            return (*place, *("",) * 8, self.trouble)
        bandwidth = "" if self.bandwidth is None else f"{self.bandwidth / 1e9:.0f}"
        shares = [_percent(self.share), _percent(self.share_of_same_size)]
        ratios = [f"{self.times(variant):.2f}" for variant in ("eager", "compile")]
        memory = "" if self.memory is None else f"{self.memory:.2f}"
        return (
            *place, f"{self.microseconds:.1f}", bandwidth, *shares, *ratios, memory, _percent(self.noise), self.goal
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kernel": self.kernel, "shape": self.shape, "pass": self.direction, "bytes": self.moved, "goal": self.goal,
        }  # fmt: skip
        if self.series:
            found |= {
                "share_of_copy": self.share, "share_of_same_size": self.share_of_same_size, "noise": self.noise,
                "x_eager": self.times("eager"), "x_compile": self.times("compile"), "memory_over_eager": self.memory,
                "microseconds": {name: series.as_dict() for name, series in self.series.items()},
            }  # fmt: skip
        return found


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


@dataclass
class Report:
    """Rows as they come in, written at each one: a run that is cut short leaves what it has."""

    machine: dict[str, str]
    dtype: str
    copied: float
    folder: pathlib.Path | None
    check: bool = False
    quick: bool = False
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    @property
    def failed(self) -> bool:
        """Whether a row is wrong, or there is none."""
        return any(row.trouble for row in self.rows) or not self.rows

    @property
    def headline(self) -> str:
        good = sum(row.goal == "pass" for row in self.rows)
        shares = sorted(row.share for row in self.rows if row.series and row.share is not None)
        middle = f", median {_percent(shares[len(shares) // 2])} of the copy's bandwidth" if shares else ""
        late = f"; no time for {', '.join(self.left_out)}" if self.left_out else ""
        bad = sum(bool(row.trouble) for row in self.rows)
        wrong = f"; {bad} wrong or failed" if bad else ""
        if self.check:
            return f"{len(self.rows)} rows ran{wrong}{late}; times mean nothing at these sizes"
        return f"{good} of {len(self.rows)} rows pass{middle}{wrong}{late}"

    @property
    def title(self) -> str:
        where = f"{self.machine['device']}, torch {self.machine['torch']}, triton {self.machine['triton']}"
        return f"{where}, {self.dtype}, copy {self.copied / 1e9:.0f} GB/s, {self.machine['date']}"

    def show(self, console: Console) -> None:
        table = Table(title=self.title)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("kernel", "shape", "pass", "goal") else "right")
        for row in self.rows:
            color = "red" if row.trouble else None if self.check else "green" if row.goal == "pass" else "yellow"
            table.add_row(*self._cells(row), style=color)
        console.print(table)
        console.print(self.headline, highlight=False)

    def _cells(self, row: Row) -> tuple[str, ...]:
        cells = row.cells()
        return (*cells[:-1], row.trouble or "ran") if self.check else cells

    def markdown(self) -> str:
        lines = [f"{self.title}, {self.seconds:.0f} s", "", f"{self.headline}.", ""]
        lines += [f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS))]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in self._cells(row))} |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine, "dtype": self.dtype, "copy_bytes_a_second": self.copied, "goal": GOAL,
            "check": self.check, "seconds": round(self.seconds, 1), "left_out": self.left_out,
            "rows": [row.as_dict() for row in self.rows],
        }  # fmt: skip

    def write(self) -> None:
        """JSON and markdown, named after device, dtype and date."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = ["kernels", *(["check"] if self.check else []), *(["quick"] if self.quick else [])]
        parts += [self.machine["device"], self.dtype, self.machine["date"][:10]]
        stem = "-".join(re.sub(r"[^\w.]+", "_", part) for part in parts)
        (self.folder / f"{stem}.json").write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        (self.folder / f"{stem}.md").write_text(self.markdown(), encoding="utf-8")


def machine(device: torch.device) -> dict[str, str]:
    """Device, versions and date."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": name, "torch": torch.__version__, "triton": triton, "cuda": str(torch.version.cuda),
        "python": platform.python_version(), "fxprec": fxprec.__version__, "revision": _revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        run = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip()
