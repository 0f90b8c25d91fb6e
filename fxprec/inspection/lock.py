"""Write a model's precisions as a text to commit, and compare: what ``pytest --precision-lock`` does.

A line a node, with the dtype that it computes in and the one that it puts out; equal ones of repeated layers are one::

    [Net] O1, bfloat16, mincut
    forward(x)
      float32 -> bfloat16   -  cast of x
      bfloat16 -> bfloat16  blocks.0-11.fc  linear
      float32 -> bfloat16   blocks.0-11.norm  layer_norm

Nodes are called by their op and, from the second one of a module on, a number: ``add``, ``add_2``. So a line stays as
it is where something is added elsewhere. Views and what else only moves data have no line, nor have shadows of weights.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from torch import nn

from fxprec.inspection.measured import settings_line
from fxprec.inspection.nodes import moves_data
from fxprec.inspection.report import GraphReport, NodeRow, graph_reports, outside_of
from fxprec.inspection.text import fold, numbers_of, unfold
from fxprec.model.conversion import conversion_of, is_converted

_Texts = TypeVar("_Texts", str, tuple[str, str])
_NUMBERS: Final = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")
#: What ``insert_casts`` appends to the name of what it casts.
_CAST: Final = re.compile(r"_(?:f16|bf16|f32)(?:_\d+)?$")
_LINE_NUMBER: Final = re.compile(r"(?<=\.py):\d+")
#: Stands for the path of the model itself.
_ROOT: Final = "-"
_OUTSIDE: Final = "outside of the graphs"
_HEADING: Final = re.compile(rf"\w.*\(.*\).*|{_OUTSIDE}")
_SECTION: Final = re.compile(r"\[([^\[\]]+)\] ?(.*)")


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """Name of a line: a heading, such as ``forward(x)``, the path of a module, and the node there."""

    heading: str
    module: str
    node: str

    def __str__(self) -> str:
        return "  ".join(filter(None, (self.module, self.node)))


@dataclass(frozen=True, slots=True)
class Locked:
    """Precisions of one model.

    Attributes:
        settings: level, dtype and placement.
        dtypes: of each node ``bfloat16 -> float32``: what it computes in (a cast: reads) and what it puts out.
        why: the reason for it; known of a model, not of a file.
    """

    settings: str
    dtypes: Mapping[Name, str]
    why: Mapping[Name, str]

    @classmethod
    def of(cls, model: nn.Module) -> Locked:
        """Return the precisions of a converted model as it is now, with all the graphs that it has.

        Raises:
            ConversionError: the model is not converted.
            NotCapturedError: the model is captured at its first call, which did not happen yet.
        """
        conversion = conversion_of(model) if is_converted(model) else None
        settings = settings_line(conversion)
        dtypes: dict[Name, str] = {}
        why: dict[Name, str] = {}
        seen: dict[str, list[dict[Name, str]]] = {}
        modes: dict[str, str] = {}
        for graph in graph_reports(model):
            # Reasons are told and not compared: a better wording is no change of precision.
            own = {name: (dtype, reason) for name, dtype, reason in _nodes(graph)}
            plain = {name: dtype for name, (dtype, _) in own.items()}
            heading = f"{graph.method or 'graph'}({', '.join(graph.inputs)})"
            others = seen.setdefault(heading, [])
            modes.setdefault(heading, graph.mode)
            if plain in others:  # for other shapes, or in the other mode: dynamo need not tell them apart
                continue
            others.append(plain)
            # The first graph has the plain heading, so that a second one does not move its lines.
            if len(others) > 1:
                heading += f", graph {len(others)}" + (f" ({graph.mode})" if graph.mode != modes[heading] else "")
            for name, (dtype, reason) in own.items():
                name = Name(heading, name.module, name.node)
                dtypes[name], why[name] = dtype, reason
        # Line numbers move with any edit above them, and are left out of what is compared.
        runs = "as it is" if conversion is not None and conversion.settings.policy.level == "O0" else "autocast"
        for where, reason in outside_of(conversion).items():
            name = Name(_OUTSIDE, " ".join(_LINE_NUMBER.sub("", where).split()), "")
            dtypes[name], why[name] = runs, reason
        return cls(settings, dtypes, why)

    @classmethod
    def parse(cls, settings: str, lines: Iterable[str]) -> Locked:
        """Read the lines of a file."""
        dtypes: dict[Name, str] = {}
        heading = ""
        for line in lines:
            if not line.startswith("  "):
                heading = line
                continue
            # Columns are two spaces apart at least: names hold single ones.
            dtype, module, *node = re.split(r" {2,}", line.strip())
            for path in _paths(module):
                dtypes[Name(heading, path, "  ".join(node))] = dtype
        return cls(settings, dtypes, {})

    def lines(self) -> Iterator[str]:
        """Yield lines for a file, which ``parse`` reads."""
        for heading, names in itertools.groupby(self.dtypes, key=lambda name: name.heading):
            yield heading
            for dtype, group in _folded((self.dtypes[name], name) for name in names):
                yield from (f"  {dtype:20}  {name}" for name in _few_names(group))


def _nodes(graph: GraphReport) -> Iterator[tuple[Name, str, str]]:
    """Yield name, dtypes and reason of each node that has a line."""
    called: dict[str, str] = {}
    times: Counter[tuple[str, str]] = Counter()
    puts_out = {row.node: row.output for row in graph.rows}
    for row in graph.rows:
        module, source = row.module or _ROOT, _source(row, puts_out)
        if row.kind == "cast":
            op, dtype = f"cast of {called.get(source, source)}", f"{puts_out.get(source, '-')} -> {row.output}"
            reason = row.why
        else:
            op, dtype, reason = row.op, f"{row.compute} -> {row.output}", f"{row.rule}: {row.why}"
        times[module, op] += 1
        number = times[module, op]
        name = Name("", module, op + (f"_{number}" if number > 1 else ""))
        called[row.node] = row.node if row.kind == "input" else name.node
        computes = row.kind == "op" and row.rule != "-" and not moves_data(row.op)
        # A cast from a dtype to itself is there for inputs that come in another one: nobody knows yet.
        if computes or (row.kind == "cast" and puts_out.get(source) != row.output):
            yield name, dtype, reason


def _source(row: NodeRow, nodes: Mapping[str, str]) -> str:
    """Return the node that a cast reads, told by the name of the cast."""
    name = _CAST.sub("", row.node)
    return name if name in nodes else row.node


def _paths(module: str) -> list[str]:
    """Return the paths that a folded one means."""
    parts: list[list[str]] = []
    for part in module.split("."):
        ends = [each.partition("-") for each in part.split(",")] if _NUMBERS.fullmatch(part) else []
        numbers = [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]
        parts.append([*map(str, numbers)] or [part])
    return [".".join(path) for path in itertools.product(*parts)]


def _folded(names: Iterable[tuple[_Texts, Name]]) -> list[tuple[_Texts, list[Name]]]:
    """Group names of repeated layers that have the same texts."""
    # Repeated layers fold into a line only where dtypes and op agree, or a change of one layer would not show.
    groups: dict[tuple[_Texts, str, str, str], list[Name]] = {}
    for texts, name in names:
        groups.setdefault((texts, name.heading, fold(name.module), name.node), []).append(name)
    return [(key[0], group) for key, group in groups.items()]


def _few_names(group: list[Name]) -> Iterator[Name]:
    """Yield few names for a group of repeated layers: ``blocks.0-11.fc``."""
    first = group[0]
    for path in unfold(fold(first.module), [numbers_of(name.module) for name in group]):
        yield Name(first.heading, path, first.node)


def file_text(models: Mapping[str, Locked], torch_version: str) -> str:
    """Write the file of several models, by name."""
    parts = [f"# What computes in which dtype: written by pytest --precision-lock-update, with torch {torch_version}."]
    parts += ["\n".join([f"[{name}] {locked.settings}".rstrip(), *locked.lines()]) for name, locked in models.items()]
    return "\n\n".join(parts) + "\n"


def parse_file(text: str) -> dict[str, Locked]:
    """Read what ``file_text`` wrote.

    Raises:
        ValueError: it is no such file; names the line.
    """
    models: dict[str, tuple[str, list[str]]] = {}
    own: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        begins = _SECTION.fullmatch(line)
        if begins is not None:
            own = []
            models[begins[1]] = begins[2], own
        elif line.strip() and not line.startswith("#"):
            fits = len(re.split(r" {2,}", line.strip())) > 1 if line.startswith("  ") else _HEADING.fullmatch(line)
            if own is None or not fits:
                raise ValueError(f"line {number}, {line.strip()!r}, is none of a precision lock")
            own.append(line.rstrip())
    return {name: Locked.parse(settings, lines) for name, (settings, lines) in models.items()}


def review(before: Locked, after: Locked) -> list[str]:
    """Return lines that tell a reader what changed; none where nothing did."""
    found = [] if before.settings == after.settings else [f"settings: {before.settings} became {after.settings}"]
    # What is new comes in the order of the model; what is gone has no place there, and comes last.
    names = [*after.dtypes, *(name for name in before.dtypes if name not in after.dtypes)]
    changed = [name for name in names if before.dtypes.get(name) != after.dtypes.get(name)]
    pairs = (((before.dtypes.get(name, ""), after.dtypes.get(name, "")), name) for name in changed)
    heading = ""
    for (old, new), group in sorted(_folded(pairs), key=lambda each: each[1][0].heading):
        if group[0].heading != heading:
            heading = group[0].heading
            found.append(heading)
        for name in _few_names(group):
            sign = "+" if new else "-"
            found.append(f"  {name}: {old}, now {new}" if old and new else f"  {sign} {name}: {new or old}")
        if group[0] in after.why:
            found.append(f"      {after.why[group[0]]}")
    return found
