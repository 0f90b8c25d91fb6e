"""Tables for a terminal, a notebook or a log. rich is imported when something is printed."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Columns of the plain text: nothing is ever wrapped, so that grep finds what it looks for.
_WIDTH: Final = 100_000

_STYLES: Final = {"float16": "green", "bfloat16": "green", "float32": "yellow", "cast": "magenta"}


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """rich draws a random number when it is imported: the user's seed would give other numbers afterwards."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def stacked(parts: Iterable[RenderableType]) -> RenderableType:
    """One below the other."""
    with _importing():
        from rich.console import Group

    return Group(*parts)


def titled(title: str, *parts: RenderableType) -> RenderableType:
    """A bold line, and what follows it."""
    with _importing():
        from rich.text import Text

    return stacked([Text(title, style="bold"), *parts])


def columns(names: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """Columns without a frame or rules between them, so that plain text stays plain."""
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
    """The text that rich would print, without colours and of a fixed width."""
    with _importing():
        from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None, force_terminal=False).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))
