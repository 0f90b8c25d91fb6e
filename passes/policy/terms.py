"""The words of a policy: levels, precisions, rows of custom ops, and overrides with what each of them matches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, Literal, TypeAlias, cast, get_args

import torch
from torch.fx import Node

from fxprec.errors import PolicyError
from fxprec.passes.graph.annotations import CASTABLE, Rule, clean_path
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.table import OP_TABLE, facts_of

Level = Literal["O0", "O1", "O2", "O3"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)

Kind = Literal["ops", "modules", "nodes", "where"]
Resolved: TypeAlias = "Rule | torch.dtype"
Predicate: TypeAlias = Callable[[Node], "Resolved | str | None"]

_DTYPES: Final = {dtype_name(dtype): dtype for dtype in sorted(CASTABLE, key=str)}
_WANTED: Final = {
    "ops": "the canonical name of an op, as in docs/precision.md",
    "modules": "a dotted module path, a class name or a module class",
    "nodes": "the name of a graph node",
    "where": "a function of a node that returns a precision or None",
}


@dataclass(frozen=True, slots=True)
class CustomRule:
    """The row of an op that the table does not know; ``source`` is the file and line it was read from."""

    op: str
    rule: Rule
    why: str
    source: str = ""

    def __post_init__(self) -> None:
        place = f" ({self.source})" if self.source else ""
        if not isinstance(self.op, str) or not self.op:
            raise PolicyError(f"rule{place}: {self.op!r} is not the name of an op, such as 'mylib::op'")
        if self.op in OP_TABLE:
            fix = f"use override(ops={{{self.op!r}: ...}}) to decide otherwise"
            raise PolicyError(f"rule{place}: op {self.op!r} has a row in the op table: {fix}")
        found = parse_precision(self.rule, f"rule of op {self.op!r}{place}")
        if not isinstance(found, Rule):
            raise PolicyError(
                f"rule of op {self.op!r}{place} is {precision_name(found)}, but must be one of {', '.join(Rule)}"
            )
        object.__setattr__(self, "rule", found)


@dataclass(frozen=True, slots=True)
class Override:
    """Override of the policy for some ops or modules.

    Attributes:
        kind: what the pattern is compared with.
        pattern: a name or glob; for "modules" also a class; for "where" the predicate.
        precision: a rule or dtype; None for "where", whose predicate gives it node by node.
        source: file and line, where it was read from one.
    """

    kind: Kind
    pattern: str | type | Predicate
    precision: Resolved | None
    source: str = ""

    def __post_init__(self) -> None:
        if not _fits(self.kind, self.pattern):
            place = f" ({self.source})" if self.source else ""
            raise PolicyError(f"override {self.kind}{place}: {self.pattern!r} is not {_WANTED[self.kind]}")
        if self.kind != "where":
            object.__setattr__(self, "precision", parse_precision(self.precision, f"override {self.label}"))

    @property
    def name(self) -> str:
        """The pattern as text."""
        return self.pattern if isinstance(self.pattern, str) else getattr(self.pattern, "__name__", repr(self.pattern))

    @property
    def label(self) -> str:
        """Kind, pattern and place, for messages."""
        return f"{self.kind} {self.name!r}" + (f" ({self.source})" if self.source else "")

    def __str__(self) -> str:
        value = "" if self.precision is None else f" = {precision_name(self.precision)}"
        return f"{self.kind} {self.name!r}{value}" + (f" ({self.source})" if self.source else "")

    def match(self, op_name: str, node: Node, module_path: str) -> Resolved | None:
        """Return what the override says of a node, or None."""
        if self.kind == "where":
            found = cast(Predicate, self.pattern)(node)
            return None if found is None else parse_precision(found, f"override {self.label}, node {node.name!r}")
        if self.kind == "modules":
            hit = self._matches_path(module_path) or any(
                self._matches_class(kind) or self._matches_path(path) for path, kind in _stack(node)
            )
        elif self.kind == "ops":
            hit = any(fnmatchcase(name, self.name) for name in _names_of(op_name))
        else:
            hit = fnmatchcase(node.name, self.name)
        return self.precision if hit else None

    def matches_module(self, path: str, modules: Mapping[str, object]) -> bool:
        """Return whether it names the module at ``path``, or one that holds it. ``modules``: path -> module, of all."""
        kinds = (type(modules[each]) for each in _with_parents(path) if each in modules)
        return self.kind == "modules" and (self._matches_path(path) or any(map(self._matches_class, kinds)))

    def complaint(self, ops: set[str], modules: Mapping[str, object], nodes: set[str]) -> str | None:
        """Return why it matches none of these names, or None where it does; a predicate may rightly find nothing.

        ``modules``: path -> module, its class, or None.
        """
        if self.kind == "where":
            return None
        if self.kind != "modules":
            names = {name for op in ops for name in _names_of(op)} if self.kind == "ops" else nodes
            if any(fnmatchcase(each, self.name) for each in names):
                return None
            return f"override {self}: the graph has no such {self.kind[:-1]}{did_you_mean(self.name, names)}"
        kinds = {each if isinstance(each, type) else type(each) for each in modules.values() if each is not None}
        if any(map(self._matches_path, modules)) or any(map(self._matches_class, kinds)):
            return None
        near = did_you_mean(self.name, {*modules, *(kind.__name__ for kind in kinds)})
        return f"override {self}: no module has this path or class{near}"

    def _matches_path(self, path: str) -> bool:
        return isinstance(self.pattern, str) and any(fnmatchcase(each, self.pattern) for each in _with_parents(path))

    def _matches_class(self, kind: object) -> bool:
        """``kind``: a class, or its qualified name as torch.export records it."""
        if isinstance(kind, type):
            if isinstance(self.pattern, type):
                return issubclass(kind, self.pattern)
            return any(base.__name__ == self.pattern for base in kind.__mro__)
        return isinstance(kind, str) and kind.rpartition(".")[2] == self.name


def parse_level(value: object) -> Level:
    """The level of this name."""
    if value in LEVELS:
        return cast(Level, value)
    digit = re.fullmatch(r"[Oo0]?([0-3])", str(value))
    near = f" (did you mean 'O{digit[1]}'?)" if digit else ""
    raise PolicyError(f"unknown level {value!r}: levels are {', '.join(LEVELS)}, with the letter O{near}")


def parse_precision(value: object, where: str) -> Resolved:
    """A rule or a float dtype from what users write: ``torch.float32``, ``"float32"``, ``"keep"``, ``Rule.KEEP``."""
    text = str(value).removeprefix("torch.") if isinstance(value, torch.dtype | str) else repr(value)
    if text in _DTYPES:
        return _DTYPES[text]
    if text in tuple(Rule):
        return Rule(text)
    choices = (*_DTYPES, *Rule)
    raise PolicyError(
        f"{where}: {text!r} is no precision: use one of {', '.join(choices)}{did_you_mean(text, choices)}"
    )


def precision_name(precision: Resolved) -> str:
    """``float32`` or ``keep``."""
    return dtype_name(precision) if isinstance(precision, torch.dtype) else precision.value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'a' or 'b'?)`` or nothing."""
    found = get_close_matches(name, sorted(set(known)), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _fits(kind: Kind, pattern: object) -> bool:
    if kind == "where":
        return callable(pattern)
    return (isinstance(pattern, str) and pattern != "") or (kind == "modules" and isinstance(pattern, type))


def _names_of(op_name: str) -> tuple[str, ...]:
    """Return an op's name, and that of the op of which it is a form."""
    form_of = facts_of(op_name).form_of
    return (op_name,) if form_of is None else (op_name, form_of)


def _stack(node: Node) -> Iterator[tuple[str, object]]:
    for key, value in (node.meta.get("nn_module_stack") or {}).items():
        path, kind = value if isinstance(value, tuple) and len(value) == 2 else (key, value)
        yield clean_path(str(path)), kind


@lru_cache(maxsize=4096)
def _with_parents(path: str) -> tuple[str, ...]:
    """``a.b.c`` -> ``a.b.c``, ``a.b``, ``a``, and the root ``""``."""
    parts = path.split(".") if path else []
    return tuple(".".join(parts[:length]) for length in range(len(parts), -1, -1))
