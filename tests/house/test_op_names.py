"""What is known of an op stands in its row of the op table: no other file of the passes has a list of ops."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fxprec
from fxprec.passes.ops.table import OP_TABLE

ROOT = Path(fxprec.__file__).parent
#: Names that a tracer asks for before there is an op (Python's operators, and methods of tensors that give numbers),
#: and names of what stands in dynamo.
NO_OPS = {"fxprec/capture/symbolic/traced_value.py", "fxprec/torch_internals.py"}


def lists_of_ops(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """(line, names) of collections of op names: constants from two names on, others from three on.

    A test for two ops in the middle of a function (``name in ("view", "reshape")``) is code about these two. A dict
    from ops to functions says how something is done, and is none.
    """
    constants = {id(node.value) for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)}
    constants |= {
        id(node.value.args[0])
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call) and node.value.args
    }
    exported = {id(node.value) for node in tree.body if isinstance(node, ast.Assign) and is_all(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            elements = [key for key, value in zip(node.keys, node.values, strict=True) if key and not is_code(value)]
        elif isinstance(node, ast.Set | ast.List | ast.Tuple) and id(node) not in exported:
            elements = node.elts
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_list(node.value.split()):
            elements = [ast.Constant(word) for word in node.value.split()]
        else:
            continue
        names = [str(each.value) for each in elements if isinstance(each, ast.Constant) and each.value in OP_TABLE]
        if len(names) >= (2 if id(node) in constants else 3):
            yield node.lineno, names


def is_code(value: ast.expr) -> bool:
    """Whether a dict maps to a function."""
    return isinstance(value, ast.Name | ast.Attribute | ast.Lambda)


def is_list(words: list[str]) -> bool:
    """Whether a text is blank-separated ops, and no sentence with some of their names."""
    return sum(word in OP_TABLE for word in words) > max(3, len(words) // 2)


def is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def sources() -> Iterator[Path]:
    for path in sorted(ROOT.parent.glob("passes/**/*.py")):
        if not path.is_relative_to(ROOT.parent / "passes/ops"):
            yield path
    for path in sorted(ROOT.glob("**/*.py")):
        if path.relative_to(ROOT).parts[0] not in ("passes", "kernels"):
            yield path


@pytest.mark.slow
def test_no_file_outside_of_the_op_table_has_a_list_of_ops():
    files = [*sources()]
    assert len(files) > 200
    found = {
        f"{path.relative_to(ROOT.parent)}:{line}": names
        for path in files
        for line, names in lists_of_ops(ast.parse(path.read_text(encoding="utf-8")))
        if str(path.relative_to(ROOT.parent)) not in NO_OPS
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('A = frozenset({"relu", "gelu"})', [["relu", "gelu"]]),
        ('A: Final = ("relu", "gelu", "nothing")', [["relu", "gelu"]]),
        ('A: Final = {"relu": 1, "gelu": 2}', [["relu", "gelu"]]),
        ('A = "relu gelu silu mish".split()', [["relu", "gelu", "silu", "mish"]]),
        ('A = f("is set and max of them")', []),
        ('def f(x): return x in ("relu", "gelu", "silu")', [["relu", "gelu", "silu"]]),
        ('def f(x): return x in ("relu", "gelu")', []),
        ('A = {"relu": f, "gelu": g}', []),
        ('__all__ = ["relu", "gelu"]', []),
        ('A = ("first", "second")', []),
    ],
)
def test_what_counts_as_one(source, found):
    assert [names for _, names in lists_of_ops(ast.parse(source))] == found
