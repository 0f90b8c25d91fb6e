"""What ``benchmarks.inference`` found: the rows of each batch of a model, their table, the file and the figure of all.

The file of a model, ``inference-SIZE-MODEL.json``, holds under ``batches`` for each batch its ``noise`` and under
``variants`` for each by name: ``what`` it is, ``trouble``, milliseconds (``median_ms``, ``least_ms`` and all
``samples_ms``, a list a round), ``ratio`` against eager autocast, ``prepare_s`` and ``error``.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.measure import results
from benchmarks.measure.interleaved import Ratio, Samples, noise

__all__ = ["BASELINE", "Batch", "Found", "Row", "draw", "found_before", "twin_of"]

BASELINE: Final = "autocast"
_TWIN: Final = " again"


def twin_of(name: str) -> str:
    """The name of the same variant, built a second time."""
    return name + _TWIN


@dataclass
class Row:
    """A variant: figures, or the trouble that it had.

    Attributes:
        prepare: seconds until its first result.
        error: of its output against float64, over the output.
    """

    name: str
    what: str
    trouble: str = ""
    samples: Samples | None = None
    prepare: float | None = None
    error: float | None = None


@dataclass
class Batch:
    """All variants of a model at one batch."""

    size: int
    rows: list[Row]

    @property
    def noise(self) -> float:
        """By the variants that were built twice."""
        timed = {row.name: row.samples for row in self.rows if row.samples is not None}
        pairs = [(timed[name], timed[name.removesuffix(_TWIN)]) for name in timed if name.endswith(_TWIN)]
        return noise(Ratio.of(*pair) for pair in pairs)

    def ratio(self, row: Row) -> Ratio | None:
        """How many times as fast as eager autocast it is."""
        base = next((each.samples for each in self.rows if each.name == BASELINE), None)
        return None if row.samples is None or base is None else Ratio.of(row.samples, base)

    def as_dict(self) -> dict[str, Any]:
        """For the file."""
        width = self.noise
        return {
            "batch": self.size,
            "noise": width if math.isfinite(width) else None,
            "variants": {row.name: self._row(row, width) for row in self.rows},
        }

    def _row(self, row: Row, width: float) -> dict[str, Any]:
        found: dict[str, Any] = {"what": row.what, "trouble": row.trouble}
        ratio = self.ratio(row)
        if row.samples is None or ratio is None:
            return found
        against = {"value": ratio.value, "fastest": ratio.least, "verdict": ratio.verdict(width)}
        return found | {
            "median_ms": row.samples.median, "least_ms": row.samples.least, "ratio": {BASELINE: against},
            "prepare_s": row.prepare, "error": row.error,
            "samples_ms": [[float(f"{each:.4g}") for each in one] for one in row.samples.rounds],
        }  # fmt: skip


@dataclass
class Found:
    """All batches of a model."""

    model: str
    size: str
    shape: str
    device_name: str
    batches: list[Batch]

    @property
    def file(self) -> str:
        return f"inference-{self.size}-{self.model}"

    def as_dict(self) -> dict[str, Any]:
        """For the file."""
        return {
            "model": self.model, "size": self.size, "shape": self.shape,
            "batches": [each.as_dict() for each in self.batches],
        }  # fmt: skip

    def show(self, console: Console, batch: Batch) -> None:
        """The table of one batch."""
        width = batch.noise
        caption = f"noise {width:.1%}: '=' is within it" if math.isfinite(width) else None
        title = f"{self.model}, batch {batch.size} ({self.shape}); {self.device_name}"
        table = Table(title=title, caption=caption, caption_justify="left")
        for column in ("variant", "ms", "x autocast", "prepare s", "error"):
            table.add_column(column, justify="left" if column == "variant" else "right")
        for row in batch.rows:
            ratio = batch.ratio(row)
            if row.samples is None or ratio is None:
                table.add_row(row.name, row.trouble)
                continue
            again = _TWIN if row.name.endswith(_TWIN) else ""
            table.add_row(
                row.what + again, f"{row.samples.median:.3f}", f"{ratio.value:.2f} {ratio.verdict(width)}",
                f"{row.prepare or 0:.2f}", f"{row.error or 0:.1e}",
            )  # fmt: skip
        console.print(table)


def found_before(
    size: str, names: Iterable[str], device: str, root: pathlib.Path | None = None
) -> dict[str, dict[str, Any]]:
    """model -> what its file holds, for all that were measured on a device."""
    folder = (root or results.RESULTS) / device
    files = {name: f"inference-{size}-{name}" for name in names}
    there = {name: file for name, file in files.items() if (folder / f"{file}.json").is_file()}
    return {name: results.load(file, device, root) for name, file in there.items()}


def draw(figure: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    """A panel a model: a group of bars a batch, how many times as fast as eager autocast."""
    columns = min(4, len(found))
    panels = figure.subplots(math.ceil(len(found) / columns), columns, squeeze=False).flatten()
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    for panel, (name, data) in zip(panels, found.items(), strict=False):
        bars = [
            (f"{each}, {batch['batch']}", row["ratio"][BASELINE]["value"])
            for batch in data["batches"]
            for each, row in batch["variants"].items()
            if "ratio" in row and each != BASELINE and not each.endswith(_TWIN)
        ]
        values = [value for _, value in bars]
        colours = ["tab:green" if label.startswith("frozen,") else "tab:gray" for label, _ in bars]
        panel.barh([label for label, _ in bars], values, color=colours)
        panel.bar_label(panel.containers[0], fmt="%.2f", padding=2, fontsize=6)
        panel.axvline(1.0, color="black", lw=0.8)
        panel.set_xlim(0, 1.2 * max([1.0, *values]))
        panel.invert_yaxis()
        panel.tick_params(labelsize=6)
        panel.set_title(f"{name}: {data['shape']}", fontsize=8)
    first = next(iter(found.values()))
    title = f"Inference against eager autocast, bfloat16, {first['environment']['device']} (above 1 is faster)"
    figure.suptitle(title, fontsize=10)
