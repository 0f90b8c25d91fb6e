"""Docstrings speak one dialect, Google's, and what they name exists: arguments, functions, files."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fxprec

ROOT = Path(fxprec.__file__).parent
#: Names of torch's that no code here uses, and an example of a region's name.
ELSEWHERE = {"cache_enabled", "error_if_nonfinite", "return_types", "fused_add_layer_norm"}
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


def test_docstrings_explain_arguments_that_there_are_in_googles_dialect() -> None:
    assert len(FILES) > 200
    assert [f"{path}: {wrong}" for path in FILES for wrong in wrong_docstrings(path.read_text())] == []


def test_wrong_docstrings_are_found() -> None:
    field = 'def f(x):\n    """Do.\n\n    :param x: a tensor\n    """\n'
    unknown = 'class C:\n    """Do.\n\n    Args:\n        y: a tensor\n    """\n\n    def __init__(self, x): ...\n'
    none = 'class C:\n    """Do.\n\n    Args:\n        y: a tensor\n    """\n'
    found = [[*wrong_docstrings(source)] for source in (field, unknown, none, field.replace(":param x", "x"))]
    assert found == [["sections, not fields"], ["C does not take {'y'}"], ["C explains arguments and takes none"], []]


def wrong_docstrings(source: str) -> Iterator[str]:
    """Yield what is wrong with the docstrings of a file."""
    if re.search(r"^\s*:(param|raises|returns?|type)\b", source, re.MULTILINE):
        yield "sections, not fields"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if named := documented(ast.get_docstring(node) or ""):
            of_class = node.body if isinstance(node, ast.ClassDef) else [node]
            functions = [each for each in of_class if isinstance(each, ast.FunctionDef)]
            taken = next((each for each in functions if node is each or each.name == "__init__"), None)
            if taken is None:
                yield f"{node.name} explains arguments and takes none"
            elif not {*named} <= parameters(taken):
                yield f"{node.name} does not take { ({*named} - parameters(taken)) }"


def public_functions() -> Iterator[tuple[str, Any]]:
    """Yield the functions, not the classes, that the rooms export, each with the name of its room."""
    rooms = ("", "amp", "fp16_utils", "kernels", "numerics", "optim", "parallel", "passes", "testing")
    for room in rooms:
        module = importlib.import_module(f"fxprec.{room}".rstrip("."))
        for name in getattr(module, "__all__", ()):
            if inspect.isfunction(function := getattr(module, name)):
                yield f"{module.__name__}.{name}", function


@pytest.mark.parametrize("function", [pytest.param(value, id=name) for name, value in public_functions()])
def test_public_functions_name_every_argument(function: Any) -> None:
    signature, docstring = inspect.signature(function), inspect.getdoc(function) or ""
    aside = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = [each.name for each in signature.parameters.values() if each.kind not in aside]
    assert not [name for name in taken if not name.startswith("_") and not re.search(rf"\b{name}\b", docstring)]


def test_the_names_are_found() -> None:
    assert documented(
        "Do it.\n\nArgs:\n    a, b: two.\n        more: of them.\n    c: one.\n\nRaises:\n    X: no."
    ) == list("abc")


def code_names(tree: ast.Module) -> Iterator[str]:
    """Every name that code uses, words of texts among them; docstrings are none."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        fields = (getattr(node, field, None) for field in ("id", "attr", "name", "arg"))
        yield from (word for field in fields if isinstance(field, str) for word in field.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield from re.findall(r"\w+", node.value)


def quoted_names(source: str) -> Iterator[str]:
    """Names of several words between double backticks, which only texts and comments can have."""
    for quoted in re.findall(r"``([^`]+)``", source):
        yield from (name for name in re.findall(r"[A-Za-z_]\w*", quoted) if "_" in name.strip("_"))


@pytest.mark.slow
def test_names_in_backticks_are_names_of_something() -> None:
    repository = Path(__file__).parents[2]
    folders = [
        ROOT,
        ROOT / "passes",
        ROOT / "kernels",
        *(repository / each for each in ("tests", "benchmarks", "docs")),
    ]
    everything = sorted({path.resolve() for folder in folders for path in folder.rglob("*.py")} - {Path(__file__)})
    quoted = {(path.name, name) for path in FILES for name in quoted_names(path.read_text())}
    missing = {name for _, name in quoted} - ELSEWHERE - {path.stem for path in everything}
    for path in everything:
        source = path.read_text()
        if not missing.isdisjoint(re.findall(r"\w+", source)):
            missing.difference_update(code_names(ast.parse(source)))
    assert {(file, name) for file, name in quoted if name in missing} == set()
    assert [*quoted_names('"""See ``no_such_file`` and ``one``."""')] == ["no_such_file"]
