"""What ``benchmarks.forms`` found: each form's time, the table on the screen, and the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.table import Table

from benchmarks.measure.forms import Direction

__all__ = ["COLUMNS", "Found", "Timed", "table"]

#: Of a form, as a file lists them.
COLUMNS: Final = ("us", "rows", "block", "warps", "stages", "resident", "programs")


@dataclass(frozen=True)
class Timed:
    """A form and its time in microseconds. ``resident``: 0 where each program takes one tile."""

    us: float
    rows: int
    block: int
    warps: int
    stages: int
    resident: int
    programs: int

    def __str__(self) -> str:
        said = [f"{self.rows} x {self.block}", _several(self.warps, "warp")]
        if self.resident:
            said += [_several(self.stages, "stage"), _several(self.programs, "program")]
        return ", ".join(said)


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


@dataclass(frozen=True)
class Found:
    """The forms of one kernel.

    Attributes:
        moved: bytes that it must move.
        copied: bytes a second of a large copy.
        present: the form that fxprec gives it.
        others: the fastest first.
        failed: what those say that did not compile or ran out of something, and "wrong: ..." where results differ.
    """

    region: str
    direction: Direction
    kind: str
    rows: int
    columns: int
    moved: int
    copied: float
    present: Timed
    others: tuple[Timed, ...]
    failed: tuple[str, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether a form gives other results."""
        return any(said.startswith("wrong") for said in self.failed)

    @property
    def best(self) -> Timed:
        return min((self.present, *self.others), key=lambda timed: timed.us)

    def share(self, timed: Timed) -> float:
        """Of the copy's bandwidth."""
        return self.moved / (1e-6 * timed.us) / self.copied

    def as_dict(self) -> dict[str, Any]:
        """For a file: forms as lists, in the order of ``COLUMNS``."""
        return {
            "region": self.region, "pass": self.direction, "kind": self.kind, "rows": self.rows,
            "columns": self.columns, "bytes": self.moved, "share": self.share(self.present),
            "best_share": self.share(self.best), "present": _cells(self.present), "best": _cells(self.best),
            "forms": [_cells(timed) for timed in self.others], "failed": dict(Counter(self.failed)),
        }  # fmt: skip


def _cells(timed: Timed) -> list[float]:
    return [getattr(timed, column) for column in COLUMNS]


def table(model: str, found: Sequence[Found], top: int) -> Table:
    """The present form of each kernel, and the fastest ``top`` others."""
    made = Table(title=f"{model}: forms of its regions' kernels")
    for name in ("region", "pass", "form", "us", "% copy"):
        made.add_column(name, justify="right" if name in ("us", "% copy") else "left")
    for each in found:
        for timed in sorted((each.present, *each.others[:top]), key=lambda timed: timed.us):
            now = timed is each.present
            cells = (f"{timed}{'  (present)' if now else ''}", f"{timed.us:.1f}", f"{100 * each.share(timed):.0f}")
            made.add_row(each.region, each.direction, *cells, style="bold" if now else None)
        if each.failed:
            made.add_row(each.region, each.direction, f"{len(each.failed)} failed: {each.failed[0]}", style="yellow")
        made.add_section()
    return made
