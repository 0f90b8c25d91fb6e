"""Policy files: TOML text to ``Policy`` and back. examples/policy.toml shows and explains every table.

``[policy]`` holds the level, ``[[rules]]`` the rows of custom ops; ``[ops]``, ``[modules]`` and ``[nodes]`` hold the
overrides in the order in which the file has them: as in Python, the last that matches wins.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from fxprec.errors import PolicyError
from fxprec.passes.policy.terms import (
    CustomRule,
    Kind,
    Level,
    Override,
    Resolved,
    did_you_mean,
    parse_level,
    precision_name,
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
            near = did_you_mean(table, ("level",))
            if near:  # a key of [policy], above any table
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
    """The text that ``loads`` reads back to the same (sources apart; classes become their names)."""
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
