"""Decides the precision of ops by policy: a level, rows for custom ops, and overrides of which the last match wins.

A policy only answers questions; ``decide`` asks one a node::

    policy = Policy.preset("O1").override(modules={"encoder.*.attn": torch.float32})
    policy.resolve("linear", node, "encoder.layers.0.attn", row_of("linear"))
    -> (torch.float32, "override modules 'encoder.*.attn' = float32")

Matching: ``ops`` are canonical op names, ``nodes`` are graph node names, ``modules`` are dotted paths or module classes
(the class itself, or its name in a string). Strings may hold the wildcards ``*``, ``?`` and ``[...]``; ``*`` crosses
dots. What matches a module covers everything below it. A module override leaves KEEP and unknown ops alone (random
numbers, FFTs, linalg have no low kernels); one that names the op or the node, and ``where``, is obeyed as it stands.
At O0 nothing is changed, whatever the overrides say: that level equals the original bit for bit.

Policies are read from TOML and written to it; examples/policy.toml shows and explains every table. ``[policy]`` holds
the level, ``[[rules]]`` the rows of custom ops; ``[ops]``, ``[modules]`` and ``[nodes]`` hold the overrides in the
order in which the file has them: as in Python, the last that matches wins.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch.fx import Node

from fxprec.errors import PolicyError, did_you_mean
from fxprec.passes.graph.annotations import CASTABLE, Rule, clean_path
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.custom import registered, registered_autocast
from fxprec.passes.ops.table import OP_TABLE, OpRule, facts_of

Level = Literal["O0", "O1", "O2", "O3"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)

Kind = Literal["ops", "modules", "nodes", "where"]
Resolved: TypeAlias = "Rule | torch.dtype"


class Ruling(NamedTuple):
    """Answer of a policy for one node.

    Attributes:
        rule: a rule of the op table, or the dtype that an override or torch's registry names.
        why: one clause for the report.
        lowered: the table says FULL, and only the level (O3) makes it low.
    """

    rule: Resolved
    why: str
    lowered: bool = False


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
        object.__setattr__(self, "rule", found)  # frozen, and "low" is given as a string as well


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
            try:
                found = cast(Predicate, self.pattern)(node)
            except Exception as error:
                told = f"the predicate raised {type(error).__name__} for node {node.name!r}: {error}"
                raise PolicyError(f"override {self.label}: {told}") from error
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
        """Compare the pattern with a class and its bases, or with a qualified name, as torch.export records it."""
        if isinstance(kind, type):
            if isinstance(self.pattern, type):
                return issubclass(kind, self.pattern)
            return any(base.__name__ == self.pattern for base in kind.__mro__)
        return isinstance(kind, str) and kind.rpartition(".")[2] == self.name


def parse_level(value: object) -> Level:
    """Return the level of this name."""
    if value in LEVELS:
        return cast(Level, value)
    digit = re.fullmatch(r"[Oo0]?([0-3])", str(value))
    near = f" (did you mean 'O{digit[1]}'?)" if digit else ""
    raise PolicyError(f"unknown level {value!r}: levels are {', '.join(LEVELS)}, with the letter O{near}")


def parse_precision(value: object, where: str) -> Resolved:
    """Read a rule or a float dtype as users write it: ``torch.float32``, ``"float32"``, ``"keep"``, ``Rule.KEEP``."""
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
    """Return the name of a precision: ``float32`` or ``keep``."""
    return dtype_name(precision) if isinstance(precision, torch.dtype) else precision.value


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
    """Return a path and those above it: ``a.b.c``, ``a.b``, ``a``, and the root ``""``."""
    parts = path.split(".") if path else []
    return tuple(".".join(parts[:length]) for length in range(len(parts), -1, -1))


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy of a conversion: what is lowered. Every method that changes something returns a new one."""

    level: Level = "O1"
    overrides: tuple[Override, ...] = ()
    rules: tuple[CustomRule, ...] = ()

    def __post_init__(self) -> None:
        parse_level(self.level)
        known = [*OP_TABLE, *(row.op for row in self.rules)]
        for override in self.overrides:
            named = override.kind != "ops" or any(fnmatchcase(name, override.name) for name in known)
            if not named and registered(override.name) is None:
                raise PolicyError(
                    f"override {override}: no op has this name{did_you_mean(override.name, known)}; docs/precision.md "
                    "lists them. A custom op is 'namespace::name': import what registers it first, or add a row with "
                    "Policy.with_rule"
                )

    @classmethod
    def preset(cls, level: str) -> Policy:
        """Return a level without overrides: O0 (nothing lowered), O1, O2, O3."""
        return cls(parse_level(level))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy file; examples/policy.toml explains the format."""
        return cls(*load(path))

    def to_toml(self) -> str:
        """Return the text of a file that ``from_toml`` reads back; what has no such text (a predicate) is refused."""
        return dump(self.level, self.overrides, self.rules)

    def override(
        self,
        *,
        ops: Mapping[str, Resolved | str] | None = None,
        modules: Mapping[str | type, Resolved | str] | Mapping[str, Resolved | str] | None = None,
        nodes: Mapping[str, Resolved | str] | None = None,
        where: Predicate | None = None,
    ) -> Policy:
        """Add overrides after the present ones, in the order ops, modules, nodes, where: the last that matches wins.

        A precision is torch.float32, torch.float16, torch.bfloat16 or a rule ("low": the dtype ``convert`` lowers to),
        or its name.
        """
        groups: dict[Kind, Mapping[Any, Any]] = {"ops": ops or {}, "modules": modules or {}, "nodes": nodes or {}}
        added = [Override(kind, pattern, value) for kind, group in groups.items() for pattern, value in group.items()]
        if where is not None:
            added.append(Override("where", where, None))
        return replace(self, overrides=(*self.overrides, *added))

    def with_rule(self, op: str, rule: Rule | str, why: str) -> Policy:
        """Add the row of a custom op, named as torch registers it ("namespace::name"); a later row of the op wins."""
        return replace(self, rules=(*self.rules, CustomRule(op, cast(Rule, rule), why)))

    def resolve(
        self, op_name: str, node: Node, module_path: str, table_rule: OpRule | None, device: str | None = None
    ) -> Ruling:
        """Return the rule or dtype of a node. ``device``: where the parameters are (autocast registrations differ)."""
        if self.level == "O0":
            return Ruling(Rule.KEEP, "level O0 changes nothing")
        known, why = self.row(op_name, table_rule, device)
        for override in reversed(self.overrides):
            found = override.match(op_name, node, module_path)
            # A module holds ops that nobody thought of: those that keep their dtypes may have no low kernel.
            if found is not None and not (override.kind == "modules" and known is Rule.KEEP):
                # A predicate's text names no precision: say which one it gave.
                value = "" if override.precision else f" = {precision_name(found)}"
                return Ruling(found, f"override {override}{value}")
        if self.level == "O3" and known is Rule.FULL and (table_rule is None or table_rule.low_kernel):
            return Ruling(Rule.LOW, f"level O3 lowers it all the same ({why})", lowered=True)
        return Ruling(known, why)

    def of_module(self, path: str, modules: Mapping[str, object]) -> Resolved | None:
        """Return what overrides say of the module at ``path``, or None.

        ``modules``: path -> module, of all. KEEP ops in it stay as they are all the same (``resolve``).
        """
        overrides = (each for each in reversed(self.overrides) if each.matches_module(path, modules))
        return next((each.precision for each in overrides), None)

    def row(self, op_name: str, table_rule: OpRule | None, device: str | None = None) -> tuple[Resolved, str]:
        """Return what is known of an op before level and overrides count."""
        for row in reversed(self.rules):
            if row.op == op_name:
                return row.rule, row.why
        if table_rule is not None:
            return table_rule.rule, table_rule.why
        dtype = registered_autocast(op_name, device)
        if dtype in CASTABLE:
            return dtype, f"torch.library.register_autocast says {dtype_name(dtype)}"
        return Rule.KEEP, "unknown op: keeps its dtypes (Policy.with_rule adds a row)"

    @property
    def has_tables(self) -> bool:
        """Flag of a policy that a file can hold in its order: overrides of a kind stand together, as its tables do."""
        kinds = [kind for kind, _ in groupby(each.kind for each in self.overrides)]
        return len(kinds) == len({*kinds})

    @property
    def lowers_sources(self) -> bool:
        """Float inputs and embeddings become low on entry, so that the residual stream is low (O2 and O3)."""
        return self.level in ("O2", "O3")

    @property
    def lowers_parameters(self) -> bool:
        """The parameters themselves become low (O3)."""
        return self.level == "O3"

    def check_matches(
        self, op_names: Iterable[str], modules: Mapping[str, object] | Iterable[str], node_names: Iterable[str]
    ) -> None:
        """Raise if an override matched nothing in what was converted; the caller collects the names of all graphs.

        ``modules``: path -> module (``dict(model.named_modules())``) or class; bare paths where no class is known.
        """
        ops, nodes = set(op_names), set(node_names)
        paths = modules if isinstance(modules, Mapping) else dict.fromkeys(modules)
        complaints = [found for each in self.overrides if (found := each.complaint(ops, paths, nodes))]
        complaints += [
            f"rule of op {row.op!r}{f' ({row.source})' if row.source else ''}: neither the model nor torch has this op"
            + did_you_mean(row.op, ops)
            for row in self.rules
            if row.op not in ops and registered(row.op) is None
        ]
        if complaints:
            raise PolicyError(
                "the policy says things that match nothing in this model:\n  "
                + "\n  ".join(complaints)
                + "\nCorrect or remove them; fxprec.report of a model converted without them lists every name."
            )


#: What a ``Policy`` is made of.
Parts: TypeAlias = tuple[Level, tuple[Override, ...], tuple[CustomRule, ...]]

_OVERRIDES: Final = ("ops", "modules", "nodes")
_TABLES: Final = ("policy", *_OVERRIDES, "rules")
_RULE_KEYS: Final = ("op", "rule", "why")


def load(path: str | os.PathLike[str]) -> Parts:
    """Read a policy file: level, overrides, rules.

    Raises:
        PolicyError: there is no such file, or it says something else than a policy; names the line.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        near = did_you_mean(file.name, (each.name for each in file.parent.glob("*.toml")))
        raise PolicyError(f"cannot read the policy file {str(file)!r}: {error.strerror}{near}") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"the policy file {str(file)!r} is not UTF-8 text") from error
    return loads(text, str(file))


def loads(text: str, name: str = "<toml>") -> Parts:
    """Read a policy from a text, as ``load`` does; ``name`` stands for the file in messages."""
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{name} is not valid TOML: {error} (names with dots or colons want quotes)") from error
    places = _Places(text, name)
    level: Level = "O1"
    overrides: list[Override] = []
    rules: list[CustomRule] = []
    for table, content in document.items():
        if table not in _TABLES:
            # A key of [policy] that stands above any table: "level", or something that may be meant for it.
            if near := did_you_mean(table, ("level",)):
                near = "" if table == "level" else near
                raise PolicyError(
                    f"{places.of(table)}: {table!r} stands in no table{near}: the level belongs under [policy], as in "
                    '[policy] and, on the next line, level = "O1"'
                )
            wrong = f"unknown table or key {table!r}{did_you_mean(table, _TABLES)}"
            raise PolicyError(f"{places.of(table)}: {wrong}; there are {', '.join(f'[{each}]' for each in _TABLES)}")
        if table == "rules":
            if not isinstance(content, list):
                raise PolicyError(
                    f"{places.of(table)}: rules are a list of tables: write [[rules]], in double brackets"
                )
            rules = [_rule(row, places.of("rules", "op", index)) for index, row in enumerate(content)]
        elif not isinstance(content, dict):
            raise PolicyError(f"{places.of(table)}: {table!r} must be a table, [{table}]")
        elif table == "policy":
            level = _level(content, places)
        else:
            for pattern, value in content.items():
                place = places.of(table, pattern)
                overrides.append(Override(cast(Kind, table), pattern, _text(value, place), place))
    return level, tuple(overrides), tuple(rules)


def dump(level: Level, overrides: Iterable[Override], rules: Iterable[CustomRule]) -> str:
    """Return the text that ``loads`` reads back to the same (sources apart; classes become their names)."""
    lines = ["[policy]", f'level = "{level}"']
    for row in rules:
        lines += ["", "[[rules]]", f"op = {_quote(row.op)}", f'rule = "{row.rule.value}"', f"why = {_quote(row.why)}"]
    written: set[str] = set()
    for kind, group in groupby(overrides, key=lambda each: each.kind):
        if kind == "where":
            raise PolicyError(
                "a policy with where= has no TOML form: its predicate is code; name modules, ops or nodes"
            )
        if kind in written:
            raise PolicyError(
                f"overrides of {kind} come before and after others, and TOML has one [{kind}] table: "
                f"give all of them in one override() call"
            )
        written.add(kind)
        last: dict[str, Resolved] = {}
        for each in group:
            last.pop(each.name, None)  # of equal patterns side by side only the last can win, and its place counts
            last[each.name] = cast(Resolved, each.precision)
        lines += ["", f"[{kind}]", *(f'{_quote(name)} = "{precision_name(value)}"' for name, value in last.items())]
    return "\n".join(lines) + "\n"


def _level(content: dict[str, Any], places: _Places) -> Level:
    for key in content:
        if key != "level":
            near = did_you_mean(key, ["level", *_TABLES])
            raise PolicyError(f"{places.of('policy', key)}: unknown key {key!r} in [policy]{near}; it takes level")
    try:
        return parse_level(content.get("level", "O1"))
    except PolicyError as error:
        raise PolicyError(f"{places.of('policy', 'level')}: {error}") from None


def _rule(row: object, place: str) -> CustomRule:
    if not isinstance(row, dict):
        raise PolicyError(f"{place}: each of [[rules]] must be a table with {', '.join(_RULE_KEYS)}")
    for key in row:
        if key not in _RULE_KEYS:
            raise PolicyError(f"{place}: unknown key {key!r} in [[rules]]{did_you_mean(key, _RULE_KEYS)}")
    if missing := [key for key in _RULE_KEYS if key not in row]:
        raise PolicyError(f"{place}: [[rules]] lacks {', '.join(missing)}")
    return CustomRule(row["op"], cast(Any, _text(row["rule"], place)), _text(row["why"], place), place)


def _text(value: object, place: str) -> Any:
    if isinstance(value, dict):
        raise PolicyError(f"{place}: a table where a precision should be: quote names that contain dots")
    if not isinstance(value, str):
        raise PolicyError(f"{place}: {value!r} must be a string")
    return value


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Places:
    """``file:line`` of what a file says, found by its text: tomllib keeps no positions."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._lines: dict[tuple[str, str, int], int] = {}
        table, row = "", 0
        for number, line in enumerate(text.splitlines(), 1):
            if header := re.match(r"\s*(\[\[?)\s*([\w-]+)\s*\]", line):
                row = row + 1 if header[2] == table and header[1] == "[[" else 0
                table = header[2]
                self._lines.setdefault((table, "", row), number)
            elif key := re.match(r"""\s*(?:"([^"]*)"|'([^']*)'|([\w-]+))\s*[=.]""", line):
                found = next(each for each in key.groups() if each is not None)
                self._lines.setdefault((table, found, row), number)

    def of(self, table: str, key: str = "", row: int = 0) -> str:
        for wanted in ((table, key, row), (table, "", row), ("", table, 0)):
            if wanted in self._lines:
                return f"{self._name}:{self._lines[wanted]}"
        return self._name
