"""What a random module is put together from: pieces of source, and the statements that change their state later."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

__all__ = ["NUMBERS", "Feature", "Op", "fill"]

#: Effects of at least a factor of 1.5, exact in every dtype.
NUMBERS = ("0.5", "2.0", "0.25", "-1.0", "1.5", "3")


@dataclass(frozen=True)
class Op:
    """A statement of the script. ``fault``: the known fault of the library that it shows, if any."""

    text: str
    fault: str | None = None


@dataclass(frozen=True)
class Feature:
    """One way to depend on state. In the texts ``$n`` is the number of this use, ``$m`` (in ops) the path to the
    module that has it, ``$c`` its class, ``$v`` one of ``values``, drawn anew at each place, ``$i`` a small integer.

    Attributes:
        name: for ``--only``, and in statistics.
        forward: lines of the forward: from the float ``h`` of shape (rows, 4) to ``h``.
        module: lines before the classes.
        body: lines in the class.
        init: lines in ``__init__``.
        ops: statements that change the state between calls.
        root: its lines use what only the root's forward has: ``x``, ``other``, ``ids`` and ``outs``.
        weight: how often it is chosen.
        fault: the known fault of the library that it shows, if any.
    """

    name: str
    forward: str
    module: str = ""
    body: str = ""
    init: str = ""
    ops: tuple[str | Op, ...] = ()
    values: tuple[str, ...] = NUMBERS
    root: bool = False
    weight: float = 1.0
    fault: str | None = None


class _Blanks(Mapping[str, str]):
    def __init__(self, choose: random.Random, values: tuple[str, ...], known: dict[str, str]) -> None:
        self._choose, self._values, self._known = choose, values, known

    def __getitem__(self, name: str) -> str:
        if name == "v":
            return self._choose.choice(self._values)
        if name == "i":
            return str(self._choose.randrange(100))
        return self._known[name]

    def __iter__(self):
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def fill(text: str, choose: random.Random, values: tuple[str, ...], **known: str) -> str:
    """The text with its blanks filled."""
    return Template(text).substitute(_Blanks(choose, values, known)) if "$" in text else text
