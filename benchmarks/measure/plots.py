"""Charts of the benchmarks, drawn on an empty ``matplotlib.figure.Figure`` that ``results.save_figure`` hands out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["bars", "curves", "stacked"]


def stacked(figure: Any, panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Horizontal bars made of parts: title -> bar -> part -> length; every panel has the same parts."""
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for panel, (title, rows) in zip(axes, panels.items(), strict=True):
        lengths = dict.fromkeys(rows, 0.0)
        for part in dict.fromkeys(part for parts in rows.values() for part in parts):
            widths = [parts[part] for parts in rows.values()]
            panel.barh([*rows], widths, left=[*lengths.values()], label=part)
            lengths = {name: lengths[name] + width for name, width in zip(lengths, widths, strict=True)}
        panel.invert_yaxis()
        panel.set_title(title, loc="left", fontsize="medium")
    axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1.15), ncols=5, frameon=False, fontsize="small")


def curves(figure: Any, series: Mapping[str, tuple[list[float], list[float]]], *, x: str, y: str, log: bool) -> None:
    """Lines with markers: label -> (x values, y values); with ``log`` on two logarithmic axes."""
    axes = figure.subplots()
    for label, (across, up) in series.items():
        axes.plot(across, up, marker="o", label=label)
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")


def bars(figure: Any, panels: Mapping[str, Mapping[str, list[float]]]) -> None:
    """A panel a title: a bar of the mean of each label's values, and a dot for each value."""
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, (title, values) in zip(axes, panels.items(), strict=True):
        panel.bar([*values], [sum(each) / len(each) for each in values.values()], alpha=0.5)
        for place, each in enumerate(values.values()):
            panel.plot([place] * len(each), each, "k.", markersize=4)
        panel.set_title(title, fontsize="medium")
        panel.tick_params(axis="x", rotation=60)
