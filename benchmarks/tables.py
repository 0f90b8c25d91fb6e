"""Make the tables of the pages from ``benchmarks/results``: of README.md, of docs/, and of each device's own page.

    python -m benchmarks tables            # writes them
    python -m benchmarks tables --check    # says what is out of date; the status is 1 then

A table stands between two comments, and everything between them is generated::

    <!-- table: step cpu -->
    <!-- end -->

There are ``gains``, ``step SIZE [DTYPE]``, ``memory SIZE [DTYPE]``, ``accuracy TASK [DTYPE]``, ``first SIZE [DTYPE]``,
``convert``, ``convert-budgets``, ``ledger QUESTION``, ``tuning``, ``inference SIZE``, ``watch SIZE [LEVEL]``,
``hotspots SIZE [DTYPE]`` and ``forms [DTYPE]``; the dtype is bfloat16 where none is named. Where several devices have
results, ``device=NAME`` says which; on a page beside the results, ``benchmarks/results/DEVICE/README.md``, it is that
one. ``only=o1,o1-fused`` leaves out other variants, of ``step``, ``inference`` and ``gains``. Below each table
stand device, versions, date and commit. A ratio within the noise is printed as "=", never as a win.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from benchmarks.measure.results import RESULTS, ROOT, ResultsError, load
from benchmarks.reports.forms import Timed
from benchmarks.workloads.regions import MODELS, slug
from benchmarks.workloads.subjects import ADDED_UP, SMALL
from benchmarks.workloads.training import NAMES

__all__ = ["PAGES", "TABLES", "main", "rendered"]

PAGES: Final = (
    ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "numerics_mathematics.md",
    *sorted(RESULTS.glob("*/README.md")),
)  # fmt: skip
_MARKED: Final = re.compile(r"(<!-- table: ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_BEGINNING: Final = re.compile(r"<!-- table:")
_BASELINE: Final = "autocast"
#: Heading -> variant, of ``step`` and of ``memory``. A column without a figure is left out.
_STEP: Final = {
    "FP32": "fp32", "torch.compile": "compile", "its CUDA graphs": "compile-graphs", "O1": "o1",
    "O1, own optimizer": "o1-own", "O1, low gradients": "o1-low", "O1, compiled": "o1-compiled",
    "O1, fuse=True": "o1-fused", "O1, fuse=True, low gradients": "o1-fused-low",
    "O1, fuse=True, low gradients, loss inside": "o1-fused-loss", "O1, loss inside": "o1-loss",
    "O2, own optimizer": "o2-own", "O1, lower=pays": "o1-pays",
    "O1, whole step": "o1-whole", "O1, loss inside, whole step": "o1-loss-whole", "O2, whole step": "o2-whole",
}  # fmt: skip
_MEMORY: Final = {
    "FP32": "fp32", "torch.compile": "compile", "O1": "o1", "O1, low gradients": "o1-low",
    "O1, fuse=True, low gradients": "o1-fused-low", "O1, loss inside": "o1-loss", "O1, chunked loss": "o1-chunked",
    "O2, own optimizer": "o2-own",
}  # fmt: skip
_FIRST: Final = {
    "autocast": "autocast", "O1": "o1", "O1, fuse=True": "o1-fused",
    "O1, fuse=True, low gradients, loss inside": "o1-fused-loss", "torch.compile": "compile",
}  # fmt: skip
_INFERENCE: Final = {
    "FP32": "fp32", "model.bfloat16()": "bfloat16", "O1": "converted", "frozen, pack=False": "frozen-plain",
    "frozen": "frozen", "fuse=True, frozen": "frozen-fused", "fuse=True, frozen, low outputs": "frozen-low",
    "lower=pays, frozen": "frozen-pays", "torch.compile, freezing": "compile",
}  # fmt: skip


# -- finding results --------------------------------------------------------------------------------------------------


def _device(files: Sequence[str], wanted: str | None, root: pathlib.Path) -> str:
    """The only device that has one of the files, or the wanted one."""
    there = sorted({path.parent.name for file in files for path in root.glob(f"*/{file}.json")})
    if wanted is not None:
        return wanted
    if len(there) > 1:
        raise ResultsError(f"{files[0]} was measured on {', '.join(there)}: say which with device=NAME")
    if not there:
        raise ResultsError(f"no results of {files[0]}: 'python -m benchmarks {files[0].partition('-')[0]}' writes them")
    return there[0]


def _found(files: Sequence[str], device: str | None, root: pathlib.Path) -> list[dict[str, Any]]:
    """What those of the files hold that there are, all of one device."""
    name = _device(files, device, root)
    found = [load(file, name, root) for file in files if (root / name / f"{file}.json").is_file()]
    return found or [load(files[0], name, root)]  # which says what there is


# -- markdown ---------------------------------------------------------------------------------------------------------


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Without the columns that are empty in all rows."""
    rows = [*rows]
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    lines = [[columns[i] for i in kept], ["---"] * len(kept), *([row[i] or "–" for i in kept] for row in rows)]  # noqa: RUF001
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _measured(found: Sequence[Mapping[str, Any]]) -> str:
    """Device, versions, date and commit, in a line."""
    environments = [each["environment"] for each in found]

    def all_of(key: str, short: Callable[[str], str] = str) -> str:
        return ", ".join(sorted({short(environment[key]) for environment in environments}))

    return (
        f"{all_of('device')}; torch {all_of('torch')}, triton {all_of('triton')}, Python {all_of('python')}; "
        f"{all_of('date', lambda date: date[:10])}, commit {all_of('commit')}"
    )


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    """Bold where it is faster, "=" where it is neither."""
    if ratio is None:
        return ""
    value = f"{ratio['value']:.2f}"
    return {"faster": f"**{value}**", "slower": value}.get(ratio["verdict"], "=")


def _three_digits(number: float) -> str:
    """Or more, rather than an exponent."""
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


def _only(words: Sequence[str], columns: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the words but ``only=``, and the columns whose variants it names.

    Raises:
        ResultsError: it names a variant that has no column.
    """
    rest = [word for word in words if not word.startswith("only=")]
    names = [name for word in words if word.startswith("only=") for name in word.removeprefix("only=").split(",")]
    if unknown := sorted({*names} - {*columns.values()}):
        raise ResultsError(f"only={','.join(unknown)}: there are {', '.join(columns.values())}")
    return rest, {heading: name for heading, name in columns.items() if not names or name in names}


def _step(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """Return a row for each model."""
    words, columns = _only(words, _STEP)
    size, dtype = _two("step SIZE [DTYPE]", words)
    found = _found([f"step-{size}-{dtype}-{name}" for name in NAMES], device, root)
    rows, noises = [], []
    for data in found:
        variants = data["variants"]
        base = variants[_BASELINE]
        ratios = [variants.get(name, {}).get("ratio", {}).get(_BASELINE) for name in columns.values()]
        time = _three_digits(base["median_ms"]) if "median_ms" in base else ""
        rows.append((data["model"], data["shape"], time, *map(_ratio, ratios)))
        noises.append(data["noise"])
    noise = max((each for each in noises if each is not None), default=0.0)
    table = _markdown(("model", "", "autocast, ms", *columns), rows)
    meaning = f"How many times as fast as eager autocast; =: within the noise (at most {100 * noise:.1f} %)"
    return f"{table}\n{meaning}. {dtype}; {_measured(found)}.\n"


class _Gain(NamedTuple):
    """A row of the table of gains, for each device that has files of this kind, and what a user writes for it."""

    files: str
    variant: str
    meaning: str


_GAINS: Final = (
    _Gain("step-gpu-bfloat16", "o1-loss-whole", "training: `loss=`, `capture_step`"),
    _Gain("step-gpu-float16", "o1-loss-whole", "training in float16: `loss=`, `capture_step`"),
    _Gain("step-cpu-bfloat16", "o1", "training: `convert(model)`"),
    _Gain("step-cpu-bfloat16", "o1-fused-low", "training: `fuse=True`, low gradients"),
    _Gain("step-launch-bfloat16", "o1-pays", 'training, tiny: `lower="pays"`'),
    _Gain("inference-cpu", "frozen", "inference: `freeze(model)`"),
)


def _gains(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """Return a row for each device and use: how much faster its models are, and how many are not."""
    words, chosen = _only(words, {gain.meaning: gain.variant for gain in _GAINS})
    _none("gains", words)
    rows = []
    for folder in sorted({path.parent.name for path in root.glob("*/*.json")}):
        for gain in (gain for gain in _GAINS if gain.meaning in chosen):
            there = [f"{gain.files}-{name}" for name in NAMES]
            found = [load(file, folder, root) for file in there if (root / folder / f"{file}.json").is_file()]
            cases = [batch["variants"] for data in found for batch in data.get("batches", [data])]
            ratios = [each[gain.variant]["ratio"][_BASELINE] for each in cases if "ratio" in each.get(gain.variant, {})]
            if device in (None, folder) and ratios:
                values = [ratio["value"] for ratio in ratios]
                verdicts = [ratio["verdict"] for ratio in ratios]
                counts = (verdicts.count(verdict) for verdict in ("faster", "=", "slower"))
                spread = (f"{statistics.geometric_mean(values):.2f}", f"{min(values):.2f} to {max(values):.2f}")
                torchs, dates = (
                    ", ".join(sorted({data["environment"][key][:length] for data in found}))
                    for key, length in (("torch", None), ("date", 10))
                )
                rows.append(
                    (_title(root / folder), gain.meaning, *spread, " / ".join(map(str, counts)), f"{torchs}; {dates}")
                )
    if not rows:
        raise ResultsError("no results of step or inference: 'python -m benchmarks step' writes them")
    columns = ("device", "what", "mean", "least to most", "faster / = / slower", "torch; measured")
    meaning = (
        "How many times as fast as eager autocast with torch's fused AdamW: geometric mean over models (of inference "
        "also over batches), and how many are faster, within the noise, and slower"
    )
    return f"{_markdown(columns, rows)}\n{meaning}.\n"


def _title(folder: pathlib.Path) -> str:
    """Return the heading of a device's page; without one, the name of its folder."""
    page = folder / "README.md"
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") if page.is_file() else folder.name


def _memory(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """A row a model."""
    size, dtype = _two("memory SIZE [DTYPE]", words)
    [data] = _found([f"memory-{size}-{dtype}"], device, root)
    by_model: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in data["rows"]:
        by_model.setdefault(row["workload"], {})[row["variant"]] = row
    rows = []
    for name, variants in by_model.items():
        base = variants[_BASELINE]
        cells = [
            f"{row['ratio']:.2f} ({row['step_ratio']:.2f})" if (row := variants.get(each)) is not None else ""
            for each in _MEMORY.values()
        ]
        rows.append((name, base["shape"], f"{base['peak'] / 1e6:.0f}", *cells))
    table = _markdown(("model", "", "autocast, MB", *_MEMORY), rows)
    meaning = "Peak of a training step over eager autocast's; in brackets without weights and optimizer's state"
    return f"{table}\n{meaning}. {dtype}; {_measured([data])}.\n"


def _first(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """A row a model."""
    size, dtype = _two("first SIZE [DTYPE]", words)
    [data] = _found([f"first-{size}-{dtype}"], device, root)
    by_model: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in data["rows"]:
        by_model.setdefault(row["model"], {})[row["variant"]] = row
    rows = []
    for name, variants in by_model.items():
        cells = []
        for variant in _FIRST.values():
            row = variants.get(variant, {"empty_s": None, "full_s": None})
            times = [f"{row[key]:.2f}" for key in ("full_s", "empty_s") if row[key] is not None]
            cells.append(f"{times[0]} ({times[1]})" if len(times) > 1 else "".join(times))
        rows.append((name, *cells))
    meaning = "Seconds from the model in memory to the end of its first step; in brackets with empty caches on disk"
    return f"{_markdown(('model', *_FIRST), rows)}\n{meaning}. {dtype}; {_measured([data])}.\n"


def _accuracy(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """A row a variant."""
    task, dtype = _two("accuracy TASK [DTYPE]", words)
    [data] = _found([f"accuracy-{dtype}-{task}"], device, root)
    rows = []
    for row in data["variants"].values():
        loss, right = row["loss"], row["accuracy"]
        time, times = f"{row['epoch_s']:.2f}" if "epoch_s" in row else "", _ratio(row.get("ratio"))
        losses = f"{loss['mean']:.4f} ± {loss['range']:.4f}", loss.get("verdict", "")
        rights = f"{100 * right['mean']:.2f} ± {100 * right['range']:.2f}", right.get("verdict", "")
        rows.append((row["what"], time, times, *losses, *rights))
    columns = ("variant", "epoch, s", "x autocast", "loss", "to FP32's", "accuracy, %", "is to FP32's")
    noise = f"; =: within the noise ({100 * data['noise']:.1f} %)" if data["noise"] is not None else ""
    seeds = f"Mean and half the range of {data['seeds']} seeds, {data['epochs']} epochs; equal: within FP32's own range"
    return f"{_markdown(columns, rows)}\n{data['shape']}. {seeds}{noise}. {dtype}; {_measured([data])}.\n"


def _convert(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """A row a stack; behind what is ours, what it takes without its passes over the capture that it stands on."""
    _none("convert", words)
    [data] = _found(["convert"], device, root)
    ways = [*dict.fromkeys(way for stack in data["stacks"] for way in stack["seconds"])]
    shares = {*data["stacks"][0]["over_capture"]}
    columns = [(way, share) for way in ways for share in ([False, True] if way in shares else [False])]
    rows = []
    for stack in data["stacks"]:
        seconds = {way: f"{min(times):.2f}" for way, times in stack["seconds"].items()}
        over = {way: f"{share:.2f}" for way, share in stack["over_capture"].items() if share is not None}
        cells = [(over if share else seconds).get(way, "") for way, share in columns]
        rows.append((str(stack["blocks"]), str(stack["nodes"]), *cells))
    meaning = (
        f"Seconds on one core, the fastest run; –: beyond {data['limit_s']:g} s, left out; x: without its passes, over "  # noqa: RUF001
        "symbolic_trace or dynamo of the same model"
    )
    headings = ("blocks", "nodes", *("x" if share else way for way, share in columns))
    return f"{_markdown(headings, rows)}\n{meaning}. {_measured([data])}.\n"


def _convert_budgets(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """A row a budget."""
    _none("convert-budgets", words)
    [data] = _found(["convert"], device, root)
    rows = [
        (each["what"], f"{_three_digits(each['value'])}{each['unit']}", f"{_three_digits(each['limit'])}{each['unit']}",
         "met" if each["met"] else "**missed**")
        for each in data["budgets"]
    ]  # fmt: skip
    return f"{_markdown(('what', 'measured', 'budget', ''), rows)}\n{_measured([data])}.\n"


def _ledger(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """A row a model."""
    question = " ".join(words)
    if question not in _LEDGER:
        raise ResultsError(f"{question!r}: a table is 'ledger QUESTION', with one of {', '.join(_LEDGER)}")
    asked = _LEDGER[question]
    found = _found([f"ledger-{question}-{name}" for name in asked.models], device, root)
    table = _markdown(("model", *asked.columns), [(data["model"], *asked.row(data)) for data in found])
    return f"{table}\n{asked.meaning}. {_measured(found)}.\n"


def _sum_row(data: Mapping[str, Any]) -> tuple[str, ...]:
    sums = data["sums"]
    first = sums[0]  # the largest size, bfloat16, O1, of the loss
    worst = max(abs(each["residual"] / each["measured"]) if each["measured"] else 0.0 for each in sums)
    right = sum(each["adds_up"] for each in sums)
    cost = first["cost"]
    costs = ("", "")
    if cost:
        costs = (
            f"{cost['own_times']:.1f} ({cost['times']:.1f})", f"{cost['memory']:.1f} ({cost['own_memory']:.1f})"
        )  # fmt: skip
    return (
        f"**{right} of {len(sums)}**" if right < len(sums) else str(right), f"{worst:.0e}", f"{first['measured']:+.1e}",
        f"{100 * first['bend']:.1f} %", f"`{first['first']}`", *costs,
    )  # fmt: skip


def _planted_row(data: Mapping[str, Any]) -> tuple[str, ...]:
    elsewhere = data["median_elsewhere"]
    figures = (len(data["places"]), data["due"], data["found"], data["first"])
    alone = ("{1} of {0}".format(*data[name]) for name in ("by_run", "by_float64"))
    return (*map(str, figures), "" if elsewhere is None else f"{elsewhere:g}", *alone)


def _variances_row(data: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(data["samples"]), f"{data['predicted']:.2e}", f"{data['measured']:.2e}",
        f"{data['low']:.2e} to {data['high']:.2e}", "yes" if data["inside"] else "no",
        f"{round(100 * data['off_diagonal']):+d} %", f"{data['explained']:.2e}",
        f"{data['ratio_low']:.2f} to {data['ratio_high']:.2f}", "yes" if data["accounted_for"] else "**no**",
    )  # fmt: skip


class _Question(NamedTuple):
    """Models, columns besides their names, what makes a row of a file, and what the table means."""

    models: Sequence[str]
    columns: tuple[str, ...]
    row: Callable[[Mapping[str, Any]], tuple[str, ...]]
    meaning: str


_LEDGER: Final = {
    "adds-up": _Question(
        ADDED_UP,
        ("audits that add up", "residual", "error", "bend", "first row", "time", "memory"),
        _sum_row,
        "Residual: the largest of all audits, over the error. The rest is of the loss at O1 in bfloat16. Bend: sum of "
        "all |bend| over that of all |rounding| and |bend|. Over an FP32 training step's: time without the run that is "
        "explained (with it), memory (without weights and optimizer's state)",
    ),
    "planted": _Question(
        SMALL,
        ("places", "due", "first where due", "first at all", "median rank elsewhere", "by the run", "by float64"),
        _planted_row,
        "Due: planting changes the loss of the low run and that of a float64 run by more than three times the largest "
        "other row. By the run, by float64: first where one of them alone says so",
    ),
    "variances": _Question(
        SMALL,
        (
            "samples",
            "predicted",
            "measured",
            "95 %",
            "inside",
            "off the diagonal",
            "with it",
            "over measured, 95 %",
            "holds 1",
        ),
        _variances_row,
        "Root mean squares of the loss's error. Off the diagonal: the sum of products of different rows over that of "
        "squares. With it: of the same samples, rows not taken for independent",
    ),
}


def _two(usage: str, words: Sequence[str]) -> tuple[str, str]:
    if not 1 <= len(words) <= 2:
        raise ResultsError(f"{' '.join(words)!r}: a table is {usage!r}")
    return words[0], words[1] if len(words) == 2 else "bfloat16"


def _none(usage: str, words: Sequence[str]) -> None:
    if words:
        raise ResultsError(f"{' '.join(words)!r}: {usage!r} takes nothing but device=NAME")


def _tuning(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """A row a model and method, a column a budget."""
    if words:
        raise ResultsError(f"{' '.join(words)!r}: the table is 'tuning' and nothing more")
    (data,) = found = _found(["tuning"], device, root)
    comparisons, agreements = data["comparisons"], data["agreements"]
    budgets = [*dict.fromkeys(each["budget"] for each in comparisons)]
    rows: dict[tuple[str, str], list[str]] = {}
    for each in comparisons:
        verdict = {"better": "better", "equal": "=", "worse": "**worse**"}[each["verdict"]]
        cell = f"{each['our_measured'] / each['measured']:.3f} {verdict}, at {each['time']:.2f}"
        rows.setdefault((each["model"], each["method"]), []).append(cell)
    for each in agreements:
        rows.setdefault((each["model"], "two calibrations alike"), []).append(f"{100 * each['alike']:.0f} %")
    models = [*dict.fromkeys(each["model"] for each in comparisons)]
    ordered = sorted(rows.items(), key=lambda row: models.index(row[0][0]))
    columns = ("model", "against", *(f"{budget:g} of the error" for budget in budgets))
    table = _markdown(columns, [(*names, *cells) for names, cells in ordered])
    return (
        f"{table}\ntune's root mean square error over the method's, on {data['held_out']} held-out batches, and the "
        f"time of both over that of all low; {data['calibration']} batches were audited. {_measured(found)}.\n"
    )


def _watch(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """A row a model."""
    if not 1 <= len(words) <= 2:
        raise ResultsError(f"{' '.join(words)!r}: a table is 'watch SIZE [LEVEL]'")
    size, level = words[0], words[1] if len(words) == 2 else "O1"
    found = _found([f"watch-{size}-{level}-{name}" for name in NAMES], device, root)
    rows = [
        (data["model"], data["shape"], _three_digits(data["plain_ms"]), f"{ratio['value']:.3f} ± {ratio['error']:.3f}",
         ratio["verdict"], f"{data['noise']:.3f}", str(sum(data["ops"].values())), _counted(data["reads"]))
        for data in found for ratio in [data["ratio"]]
    ]  # fmt: skip
    table = _markdown(("model", "", "plain, ms", "watched / plain", "", "noise", "more ops", "of them reads"), rows)
    meaning = "A watched step over a plain one, in turns with it; =: within the noise, that of a second plain step"
    return f"{table}\n{meaning}. {level}, one thread; {_measured(found)}.\n"


def _counted(names: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))


def _inference(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """Return a row for each model and batch."""
    words, columns = _only(words, _INFERENCE)
    if len(words) != 1:
        raise ResultsError(f"{' '.join(words)!r}: a table is 'inference SIZE'")
    found = _found([f"inference-{words[0]}-{name}" for name in NAMES], device, root)
    rows, noises, prepare = [], [0.0], []
    gains: dict[str, list[float]] = {"frozen": [], "frozen-fused": []}
    beside: list[float] = []
    for data in found:
        for batch in data["batches"]:
            variants = batch["variants"]
            ratios = [variants.get(name, {}).get("ratio", {}).get(_BASELINE) for name in columns.values()]
            base = variants[_BASELINE]
            rows.append((data["model"], str(batch["batch"]), _three_digits(base["median_ms"]), *map(_ratio, ratios)))
            noises += [batch["noise"]] if batch["noise"] is not None else []
            for name, values in gains.items():
                if (ratio := variants.get(name, {}).get("ratio", {}).get(_BASELINE)) is not None:
                    values.append(ratio["value"])
                    prepare.append(variants[name]["prepare_s"])
            medians = [variants.get(name, {}).get("median_ms") for name in ("compile", "frozen-low")]
            beside += [] if None in medians else [medians[0] / medians[1]]
    means = [
        f"{label} geometric mean {statistics.geometric_mean(values):.2f}, least {min(values):.2f}"
        for label, values in zip(("frozen", "with fuse=True"), gains.values(), strict=True)
        if values
    ]
    if beside:
        means.append(
            f"with low outputs {statistics.geometric_mean(beside):.2f} times as fast as torch.compile with freezing, "
            "whose outputs are low"
        )
    meaning = (
        f"How many times as fast as eager autocast; =: within the noise (at most {100 * max(noises):.1f} %). "
        f"{'; '.join(means).capitalize()}; ready after {max(prepare, default=0.0):.2f} s at most"
    )
    return f"{_markdown(('model', 'batch', 'autocast, ms', *columns), rows)}\n{meaning}. {_measured(found)}.\n"


def _hotspots(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """A row a model and variant."""
    size, dtype = _two("hotspots SIZE [DTYPE]", words)
    found = _found([f"hotspots-{size}-{dtype}-{name}" for name in NAMES], device, root)
    rows = []
    for data in found:
        for name, each in data["variants"].items():
            if "ms" not in each:
                rows.append((data["model"], data["shape"], name, *("",) * 5))
                continue
            times = "" if each["x_autocast"] is None or name == _BASELINE else f"{each['x_autocast']:.2f}"
            figures = (_three_digits(each[key]) for key in ("ms", "busy_ms", "host_ms"))
            rows.append((data["model"], data["shape"], name, *figures, str(each["launches"]), times))
    columns = ("model", "", "variant", "ms a step", "device busy, ms", "host, ms", "kernels", "x autocast")
    meaning = (
        "Each variant by itself, not in turns. Device busy: the sum of all kernels; host: until it had queued a step, "
        "of many in a row, where a full queue waits for the device; kernels: with copies and fills"
    )
    return f"{_markdown(columns, rows)}\n{meaning}. {dtype}; {_measured(found)}.\n"


def _forms(words: Sequence[str], device: str | None, root: pathlib.Path) -> str:
    """A row a kernel."""
    if len(words) > 1:
        raise ResultsError(f"{' '.join(words)!r}: a table is 'forms [DTYPE]'")
    (dtype,) = words or ("bfloat16",)
    found = _found([f"forms-{dtype}-{slug(name)}" for name in MODELS], device, root)
    rows = [
        (data["model"], f"`{each['region']}`", each["pass"], _form(each["present"]), _percent(each["share"]),
         _form(each["best"]), _percent(each["best_share"]), str(1 + len(each["forms"])))
        for data in found for each in data["kernels"]
    ]  # fmt: skip
    columns = ("model", "region", "pass", "the form that it had", "of a copy", "the best form", "of a copy", "forms")
    copied = sorted({_three_digits(data["copy_bytes_a_second"] / 1e9) for data in found})
    timing = "; ".join(sorted({data["timing"] for data in found}))
    meaning = (
        f"Timed {timing}. Of a copy: bytes that must be moved over the time, as a share of a large copy's "
        f"{' to '.join(copied)} GB/s. A form: rows x columns of a tile, and where programs go from tile to tile, tiles "
        "under way and all programs"
    )
    return f"{_markdown(columns, rows)}\n{meaning}. {dtype}; {_measured(found)}.\n"


def _form(cells: Sequence[float]) -> str:
    return str(Timed(cells[0], *map(int, cells[1:])))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


TABLES: Final[dict[str, Callable[[Sequence[str], str | None, pathlib.Path], str]]] = {
    "gains": _gains,
    "step": _step,
    "memory": _memory,
    "accuracy": _accuracy,
    "convert": _convert,
    "convert-budgets": _convert_budgets,
    "first": _first,
    "ledger": _ledger,
    "tuning": _tuning,
    "inference": _inference,
    "watch": _watch,
    "hotspots": _hotspots,
    "forms": _forms,
}


# -- pages ------------------------------------------------------------------------------------------------------------


def rendered(text: str, root: pathlib.Path = RESULTS, device: str | None = None) -> tuple[str, int]:
    """Return the text with all its tables made anew, and how many there are.

    Args:
        text: of a page.
        root: the folder of results.
        device: whose results they are where a table says no ``device=``; None: the only one that has some.

    Raises:
        ResultsError: an unknown table, a marker without an end, or no results for a table; says which.
    """

    def table(match: re.Match[str]) -> str:
        beginning, spec, before, end = match.groups()
        if _BEGINNING.search(before):
            raise ResultsError(f"'<!-- table: {spec} -->' has no '<!-- end -->' before the next table")
        words = spec.split()
        devices = [word.removeprefix("device=") for word in words if word.startswith("device=")]
        name, *rest = [word for word in words if not word.startswith("device=")] or [""]
        if name not in TABLES:
            raise ResultsError(f"'<!-- table: {spec} -->': no table {name!r}; there are {', '.join(TABLES)}")
        return f"{beginning}\n{TABLES[name](rest, devices[0] if devices else device, root)}\n{end}"

    text, count = _MARKED.subn(table, text)
    if (there := len(_BEGINNING.findall(text))) != count:
        raise ResultsError(f"{there} tables begin and {count} are complete: one has no '<!-- end -->', or no ' -->'")
    return text, count


def main(arguments: list[str] | None = None) -> int:
    """Write the tables, or check them; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tables", description="Make the tables of the pages")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; the status is 1 where a page is out of date"
    )
    parser.add_argument("--pages", nargs="+", type=pathlib.Path, default=PAGES, metavar="FILE")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    status = 0
    for page in options.pages:
        if page in PAGES and not page.is_file():
            continue
        before = page.read_text(encoding="utf-8")
        name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name
        try:
            device = page.parent.name if page.parent.parent == RESULTS else None
            after, count = rendered(before, options.results, device)
        except ResultsError as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = 1
            continue
        if before == after:
            print(f"{name}: {count} tables, up to date")
        elif options.check:
            print(f"{name} is out of date: 'python -m benchmarks tables' makes its tables anew", file=sys.stderr)
            status = 1
        else:
            page.write_text(after, encoding="utf-8")
            print(f"{name}: {count} tables written")
    return status


if __name__ == "__main__":
    sys.exit(main())
