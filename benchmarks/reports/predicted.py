"""Rows of the tables of predicted steps, beside what a device measured of the same ones."""

from __future__ import annotations

import pathlib
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.measure.results import RESULTS, load

__all__ = ["MEANING_OF_PARTS", "PARTS", "STEPS", "estimate", "found", "meaning_of_steps", "parts", "steps"]

#: Columns of the two tables.
STEPS: Final = (
    "model", "", "GPU", "floor", "fxprec, ms", "from – to", "/ measured", "torch.compile, ms", "from – to",  # noqa: RUF001
    "/ measured", "compile / fxprec", "measured",
)  # fmt: skip
PARTS: Final = (
    "model", "side", "kernels", "their ms", "measured kernels", "their ms", "first forms, ms", "products, ms",
    "other ops, ms", "by bytes",
)  # fmt: skip
MEANING_OF_PARTS: Final = (
    "Of the H200's steps above: Triton kernels and their milliseconds, predicted and in a trace; first forms: "
    "if each kernel of inductor's had the form that it tries first; by bytes: kernels that are not simulated, as their "
    "loops are unrolled in part"
)
#: Side -> the variant of ``benchmarks.step`` and ``benchmarks.hotspots`` that it predicts, small regions apart.
_VARIANTS: Final = {"fxprec": "o1-loss", "compile": "compile"}
#: The GPU that a folder of results is of.
_MEASURED: Final = {"H200": "NVIDIA-H200"}
#: Triton's kernels in a trace have the names of Python functions, torch's those of C++ and NVIDIA's more.
_TRITON: Final = re.compile(r"[a-z]\w*(_kernel|fused\w*)|fused\w*")
_NVIDIA: Final = re.compile(r"nvjet|xmma|cutlass|cudnn|gemm")


def found(dtype: str, root: pathlib.Path) -> dict[str, Any]:
    """The rows of all machines, models in the order of the first one's, and ``environments``: those of their files.

    Raises:
        ResultsError: there is no file.
    """
    files = sorted(path.stem for path in (root / "predicted").glob(f"step-gpu-{dtype}-*.json"))
    data = [load(file, "predicted", root) for file in files or [f"step-gpu-{dtype}-H200"]]
    order = [*dict.fromkeys(row["model"] for each in data for row in each["rows"])]
    rows = sorted((row for each in data for row in each["rows"]), key=lambda row: order.index(row["model"]))
    environments = [each["environment"] for each in data]
    return {"dtype": dtype, "size": "gpu", "rows": rows, "environments": environments}


def steps(data: Mapping[str, Any], root: pathlib.Path) -> Iterator[tuple[str, ...]]:
    """A row a model and machine."""
    for (model, machine), sides in _by(data, "model", "machine").items():
        measured = {side: _step(data, model, machine, variant, root) for side, variant in _VARIANTS.items()}
        middles = {side: row["times"][1]["all"] for side, row in sides.items() if row["times"]}
        shape = next(iter(sides.values()))["shape"]
        floor = sides.get("fxprec", {}).get("floor")
        cells = [model, shape, machine, "" if floor is None else f"{floor:.1f}"]
        for side in _VARIANTS:
            if side not in middles:
                cells += ["not predicted" if side in sides else "", "", ""]
                continue
            best, _, worst = (times["all"] for times in sides[side]["times"])
            over = measured[side]
            cells += [
                f"{middles[side]:.1f}", f"{best:.1f} – {worst:.1f}",  # noqa: RUF001
                "" if over is None else f"{middles[side] / over:.2f}",
            ]  # fmt: skip
        cells.append(f"{middles['compile'] / middles['fxprec']:.2f}" if len(middles) == len(_VARIANTS) else "")
        ours, theirs = measured["fxprec"], measured["compile"]
        yield (*cells, f"{theirs / ours:.2f}" if ours and theirs else "")


def parts(data: Mapping[str, Any], root: pathlib.Path) -> Iterator[tuple[str, ...]]:
    """A row a model and side, of the machine that was measured."""
    for row in data["rows"]:
        if row["machine"] not in _MEASURED or not row["times"]:
            continue
        middle = row["times"][1]
        count, ms = _kernels(data, row["model"], row["machine"], _VARIANTS[row["side"]], root)
        unread = sum((row["unread"] or {}).values())
        yield (
            row["model"], row["side"], str(row["simulated"] + unread), f"{middle['kernels']:.1f}",
            "" if count is None else str(count), "" if ms is None else f"{ms:.1f}",
            "" if row["first"] is None else f"{row['first']:.1f}", f"{middle['products']:.1f}",
            f"{middle['others']:.1f}", str(unread),
        )  # fmt: skip


def estimate(
    model: str, size: str, dtype: str, machine: str = "H200", root: pathlib.Path = RESULTS
) -> dict[str, Any] | None:
    """Milliseconds of a step: ``floor``, and of each side from the best to the worst; None where none was predicted."""
    file = f"step-{size}-{dtype}-{machine}"
    if not (root / "predicted" / f"{file}.json").is_file():
        return None
    rows = [row for row in load(file, "predicted", root)["rows"] if row["model"] == model and row["times"]]
    sides = {row["side"]: [times["all"] for times in row["times"]] for row in rows}
    return {"floor": rows[0]["floor"], **sides} if rows else None


def meaning_of_steps(rows: Sequence[Sequence[str]]) -> str:
    """What the cells are, and of the ratios to what was measured the geometric means, by side."""
    places = [place for place, name in enumerate(STEPS) if name == "/ measured"]
    found = [[float(row[place]) for row in rows if row[place]] for place in places]
    means = [
        f"{side} {statistics.geometric_mean(each):.2f} ({min(each):.2f} to {max(each):.2f})"
        for side, each in zip(("fxprec", "torch.compile"), found, strict=True)
        if each
    ]
    over = f". Over measured, geometric mean, least and most: {'; '.join(means)}" if means else ""
    return (
        "Predicted, not measured: milliseconds a step in the middle of what is assumed, and from the best to the worst "
        f"of it; / measured: over what the GPU took; compile / fxprec: predicted, and measured{over}"
    )


def _by(data: Mapping[str, Any], *keys: str) -> dict[tuple[str, ...], dict[str, Any]]:
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in data["rows"]:
        found.setdefault(tuple(row[key] for key in keys), {})[row["side"]] = row
    return found


def _of(
    data: Mapping[str, Any], kind: str, model: str, machine: str, variant: str, root: pathlib.Path
) -> Mapping[str, Any]:
    """What was measured of a variant; {} where nothing was."""
    device, file = _MEASURED.get(machine, ""), f"{kind}-{data['size']}-{data['dtype']}-{model}"
    if not (root / device / f"{file}.json").is_file():
        return {}
    return load(file, device, root)["variants"].get(variant, {})


def _step(data: Mapping[str, Any], model: str, machine: str, variant: str, root: pathlib.Path) -> float | None:
    return _of(data, "step", model, machine, variant, root).get("median_ms")


def _kernels(
    data: Mapping[str, Any], model: str, machine: str, variant: str, root: pathlib.Path
) -> tuple[int | None, float | None]:
    """How many Triton kernels a trace has in a step, and their milliseconds."""
    traced = _of(data, "hotspots", model, machine, variant, root)
    kernels = traced.get("kernels")
    # Of many kinds of kernels the file lists the slowest.
    if kernels is None or sum(us for us, _ in kernels.values()) < 0.99e3 * traced["busy_ms"]:
        return None, None
    own = [each for name, each in kernels.items() if _TRITON.fullmatch(name) and not _NVIDIA.search(name)]
    return round(sum(count for _, count in own)), sum(us for us, _ in own) / 1e3
