"""docs/writing_passes.md: the pass that it writes works, and its tests pass; each condition of the pass is needed."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "writing_passes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def run(page: list[str]) -> dict[str, Any]:
    # A module, since torch.fx writes the functions that a graph calls by their modules' names.
    module = sys.modules["page_of_writing_passes"] = types.ModuleType("page_of_writing_passes")
    for block in page:
        exec(compile(block, "docs/writing_passes.md", "exec"), module.__dict__)
    return module.__dict__


SPACE = run(BLOCKS)


def test_the_page_has_a_pass_and_tests():
    assert len(BLOCKS) == 5 and len([name for name in SPACE if name.startswith("test_")]) == 5


@pytest.mark.parametrize("name", [name for name in SPACE if name.startswith("test_")])
def test_its_tests_pass(name):
    SPACE[name]()


@pytest.mark.parametrize(
    ("line", "instead", "name"),
    [
        ('notes(node).op.name == "mul"', "True", "test_what_stays"),
        (" or around.is_written(inner)", "", "test_what_stays"),
        ("type(node.args[1]) is float", "True", "test_what_stays"),
        ("limits.tiny <= abs(factor) <= limits.max", "True", "test_a_factor_out_of_range_is_declined"),
        ("inner.args[1] * node.args[1])", "inner.args[1])", "test_two_products_become_one"),
    ],
)
def test_they_fail_where_the_pass_is_broken(line, instead, name):
    assert BLOCKS[0].count(line) == 1
    broken = run([BLOCKS[0].replace(line, instead), *BLOCKS[1:]])
    with pytest.raises((AssertionError, TypeError)):
        broken[name]()


def test_two_readers_and_writes_keep_a_product():
    for text in (
        "%b: bfloat16 = mul(%a, 0.25)\n%c: bfloat16 = add(%a, %b)\nreturn %c",
        "%v: bfloat16 = view(%a, -1)\n%b: bfloat16 = mul(%a, 0.25)\n%w: bfloat16 = relu_(%v)\nreturn (%b, %w)",
    ):
        gm = SPACE["graph_of"]("%x: bfloat16 = placeholder\n%a: bfloat16 = mul(%x, 0.5)\n" + text)
        assert not SPACE["merge_scales"](gm, SPACE["CONTEXT"]).changed
