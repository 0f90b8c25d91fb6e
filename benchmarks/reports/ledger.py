"""What ``benchmarks.ledger`` finds: rows of its three questions, as tables and for JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.table import Table

__all__ = ["Cost", "Place", "Planted", "Sum", "Variances", "planted_table", "sum_table", "variances_table"]

#: Digits to which the columns are to add up to the error, and below what the error is nothing.
_RELATIVE: Final = 1e-6
_ABSOLUTE: Final = 1e-10


@dataclass(frozen=True)
class Cost:
    """What an audit takes, beside a training step in FP32.

    Attributes:
        seconds, step_seconds: of the processor, on one core.
        run_seconds: of the run that is explained, a part of an audit: most of it without low-precision units.
        peak, step_peak: bytes at most besides weights and the optimizer's state.
        held, step_held: bytes of those two, and of low copies of weights.
    """

    seconds: float
    run_seconds: float
    step_seconds: float
    peak: int
    step_peak: int
    held: int
    step_held: int

    @property
    def times(self) -> float:
        """As long as a step."""
        return self.seconds / self.step_seconds

    @property
    def own_times(self) -> float:
        """As long as a step, but for the run that is explained."""
        return (self.seconds - self.run_seconds) / self.step_seconds

    @property
    def memory(self) -> float:
        """As much as a step."""
        return (self.held + self.peak) / (self.step_held + self.step_peak)

    @property
    def own_memory(self) -> float:
        """As much as a step, but for what is held before and after it."""
        return self.peak / self.step_peak

    def __str__(self) -> str:
        return f"{self.own_times:.1f} ({self.times:.1f}), {self.memory:.1f} ({self.own_memory:.1f})"

    def as_dict(self) -> dict[str, Any]:
        names = ("times", "own_times", "memory", "own_memory")
        return asdict(self) | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Sum:
    """One batch of a model, audited.

    Attributes:
        size, dtype, level: of model and conversion. target: "loss" or "gradients".
        measured: the error. residual: what the columns add up to, less that.
        bend: the sum of |bend| over that of |rounding| and |bend|, of all rows.
        first: the largest row. rows: how many there are.
        remarks: of the ledger.
        cost: of the audit; None where it was not measured.
    """

    model: str
    size: str
    dtype: str
    level: str
    target: str
    measured: float
    residual: float
    bend: float
    first: str
    rows: int
    remarks: tuple[str, ...]
    cost: Cost | None = None

    @property
    def adds_up(self) -> bool:
        """To six digits, or to next to nothing."""
        return abs(self.residual) <= max(_RELATIVE * abs(self.measured), _ABSOLUTE)

    def as_dict(self) -> dict[str, Any]:
        cost = None if self.cost is None else self.cost.as_dict()
        return asdict(self) | {"adds_up": self.adds_up, "cost": cost}


@dataclass(frozen=True)
class Place:
    """A node whose result was rounded to few bits, and the ledger of that run.

    Attributes:
        change: of the loss of a float64 run by the same rounding; at other values, where a ReLU may decide otherwise.
        run_change: of the loss of the run, in which all roundings behind the planted one are drawn anew.
        largest_other: the largest contribution of another row.
        rank: of the node among the rows; 1 is the first. rows: how many there are.
    """

    node: str
    op: str
    change: float
    run_change: float
    largest_other: float
    rank: int
    rows: int

    @property
    def due_by_float64(self) -> bool:
        """Whether the float64 run's loss changes by more than three times the largest other row."""
        return abs(self.change) > 3 * self.largest_other

    @property
    def due_by_run(self) -> bool:
        """Whether the low run's does."""
        return abs(self.run_change) > 3 * self.largest_other

    @property
    def due(self) -> bool:
        """Whether it must be the first row: both say so."""
        return self.due_by_float64 and self.due_by_run

    @property
    def first(self) -> bool:
        return self.rank == 1


@dataclass(frozen=True)
class Planted:
    """All places of a model."""

    model: str
    bits: int
    places: tuple[Place, ...]

    @property
    def due(self) -> int:
        """Places that must be the first row."""
        return sum(place.due for place in self.places)

    @property
    def found(self) -> int:
        """Those of them that are."""
        return sum(place.due and place.first for place in self.places)

    @property
    def first(self) -> int:
        """All that are."""
        return sum(place.first for place in self.places)

    @property
    def by_float64(self) -> tuple[int, int]:
        """Places that are due by the float64 run alone, and those of them that are first."""
        due = [place for place in self.places if place.due_by_float64]
        return len(due), sum(place.first for place in due)

    @property
    def by_run(self) -> tuple[int, int]:
        """The same by the low run alone."""
        due = [place for place in self.places if place.due_by_run]
        return len(due), sum(place.first for place in due)

    @property
    def median_elsewhere(self) -> float | None:
        """The median rank of the others."""
        ranks = [place.rank for place in self.places if not place.due]
        return statistics.median(ranks) if ranks else None

    def as_dict(self) -> dict[str, Any]:
        places = [asdict(place) | {"due": place.due} for place in self.places]
        names = ("due", "found", "first", "by_run", "by_float64")
        figures = {name: getattr(self, name) for name in names}
        return {
            "model": self.model,
            "bits": self.bits,
            **figures,
            "median_elsewhere": self.median_elsewhere,
            "places": places,
        }


@dataclass(frozen=True)
class Variances:
    """What the rows of some samples say of the errors of others.

    Attributes:
        samples: of either kind.
        predicted: the root of the sum of all rows' mean squares, over samples to calibrate on.
        correlated: the root mean square of the sums of their roundings: what is predicted if they are not taken for
            independent. explained: with their bends.
        measured: the root mean square of the errors of held-out samples; ``low``, ``high``: its 95 % interval.
        ratio_low, ratio_high: the 95 % interval of explained over measured, since both are of samples.
        errors: of the held-out samples.
    """

    model: str
    samples: int
    predicted: float
    correlated: float
    explained: float
    measured: float
    low: float
    high: float
    ratio_low: float
    ratio_high: float
    errors: tuple[float, ...]

    @property
    def inside(self) -> bool:
        """Whether the prediction lies in the interval."""
        return self.low <= self.predicted <= self.high

    @property
    def off_diagonal(self) -> float:
        """The sum of the products of different rows over the sum of squares: 0 where they are independent."""
        return (self.correlated / self.predicted) ** 2 - 1 if self.predicted else math.nan

    @property
    def accounted_for(self) -> bool:
        """Whether the measured error is in keeping with what the rows of the other samples add up to."""
        return self.ratio_low <= 1 <= self.ratio_high

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "inside": self.inside,
            "off_diagonal": self.off_diagonal,
            "accounted_for": self.accounted_for,
        }


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, caption: str = "") -> Table:
    shown = Table(title=title, caption=caption)
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number < left else "right")
    for row in rows:
        shown.add_row(*row)
    return shown


def sum_table(sums: Sequence[Sum]) -> Table:
    """A row an audit."""
    rows = [
        (
            each.model, f"{each.size} {each.dtype} {each.level}", each.target, each.first, f"{each.measured:+.2e}",
            f"{each.residual:+.0e}", "yes" if each.adds_up else "NO", f"{each.bend:.1%}", str(each.rows),
            str(each.cost or ""),
        )
        for each in sums
    ]  # fmt: skip
    columns = ("model", "", "target", "first row", "error", "residual", "adds up", "bend", "rows", "cost")
    caption = (
        "cost: over an FP32 training step's, time without the run that is explained (with it), "
        "memory (without weights and optimizer's state)"
    )
    return _table("Do the columns add up?", columns, rows, 4, caption)


def planted_table(found: Sequence[Planted]) -> Table:
    """A row a model."""
    rows = [
        (
            each.model, str(len(each.places)), str(each.due), str(each.found), str(each.first),
            "" if each.median_elsewhere is None else f"{each.median_elsewhere:g}", "{1} of {0}".format(*each.by_run),
            "{1} of {0}".format(*each.by_float64),
        )
        for each in found
    ]  # fmt: skip
    columns = (
        "model",
        "places",
        "due",
        "first where due",
        "first at all",
        "median rank elsewhere",
        "by the run",
        "by float64",
    )
    caption = (
        "due: rounding it to few bits changes the loss of the low run and that of a float64 run by more than three "
        "times the largest other row; by the run, by float64: by one of them alone"
    )
    return _table("Is what was planted found?", columns, rows, 1, caption)


def variances_table(found: Sequence[Variances]) -> Table:
    """A row a model."""
    rows = [
        (
            each.model, str(each.samples), f"{each.predicted:.3e}", f"{each.measured:.3e}",
            f"{each.low:.3e} to {each.high:.3e}", "yes" if each.inside else "no", f"{each.off_diagonal:+.0%}",
            f"{each.explained:.3e}", f"{each.ratio_low:.2f} to {each.ratio_high:.2f}",
            "yes" if each.accounted_for else "NO",
        )
        for each in found
    ]  # fmt: skip
    columns = (
        "model", "samples", "predicted", "measured", "95 %", "inside", "off the diagonal", "with it", "over measured",
        "holds 1",
    )  # fmt: skip
    return _table("Do squares of rows predict the error of other samples?", columns, rows, 1)
