"""Pages for developers name files that are there, and CITATION.cff the version that is built."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["CONTRIBUTING.md", "README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
FILES = [
    str(path.relative_to(ROOT))
    for folder in ("fxprec", "passes", "kernels", "tests", "benchmarks", "examples", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
]


def named(text: str) -> list[str]:
    """Paths of files in backticks and in links."""
    found = re.findall(r"`([\w./-]+\.(?:py|md|toml|txt|cff))`", text)
    found += re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)", text)
    return [path for path in found if "<" not in path]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page):
    here = (ROOT / page).parent
    missing = [
        path
        for path in named((ROOT / page).read_text(encoding="utf-8"))
        if not (here / path).exists()
        and not (ROOT / path).exists()
        and not any(file.endswith("/" + path) for file in FILES)
    ]
    assert missing == []


def test_folders_of_the_house_are_there():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.partition("```\nfxprec/")[2].partition("```")[0]
    above: dict[int, Path] = {-2: ROOT}
    folders: set[Path] = set()
    for indent, names in re.findall(r"^( *)((?:[a-z_]+/ +)+)", "fxprec/" + table, re.MULTILINE):
        for name in names.split():
            above[len(indent)] = above[len(indent) - 2] / name
            folders.add(above[len(indent)])
    assert len(folders) > 25 and [path for path in folders if not path.is_dir()] == []
    rooms = {path for floor in ("fxprec", "passes", "kernels") for path in (ROOT / floor).iterdir() if path.is_dir()}
    links = {ROOT / "fxprec/passes", ROOT / "fxprec/kernels"}
    assert {path for path in rooms - links - folders if path.name != "__pycache__"} == set(), "rooms without a line"


def test_the_version_to_cite_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
