"""Rows of ``benchmarks.memory``: bytes by category, ratios to eager autocast, the budget, table and figure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.table import Table

from benchmarks.measure.plots import stacked
from benchmarks.measure.variants import BASELINE

__all__ = ["BUDGETS", "CATEGORIES", "Row", "draw", "ratio", "table", "verdicts"]

CATEGORIES: Final = ("weights", "optimizer", "shadows", "gradients", "activations")
#: Device -> what the peak of a GPT may be over eager autocast's, by DESIGN.
BUDGETS: Final = {"cpu": 0.8, "cuda": 0.5}
_MB: Final = 1e6


@dataclass(frozen=True)
class Row:
    """Bytes at the peak of a step of a variant, by ``CATEGORIES``.

    Attributes:
        phase: of the step, in which the peak is: forward, backward, update.
        kept: what lives where the backward begins, beyond weights, optimizer's state and shadows.
    """

    workload: str
    shape: str
    variant: str
    weights: int
    optimizer: int
    shadows: int
    gradients: int
    activations: int
    phase: str
    kept: int

    @property
    def peak(self) -> int:
        return sum(getattr(self, category) for category in CATEGORIES)

    @property
    def step(self) -> int:
        """Without weights and the optimizer's state."""
        return self.peak - self.weights - self.optimizer

    def as_dict(self, rows: Sequence[Row]) -> dict[str, Any]:
        """With ratios to eager autocast's row of the same model."""
        over = {"ratio": ratio(self, rows), "step_ratio": ratio(self, rows, lambda row: row.step)}
        return asdict(self) | {"peak": self.peak, "step": self.step} | over


def ratio(row: Row, rows: Iterable[Row], figure: Callable[[Row], int] = lambda row: row.peak) -> float | None:
    """A figure over eager autocast's of the same workload; None without it."""
    bases = [figure(each) for each in rows if (each.workload, each.variant) == (row.workload, BASELINE)]
    return figure(row) / bases[0] if bases else None


def verdicts(rows: Sequence[Row], device: str) -> list[str]:
    """Whether fxprec's rows of the GPTs keep DESIGN's budget on a device ("cpu" or "cuda"), a line each."""
    lines = []
    for row in rows:
        over = ratio(row, rows)
        if row.workload.startswith("gpt") and row.variant.startswith(("o1", "o2")) and over is not None:
            met = "met" if over <= BUDGETS[device] else "missed"
            lines.append(f"{row.workload}, {row.variant}: {over:.2f} x autocast, budget {BUDGETS[device]}: {met}")
    return lines


def table(rows: Sequence[Row]) -> Table:
    """Megabytes (1e6 bytes), and ratios to eager autocast."""
    shown = Table(title="Peak of a training step, MB")
    for column in ("model", "variant", *CATEGORIES, "peak", "x", "x step", "kept", "in"):
        shown.add_column(column, justify="left" if column in ("model", "variant", "in") else "right")
    for row in rows:
        figures = [getattr(row, category) / _MB for category in CATEGORIES]
        over = [ratio(row, rows), ratio(row, rows, lambda r: r.step)]
        shown.add_row(
            row.workload, row.variant, *(f"{each:.1f}" for each in (*figures, row.peak / _MB)),
            *("" if each is None else f"{each:.2f}" for each in over), f"{row.kept / _MB:.1f}", row.phase,
        )  # fmt: skip
    return shown


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """A panel a model, a bar a variant, stacked by category."""
    groups = [(name, [*each]) for name, each in itertools.groupby(rows, key=lambda row: row.workload)]
    panels = {
        f"{name} ({found[0].shape}), MB": {
            row.variant: {category: getattr(row, category) / _MB for category in CATEGORIES} for row in found
        }
        for name, found in groups
    }
    stacked(figure, panels)
