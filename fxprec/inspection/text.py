"""Lay out tables for a terminal, a notebook or a log. rich is imported when something is printed."""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import RenderableType

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


def clause_of(error: BaseException) -> str:
    """Return an exception as one clause for a line of a report: ``RuntimeError: sizes 3 and 4 do not match``.

    Only the first sentence of its first line: what torch writes after it is advice for whoever wrote the failing call.
    """
    return f"{type(error).__name__}: {clause}" if (clause := first_sentence(str(error))) else type(error).__name__


def first_sentence(text: str) -> str:
    """Return the first sentence of a text's first line, without its full stop, and not longer than a line bears."""
    sentence = _SENTENCE_END.split(text.strip().partition("\n")[0], maxsplit=1)[0].rstrip(" .:;,")
    if len(sentence) <= _CLAUSE:
        return sentence
    return f"{sentence[:_CLAUSE].rpartition(' ')[0] or sentence[:_CLAUSE]} ..."


def without_advice(text: str) -> str:
    """Return the first line of a reason, without what torch advises whoever wrote the code that failed."""
    return _ADVICE.sub("", text.strip().partition("\n")[0]).rstrip(" .:;,")


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Keep Python's random state: rich draws a number when it is imported, and the user's seed would give others."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def stacked(parts: Iterable[RenderableType]) -> RenderableType:
    """Stack parts, one below the other."""
    with _importing():
        from rich.console import Group

    return Group(*parts)


def titled(title: str, *parts: RenderableType) -> RenderableType:
    """Put a bold line above parts."""
    with _importing():
        from rich.text import Text

    return stacked([Text(title, style="bold"), *parts])


def columns(names: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """Lay out columns without a frame or rules between them, so that plain text stays plain."""
    with _importing():
        from rich.table import Table
        from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(names), header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name in ("computes", "output", "rule"))
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table


def plain(renderable: RenderableType) -> str:
    """Return the text that rich would print, without colours and of a fixed width."""
    with _importing():
        from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None, force_terminal=False).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))
