"""Docstrings speak one dialect, Google's, and the arguments that they explain exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fxprec

ROOT = Path(fxprec.__file__).parent
FILES = sorted({path.resolve() for folder in ("", "passes", "kernels") for path in (ROOT / folder).rglob("*.py")})


def documented(docstring: str) -> list[str]:
    """Names of the section ``Args:``; "a, b: as torch's" are two."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    entries = re.findall(r"^    (\w[\w, ]*):", section[1], re.MULTILINE) if section else []
    return [name.strip() for entry in entries for name in entry.split(",")]


def parameters(tree: ast.FunctionDef) -> set[str]:
    found = tree.args
    variadic = [each for each in (found.vararg, found.kwarg) if each]
    return {each.arg for each in (*found.posonlyargs, *found.args, *found.kwonlyargs, *variadic)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-3:]))
def test_docstrings_explain_arguments_that_there_are_in_googles_dialect(path: Path) -> None:
    source = path.read_text()
    assert not re.search(r"^\s*:(param|raises|returns?|type)\b", source, re.MULTILINE), "sections, not fields"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if named := documented(ast.get_docstring(node) or ""):
            of_class = node.body if isinstance(node, ast.ClassDef) else [node]
            functions = [each for each in of_class if isinstance(each, ast.FunctionDef)]
            taken = next((each for each in functions if node is each or each.name == "__init__"), None)
            assert taken is not None, f"{node.name} explains arguments and takes none"
            assert {*named} <= parameters(taken), f"{node.name} does not take { ({*named} - parameters(taken)) }"


def test_the_names_are_found() -> None:
    assert documented(
        "Do it.\n\nArgs:\n    a, b: two.\n        more: of them.\n    c: one.\n\nRaises:\n    X: no."
    ) == list("abc")
