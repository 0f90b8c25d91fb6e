"""What ``benchmarks.step`` found: the rows of a workload, its table, its file and the figure of all.

The file of a workload, ``step-SIZE-DTYPE-MODEL.json``, holds under ``variants`` for each by name: ``what`` it is,
``trouble`` ("" or why it has no figures), milliseconds (``median_ms``, ``least_ms``, ``p20_ms``, ``p80_ms`` and all
``samples_ms``, a list a round), ``ratio`` against eager autocast, torch.compile and FP32 (``value``, ``fastest``,
``verdict``), seconds until the first step was done (``first_s``), ``loss`` after the warm-up and at the end, and, where
they were counted, ``casts``, ``kernels``, ``tflops`` and ``mfu``. ``noise`` is the workload's.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.measure import results
from benchmarks.measure.interleaved import Ratio, Samples, Schedule, noise
from benchmarks.measure.training_step import Setup
from benchmarks.measure.variants import BASELINE
from benchmarks.workloads.training import NAMES, Workload

__all__ = ["AGAINST", "Comparison", "Row", "draw", "found_before", "twin_of"]

#: Column -> what a ratio is taken against.
AGAINST: Final = {"autocast": BASELINE, "compile": "compile", "fp32": "fp32"}
#: Dense float16 and bfloat16 TFLOP/s by what is in the device's name, from NVIDIA's data sheets.
_PEAK: Final = {"H200": 989.4, "H100 80GB HBM3": 989.4, "A100": 312.0}
_TWIN: Final = " again"


def twin_of(name: str) -> str:
    """The name of the same variant, built a second time."""
    return name + _TWIN


@dataclass
class Row:
    """A variant: figures, or the trouble that it had.

    Attributes:
        name, what: of the variant.
        trouble: "", or why there are no figures: "not here: ", "refused: " or "failed: ", and the reason.
        first: seconds of converting, compiling, capturing and the first step.
        losses: of the last step of the warm-up, and of the very last.
        casts: executed in a step. kernels: launched on the device in a step, or by a graph.
    """

    name: str
    what: str
    trouble: str = ""
    samples: Samples | None = None
    first: float | None = None
    losses: list[float] = field(default_factory=list)
    casts: int | None = None
    kernels: int | None = None

    @property
    def failed(self) -> bool:
        return self.trouble.startswith("failed")

    @property
    def is_twin(self) -> bool:
        return self.name.endswith(_TWIN)


@dataclass
class Comparison:
    """All variants of a workload on a device in a dtype."""

    workload: Workload
    setup: Setup
    schedule: Schedule
    device_name: str
    builds: int = 1
    rows: list[Row] = field(default_factory=list)

    @cached_property
    def flops(self) -> int:
        return self.workload.flops()

    def samples(self) -> dict[str, Samples]:
        return {row.name: row.samples for row in self.rows if row.samples is not None}

    def twins(self) -> dict[str, Ratio]:
        timed = self.samples()
        pairs = {name: name.removesuffix(_TWIN) for name in timed if name.endswith(_TWIN)}
        return {name: Ratio.of(timed[name], timed[first]) for name, first in pairs.items() if first in timed}

    @property
    def noise(self) -> float:
        return noise(self.twins().values())

    def ratios(self, row: Row) -> dict[str, Ratio]:
        """By what it is against; without those that were not timed."""
        timed = self.samples()
        if row.samples is None:
            return {}
        return {
            column: Ratio.of(row.samples, timed[other])
            for column, other in AGAINST.items()
            if other in timed and other != row.name
        }

    def tflops(self, row: Row) -> float | None:
        return None if row.samples is None else 1e-9 * self.flops / row.samples.median

    def mfu(self, row: Row) -> float | None:
        """Share of the device's peak in the low dtype."""
        rate = self.tflops(row)
        name = self.device_name.replace("-", " ")
        peaks = [peak for model, peak in _PEAK.items() if model in name]
        return rate / peaks[0] if rate is not None and peaks and self.setup.device.type == "cuda" else None

    # -- JSON ---------------------------------------------------------------------------------------------------------

    @property
    def file(self) -> str:
        return _file(self.workload.size, self.dtype, self.workload.name)

    @property
    def dtype(self) -> str:
        return str(self.setup.dtype).removeprefix("torch.")

    def as_dict(self) -> dict[str, Any]:
        workload = self.workload
        return {
            "model": workload.name, "size": workload.size, "shape": workload.shape, "dtype": self.dtype,
            "clip": self.setup.clip, "parameters": workload.parameters(), "flops": self.flops,
            "schedule": asdict(self.schedule), "builds": self.builds,
            "noise": self.noise if math.isfinite(self.noise) else None,
            "variants": {row.name: self._row_as_dict(row) for row in self.rows},
        }  # fmt: skip

    def _row_as_dict(self, row: Row) -> dict[str, Any]:
        if row.samples is None:
            return {"what": row.what, "trouble": row.trouble}
        times = row.samples
        against = {
            column: {"value": ratio.value, "fastest": ratio.least, "verdict": ratio.verdict(self.noise)}
            for column, ratio in self.ratios(row).items()
        }
        return {
            "what": row.what, "trouble": row.trouble, "median_ms": times.median, "least_ms": times.least,
            "p20_ms": times.quantile(0.2), "p80_ms": times.quantile(0.8), "ratio": against, "first_s": row.first,
            "loss": [loss if math.isfinite(loss) else None for loss in row.losses], "casts": row.casts,
            "kernels": row.kernels, "tflops": self.tflops(row), "mfu": self.mfu(row),
            "samples_ms": [[float(f"{each:.4g}") for each in one] for one in times.rounds],
        }  # fmt: skip

    # -- the table on the screen --------------------------------------------------------------------------------------

    def show(self, console: Console) -> None:
        title = f"{self.workload.name}: {self.workload.shape}; {self.dtype}, {self.device_name}"
        table = Table(title=title, caption=self._caption(), caption_justify="left")
        counted = "kernels" if self.setup.device.type == "cuda" else "casts"
        against = [column for column, name in AGAINST.items() if name in self.samples()]
        columns = ("variant", "ms", "p20-p80", *(f"x {each}" for each in against), "by fastest", "first s", "loss")
        for column in (*columns, counted, "TFLOP/s"):
            table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=column != "variant")
        troubles = []
        for row in self.rows:
            if row.samples is None:
                troubles.append(f"{row.name}: {row.trouble}")
                continue
            table.add_row(*self._cells(row, against, row.kernels if counted == "kernels" else row.casts))
        console.print(table)
        for trouble in troubles:
            console.print(f"  {trouble}", markup=False, highlight=False)

    def _cells(self, row: Row, against: list[str], count: int | None) -> tuple[str, ...]:
        assert row.samples is not None
        times, ratios = row.samples, self.ratios(row)
        rate, share = self.tflops(row), self.mfu(row)
        fastest = ratios.get("autocast")
        return (
            row.what + (_TWIN if row.is_twin else ""),
            f"{times.median:.2f}",
            f"{times.quantile(0.2):.2f}-{times.quantile(0.8):.2f}",
            *(_worded(ratios.get(column), self.noise) for column in against),
            "" if fastest is None else f"{fastest.least:.2f}",
            "" if row.first is None else f"{row.first:.2f}",
            f"{row.losses[-1]:.4f}" if row.losses else "",
            "" if count is None else str(count),
            ("" if rate is None else f"{rate:.3g}") + ("" if share is None else f" ({share:.0%})"),
        )

    def _caption(self) -> str:
        schedule, twins = self.schedule, self.twins()
        built = f", built {self.builds} times" if self.builds > 1 else ""
        parts = [f"{schedule.rounds} rounds of {schedule.steps} steps{built}; above 1 the row is faster"]
        if twins:
            pairs = ", ".join(f"{name} {ratio.value:.3f}" for name, ratio in twins.items())
            parts.append(f"noise {self.noise:.1%} ({pairs}): '=' is within it")
        warmed = {row.name: row.losses[0] for row in self.rows if row.losses}
        if BASELINE in warmed:
            off = max(abs(loss - warmed[BASELINE]) for loss in warmed.values())
            parts.append(
                f"loss after {schedule.warm_up} steps {warmed[BASELINE]:.4f}, no variant further off than {off:.1g}"
            )
        return "\n".join(parts)


def _worded(ratio: Ratio | None, noise: float) -> str:
    return "" if ratio is None else f"{ratio.value:.2f} {ratio.verdict(noise)}"


def _file(size: str, dtype: str, model: str) -> str:
    return f"step-{size}-{dtype}-{model}"


def found_before(size: str, dtype: str, device: str, root: pathlib.Path | None = None) -> dict[str, dict[str, Any]]:
    """model -> what its file holds, for all that were measured on a device; see ``benchmarks.measure.results``."""
    files = {name: _file(size, dtype, name) for name in NAMES}
    folder = (root or results.RESULTS) / device
    return {
        name: results.load(file, device, root) for name, file in files.items() if (folder / f"{file}.json").is_file()
    }


def draw(figure: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    """A panel a model: ratios against eager autocast as bars, and the noise as a band around 1."""
    columns = min(4, len(found))
    panels = figure.subplots(math.ceil(len(found) / columns), columns, squeeze=False).flatten()
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    for panel, (name, data) in zip(panels, found.items(), strict=False):
        ratios = {
            each: row["ratio"]["autocast"]
            for each, row in data["variants"].items()
            if "autocast" in row.get("ratio", {}) and not each.endswith(_TWIN)
        }
        colours = {"faster": "tab:green", "slower": "tab:red", "=": "tab:gray"}
        values = [each["value"] for each in ratios.values()]
        panel.barh([*ratios], values, color=[colours[each["verdict"]] for each in ratios.values()])
        panel.bar_label(panel.containers[0], fmt="%.2f", padding=2, fontsize=7)
        if data["noise"] is not None:
            low, high = 1 / (1 + data["noise"]), 1 + data["noise"]
            panel.axvspan(low, high, color="tab:blue", alpha=0.25, lw=0)
        panel.axvline(1.0, color="black", lw=0.8)
        panel.set_xlim(0, 1.2 * max([1.0, *values]))
        panel.invert_yaxis()
        panel.tick_params(labelsize=7)
        panel.set_title(f"{name}: {data['shape']}", fontsize=8)
    first = next(iter(found.values()))
    figure.suptitle(
        f"Training step against eager autocast, {first['dtype']}, {first['environment']['device']} "
        "(above 1 is faster; band: noise)",
        fontsize=10,
    )
