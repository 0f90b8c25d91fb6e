"""Every warning that fxprec gives is of a class to filter by, and every class is public."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fxprec
from fxprec import errors

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_warning_names_its_class() -> None:
    kinds = {name for name in errors.__all__ if issubclass(getattr(errors, name), errors.FxprecWarning)}
    given: set[str] = set()
    for path in (path for floor in ("fxprec", "passes", "kernels") for path in (ROOT / floor).rglob("*.py")):
        for call in _warnings(ast.parse(path.read_text())):
            named = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "category")]
            assert named and ast.unparse(named[0]) in kinds, f"{path.relative_to(ROOT)}:{call.lineno}"
            given.add(ast.unparse(named[0]))
    assert {"GradientsWarning", "SlowDtypeWarning"} <= given


def _warnings(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            yield node


def test_every_class_is_public() -> None:
    assert set(errors.__all__) <= set(fxprec.__all__)
    assert issubclass(fxprec.FxprecWarning, UserWarning)
