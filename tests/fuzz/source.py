"""A random case by seed: classes put together from features, and a script that calls and changes the model."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tests.fuzz.feature import Feature, fill
from tests.fuzz.features import FEATURES, RARELY_TRACED
from tests.fuzz.operations import FIRST, GENERIC

__all__ = ["Case", "Judged", "Part", "Statement", "case_of"]

#: How a case is judged. exact: level O0, bit for bit. unrounded: O1 or O2, with casts that do not round, to FP32's own
#: rounding. rounded: O1 as it is, against eager autocast.
Judged = Literal["exact", "unrounded", "rounded"]

#: How much rarer features are that static capture declines, in most cases that test it.
_DECLINING = 0.03

_HEADER = """\
import collections, contextvars, copy, dataclasses, enum, functools, itertools, math, os, random, types
import numpy as np
import torch, torch.nn.functional as F
from torch import nn
"""
#: name -> what the forward's argument is without a default, and with one
_ARGUMENTS = {"other": "None", "ids": "None", "factor": "1.0", "option": '"none"', "bag": "None"}


@dataclass(frozen=True)
class Part:
    """One use of a feature, or a call of a child (``child``: the number of its class)."""

    number: int
    seed: int
    feature: Feature | None = None
    child: int = 0

    def text(self, what: str, cls: str) -> str:
        if self.feature is None:
            path = f"self.child{self.number}"
            return {"forward": f"h = {path}(h)", "init": f"{path} = Block{self.child}()"}.get(what, "")
        choose = random.Random(f"{self.seed} {what}")
        return fill(getattr(self.feature, what), choose, self.feature.values, n=str(self.number), c=cls)


@dataclass(frozen=True)
class Statement:
    """A line of the script; ``owner``: the number of the part whose state it changes, 0 for none."""

    text: str
    owner: int = 0


@dataclass(frozen=True)
class Case:
    """A module and what is done with it.

    Attributes:
        classes: the parts of each class; the first is the root's.
    """

    seed: int
    capture: str
    judged: Judged
    level: str
    classes: tuple[tuple[Part, ...], ...]
    script: tuple[Statement, ...]
    copies_input: bool

    @cached_property
    def source(self) -> str:
        """The module's source; the script runs in the same namespace."""
        names = ["Root", *(f"Block{i}" for i in range(1, len(self.classes)))]
        before = [part.text("module", name) for name, parts in zip(names, self.classes, strict=True) for part in parts]
        classes = [self._class(i, name) for i, name in enumerate(names)]
        return "\n".join([_HEADER, *filter(None, before), "", *reversed(classes)])

    def _class(self, index: int, name: str) -> str:
        parts = self.classes[index]
        body = "\n".join(filter(None, (part.text("body", name) for part in parts)))
        init = "\n".join(["super().__init__()", *filter(None, (part.text("init", name) for part in parts))])
        forward = "\n".join(part.text("forward", name) for part in parts)
        if index:
            lines = f"def forward(self, h):\n{_indent(forward)}\n    return h"
        else:
            first = "h = x * 1.0" if self.copies_input else "h = x"
            outs = "outs" in forward
            lines = "\n".join(
                [first, *(["outs = []"] if outs else []), forward, f"return {'h, outs' if outs else 'h'}"]
            )
            lines = f"def forward({_signature(forward)}):\n{_indent(lines)}"
        text = "\n\n".join(filter(None, [body, f"def __init__(self):\n{_indent(init)}", lines]))
        return f"class {name}(nn.Module):\n{_indent(text)}\n"

    def listing(self) -> str:
        """Everything as one readable file."""
        head = f"# seed {self.seed}, capture={self.capture!r}, judged {self.judged}, level {self.level}"
        return "\n".join([head, self.source, "m = old = Root()", *(statement.text for statement in self.script)])


def _signature(forward: str) -> str:
    """x, and the arguments that the lines use; a default where they can do without."""
    used = [name for name in _ARGUMENTS if name in forward]
    required = [name for name in used if f"{name} is" not in forward and name in ("other", "ids")]
    optional = [f"{name}={_ARGUMENTS[name]}" for name in used if name not in required]
    return ", ".join(["self", "x", *required, *optional])


def _indent(text: str) -> str:
    return textwrap.indent(text, "    ")


def case_of(seed: int, capture: str, known: Collection[str] = (), only: Collection[str] = ()) -> Case:
    """The case of a seed, without what shows one of the ``known`` faults; with ``only``, of these features."""
    choose = random.Random(f"stateful {seed}")
    features = [f for f in FEATURES if f.fault not in known]
    rare = _DECLINING if capture == "static" and choose.random() < 0.8 else 1.0
    judged: Judged = choose.choices(("exact", "unrounded", "rounded"), (3, 4, 3))[0]
    level = "O0" if judged == "exact" else "O1" if judged == "rounded" else choice_of_level(choose)
    classes = tuple(_classes(choose, features, rare, only))
    script = tuple(_script(choose, classes, known))
    return Case(seed, capture, judged, level, classes, script, choose.random() < 0.5)


def choice_of_level(choose: random.Random) -> str:
    return choose.choice(("O1", "O1", "O2"))


def _classes(
    choose: random.Random, features: Sequence[Feature], rare: float, only: Collection[str]
) -> Iterator[tuple[Part, ...]]:
    number = 0
    amount = choose.choice((1, 1, 2, 2, 3))
    linear = next(f for f in features if f.name == "linear")
    for index in range(amount):
        pool = [f for f in features if index == 0 or not f.root]
        wanted = [f for f in pool if f.name in only]
        chosen = choose.choices(pool, [_weight(f, rare) for f in pool], k=choose.randint(1, 4 if amount == 1 else 3))
        if wanted:
            chosen[0] = choose.choice(wanted)
        if choose.random() < 0.7:
            chosen.append(linear)
        parts: list[tuple[Feature | None, int]] = [(f, 0) for f in chosen]
        choose.shuffle(parts)
        if index < amount - 1:  # each class is called by the one before, at times twice
            for _ in range(choose.choice((1, 1, 1, 2))):
                parts.insert(choose.randint(0, len(parts)), (None, index + 1))
        numbered = []
        for feature, child in parts:
            number += 1
            numbered.append(Part(number, choose.randrange(1 << 30), feature, child))
        yield tuple(numbered)


def _weight(feature: Feature, rare: float) -> float:
    return feature.weight * (rare if feature.name in RARELY_TRACED else 1.0)


def _script(
    choose: random.Random, classes: tuple[tuple[Part, ...], ...], known: Collection[str]
) -> Iterator[Statement]:
    owned = list(_ops(choose, classes, known))
    generic = [op for op in GENERIC if op.fault not in known]
    calls = _Calls(choose, classes)
    if choose.random() < 0.2:
        yield from calls.some()
    if owned and choose.random() < 0.2:
        yield choose.choice(owned)()
    yield Statement(FIRST)
    if choose.random() < 0.8:
        yield from calls.some()
    for _ in range(choose.randint(2, 6)):
        if owned and choose.random() < 0.7:
            yield choose.choice(owned)()
        elif choose.random() < 0.5:
            op = choose.choices(generic, [op.weight for op in generic])[0]
            yield Statement(fill(op.text, choose, (), rest=calls.rest(2)))
        if choose.random() < 0.85:
            yield from calls.some()
    yield from calls.some()


def _ops(choose: random.Random, classes: tuple[tuple[Part, ...], ...], known: Collection[str]):
    paths = {0: "m"}
    for index, parts in enumerate(classes):
        for part in parts:
            if part.feature is None:
                paths.setdefault(part.child, f"{paths[index]}.child{part.number}")
    calls = _Calls(choose, classes)
    for index, parts in enumerate(classes):
        cls = "Root" if index == 0 else f"Block{index}"
        for part in parts:
            for op in part.feature.ops if part.feature else ():
                text, fault = (op, None) if isinstance(op, str) else (op.text, op.fault)
                if fault in known and fault is not None:
                    continue

                def make(text: str = text, part: Part = part, path: str = paths[index], cls: str = cls) -> Statement:
                    assert part.feature is not None
                    blanks = dict(n=str(part.number), m=path, c=cls, rest=calls.rest(2))
                    return Statement(fill(text, choose, part.feature.values, **blanks), part.number)

                yield make


class _Calls:
    """Statements that call the model with what its forward wants."""

    def __init__(self, choose: random.Random, classes: tuple[tuple[Part, ...], ...]) -> None:
        self._choose = choose
        self._forward = "\n".join(part.text("forward", "") for part in classes[0])
        inits = [part.text("init", "") for parts in classes for part in parts]
        self._no_weights = not any("nn." in init or "torch." in init for init in inits)

    def some(self) -> Iterator[Statement]:
        choose = self._choose
        rows, gradients = choose.choice((2, 2, 2, 3, 4)), choose.random() < 0.4
        wants = ", grad=True" if gradients and choose.random() < 0.6 else ""
        seed = choose.randrange(100)
        argument = f"x({rows}, {seed}{wants})"
        if not wants and choose.random() < 0.1:
            argument = f"x({2 * rows}, {seed})[::2]"
        elif self._no_weights and choose.random() < 0.15:
            argument += ".double()"
        call = f"run(m, {argument}, {self.rest(rows)})"
        if "other" in self._forward and choose.random() < 0.6:
            yield Statement(f"a = x({rows + 1}, {seed}{wants})")
            first, second = choose.choice(
                ((f"a[:{rows}]", f"a[:{rows}]"), (f"a[:{rows}]", "a[1:]"), ("a[1:]", f"a[:{rows}]"))
            )
            if choose.random() < 0.6:
                first = second = "a"
            rest = self.rest(rows if first != "a" else rows + 1, other=False)
            call = f"run(m, {first}, other={second}, {rest})"
        if gradients:
            yield Statement(f"y = {call}")
            yield Statement("backward(y)")
            if choose.random() < 0.4:
                yield Statement("step(m)")
        else:
            kind = choose.choice(
                ("", "", "with torch.no_grad(): ", "with torch.no_grad(): ", "with torch.inference_mode(): ")
            )
            yield Statement(kind + call)

    def rest(self, rows: int, other: bool = True) -> str:
        """The further arguments of a call."""
        choose, given = self._choose, []
        seed = choose.randrange(100)
        if other and "other" in self._forward and ("other is None" not in self._forward or choose.random() < 0.5):
            given.append(f"other=x({rows}, {seed + 1})")
        if "ids" in self._forward and ("ids is None" not in self._forward or choose.random() < 0.5):
            given.append(f"ids=i({rows}, {seed})" + choose.choice(("", "", "", ".int()")))
        if "factor" in self._forward:
            given.append(f"factor={choose.choice(('2', '2.0', '0.5', 'True'))}")
        if "option" in self._forward:
            given.append(f"option={choose.choice(('double', 'none'))!r}")
        if "bag" in self._forward:
            given.append(f"bag=[{choose.randrange(3)}]")
        return ", ".join(given)
