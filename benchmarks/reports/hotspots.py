"""What ``benchmarks.hotspots`` found: where the time of a training step goes, on the screen and in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.table import Table

__all__ = ["Profiled", "kernels_table", "steps_table"]

#: Of the kernels of a step a file holds so many.
KEPT: Final = 60
#: Characters of a kernel's name in a table.
_NAME: Final = 100


@dataclass(frozen=True)
class Profiled:
    """A step of one variant; without ``ms`` it did not run.

    Attributes:
        what: the variant in words.
        trouble: "", or why there are no figures: "failed: ...", "refused: ...", "not here: ...".
        ms: a step.
        host_ms: until the host had queued it, of so many in a row; where the queue is full it waits for the device.
        busy_ms: sum of all kernels' times; on a CPU of all operators', each without those that it calls.
        launches: kernels, copies and fills of a step; on a CPU operators.
        kernels: name -> (microseconds of a step, how often in a step), the largest first.
    """

    variant: str
    what: str
    trouble: str = ""
    ms: float | None = None
    host_ms: float = 0.0
    busy_ms: float = 0.0
    launches: int = 0
    kernels: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.trouble.startswith("failed")

    def times(self, base: float | None) -> float | None:
        """How many times as fast as a step of so many milliseconds."""
        return base / self.ms if base is not None and self.ms is not None else None

    def as_dict(self, base: float | None) -> dict[str, Any]:
        """For a file; ``base``: milliseconds of the baseline's step."""
        if self.ms is None:
            return {"what": self.what, "trouble": self.trouble}
        return {
            "what": self.what, "ms": self.ms, "host_ms": self.host_ms, "busy_ms": self.busy_ms,
            "launches": self.launches, "x_autocast": self.times(base),
            "kernels": {name: list(each) for name, each in [*self.kernels.items()][:KEPT]},
        }  # fmt: skip


def steps_table(title: str, found: Sequence[Profiled], base: float | None) -> Table:
    """A row a variant."""
    table = Table(title=title)
    for name in ("variant", "ms", "host ms", "device busy ms", "kernels", "x autocast", ""):
        table.add_column(name, justify="left" if name in ("variant", "") else "right")
    for each in found:
        if each.ms is None:
            table.add_row(each.variant, *("",) * 5, each.trouble, style="red" if each.failed else None)
            continue
        times = each.times(base)
        figures = (f"{value:.2f}" for value in (each.ms, each.host_ms, each.busy_ms))
        table.add_row(each.variant, *figures, str(each.launches), "" if times is None else f"{times:.2f}", each.what)
    return table


def kernels_table(found: Profiled, top: int) -> Table:
    """The largest kernels of a variant."""
    table = Table(title=f"{found.variant}: kernels of a step")
    for name in ("us", "%", "times", "kernel"):
        table.add_column(name, justify="left" if name == "kernel" else "right", no_wrap=True)
    for name, (us, count) in [*found.kernels.items()][:top]:
        table.add_row(f"{us:.0f}", f"{us / (10 * found.busy_ms):.1f}", f"{count:g}", name[:_NAME])
    return table
