"""Write the texts of reports: tables for a terminal, a notebook or a log, repeated layers as one, like reasons as one.

``blocks.0.mlp`` and ``blocks.1.mlp`` are ``blocks.*.mlp``, or ``blocks.0-1.mlp``. Reasons that differ in figures, sizes
or quoted names only are joined: ``takes 10.4 to 16.6 us in float32``. rich is imported when something is printed.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from fxprec.errors import few

if TYPE_CHECKING:
    from rich.console import RenderableType
else:  # rich is imported when something is printed
    RenderableType = Any


#: Columns of the plain text: nothing is ever wrapped, so that grep finds what it looks for.
_WIDTH: Final = 100_000

#: The most letters of an exception's text that a line of a report shows.
_CLAUSE: Final = 120
#: Where a sentence of an exception ends: "(e.g. Tensor)" has no end in it.
_SENTENCE_END: Final = re.compile(r"(?<!\be\.g)(?<!\bi\.e)[.!?]\s+(?=[A-Z])")

#: Where a text of torch's begins to give advice: all after it is more of that.
_ADVICE: Final = re.compile(
    r"[.;,:]?\s+(?:If you|If this|Please|Consider|Try |You can|You may|To (?:fix|debug|get|suppress|avoid|resolve)"
    r"|For more|See https?:|Hint:|Hints?:|Set TORCH|Explanation:|Developer debug|from user code).*$"
)

_STYLES: Final = {"float16": "green", "bfloat16": "green", "float32": "yellow", "cast": "magenta"}

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
#: The numbers in a path: ``blocks.3.experts.0`` has (3, 0).
Numbers = tuple[int, ...]
#: A quoted name, a size as ``64x128``, or a number that is no part of a word.
_FIGURE: Final = re.compile(
    r"(?<!\w)'[^']*'(?!\w)|(?<![\w.])\d+(?:x\d+)+(?!\w)|(?<![\w.+-])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])"
)
#: Names that are told.
_SHOWN_NAMES: Final = 3


def clause_of(error: BaseException) -> str:
    """Return an exception as one clause for a line of a report: ``RuntimeError: sizes 3 and 4 do not match``.

    Only the first sentence of its first line: what torch writes after it is advice for whoever wrote the failing call.
    """
    sentence = _SENTENCE_END.split(str(error).strip().partition("\n")[0], maxsplit=1)[0].rstrip(" .:;,")
    if len(sentence) > _CLAUSE:
        sentence = f"{sentence[:_CLAUSE].rpartition(' ')[0] or sentence[:_CLAUSE]} ..."
    return f"{type(error).__name__}: {sentence}" if sentence else type(error).__name__


def without_advice(text: str) -> str:
    """Return the first line of a reason, without what torch advises whoever wrote the code that failed."""
    return _ADVICE.sub("", text.strip().partition("\n")[0]).rstrip(" .:;,")


def as_json(part: Any, *properties: str, without: Collection[str] = ()) -> dict[str, Any]:
    """Return fields of a dataclass, and properties, as plain data for JSON: a number that is not finite is None."""
    names = [each.name for each in dataclasses.fields(part) if each.name not in without]
    return {name: _plain_data(getattr(part, name)) for name in (*names, *properties)}


def _plain_data(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return as_json(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): _plain_data(each) for key, each in value.items()}
    # A NamedTuple has names, which a reader of the JSON wants as well.
    if hasattr(value, "_asdict"):
        return _plain_data(value._asdict())
    return [*map(_plain_data, value)] if isinstance(value, tuple | list) else value


@functools.cache
def _rich() -> Any:
    """Return rich, imported when something is printed first."""
    # It draws a random number when it is imported: the user's seed would give others.
    state = random.getstate()
    try:
        import rich.console
        import rich.table
        import rich.text
    finally:
        random.setstate(state)
    return rich


def stacked(parts: Iterable[RenderableType]) -> RenderableType:
    """Stack parts, one below the other."""
    return _rich().console.Group(*parts)


def titled(title: str, *parts: RenderableType) -> RenderableType:
    """Put a bold line above parts."""
    return stacked([_rich().text.Text(title, style="bold"), *parts])


def columns(names: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """Lay out columns without a frame or rules between them, so that plain text stays plain."""
    look = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0), "header_style": "bold"}
    found = _rich().table.Table(show_header=any(names), **look)
    for name in names:
        found.add_column(name, overflow="fold", no_wrap=name in ("computes", "output", "rule"))
    for row in rows:
        found.add_row(*(_rich().text.Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return found


def table(cells: Mapping[str, Callable[[Any], str]], rows: Iterable[Any]) -> RenderableType:
    """Lay out a line for each row; ``cells``: name of a column -> the text of its cell."""
    return columns([*cells], ([cell(row) for cell in cells.values()] for row in rows))


def plain(renderable: object) -> str:
    """Return the text that rich would print, without colours and of a fixed width."""
    file = io.StringIO()
    _rich().console.Console(file=file, width=_WIDTH, color_system=None, force_terminal=False).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))


class Printed:
    """Mixin of results that print as their ``__rich__`` lays them out."""

    __slots__ = ()

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__  # a dataclass has a ``repr`` of its own, unless it is made without


def fold(path: str) -> str:
    """Return the path with ``*`` for each number."""
    return _NUMBER.sub("*", path)


def numbers_of(path: str) -> Numbers:
    """Return the numbers that ``fold`` leaves out of a path."""
    return tuple(map(int, _NUMBER.findall(path)))


def unfold(pattern: str, numbers: Iterable[Numbers]) -> Iterator[str]:
    """Yield few names that stand for these numbers in a folded path: ``blocks.0-4,6.mlp``; each path is in one."""
    texts = pattern.split("*")
    for ranges in _products(set(numbers)):
        yield "".join(itertools.chain(*zip(texts, [*ranges, ""], strict=True)))


def layers_together(
    rows: Iterable[Any], facts: Callable[[Any], tuple[object, ...]]
) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield the rows of a table whose layers repeat, together: a name with their number, the folded module, the rows.

    Args:
        rows: of a ledger or of ranges.
        facts: what they must agree in besides.
    """
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        name = fold(row.node) if row.kind == "weight" else row.op if row.kind == "node" else row.node
        groups.setdefault((name, fold(row.module), row.kind, row.op, *facts(row)), []).append(row)
    for (name, module, *_), group in groups.items():
        yield name + (f" ({len(group)} of them)" if len(group) > 1 else ""), module, group


def folded(paths: Iterable[str]) -> list[str]:
    """Return few names for paths, in the order in which they come first: ``["blocks.0-11.mlp", "head"]``."""
    alike: dict[str, list[Numbers]] = {}
    for path in paths:
        alike.setdefault(fold(path), []).append(numbers_of(path))
    return [name for pattern, numbers in alike.items() for name in unfold(pattern, numbers)]


def _products(numbers: set[Numbers]) -> list[list[str]]:
    """Return sets of numbers, as texts, whose products are these tuples."""
    if numbers == {()}:
        return [[]]
    # Tuples that agree behind the first number become one range of first numbers; what is left is split likewise.
    firsts: dict[Numbers, set[int]] = {}
    for first, *rest in numbers:
        firsts.setdefault(tuple(rest), set()).add(first)
    rests: dict[tuple[int, ...], set[Numbers]] = {}
    for rest, found in firsts.items():
        rests.setdefault(tuple(sorted(found)), set()).add(rest)
    return [[_ranges(found), *tail] for found in sorted(rests) for tail in _products(rests[found])]


def _ranges(numbers: tuple[int, ...]) -> str:
    """Write numbers as ranges: ``0-4,6``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def without_figures(why: str) -> str:
    """Return a reason with its figures left out, equal for reasons that differ in figures only."""
    return _FIGURE.sub(lambda figure: "''" if figure[0].startswith("'") else "#", why)


def in_one(whys: Sequence[str]) -> str:
    """Join reasons that differ in figures only."""
    figures = zip(*(_FIGURE.findall(why) for why in whys), strict=True)
    found = map(_together, figures)
    return _FIGURE.sub(lambda _: next(found), whys[0])


def _together(figures: Sequence[str]) -> str:
    different = [*dict.fromkeys(figures)]
    if len(different) == 1:
        return different[0]
    # Names have no order: a few are listed. Figures have one: their range is told.
    if figures[0].startswith("'"):
        names = [name[1:-1] for name in different]
        names = names if any("*" in name for name in names) else folded(names)
        return few([f"'{name}'" for name in names], _SHOWN_NAMES)
    ordered = sorted(different, key=lambda figure: math.prod(map(float, figure.split("x"))))
    return f"{ordered[0]} to {ordered[-1]}"
