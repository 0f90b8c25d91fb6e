"""Paths of repeated layers as one name, and back."""

from __future__ import annotations

import itertools
import re

import pytest

from fxprec.inspection.text import fold, numbers_of, unfold


@pytest.mark.parametrize(
    ("path", "folded", "numbers"),
    [
        ("blocks.3.mlp.0", "blocks.*.mlp.*", (3, 0)),
        ("0", "*", (0,)),
        ("conv1.bn2", "conv1.bn2", ()),
        ("12.h.7", "*.h.*", (12, 7)),
        ("", "", ()),
    ],
)
def test_folded(path: str, folded: str, numbers: tuple[int, ...]) -> None:
    assert (fold(path), numbers_of(path)) == (folded, numbers)


@pytest.mark.parametrize(
    ("pattern", "numbers", "names"),
    [
        ("h", [()], ["h"]),
        ("h.*.mlp", [(2,), (0,), (1,)], ["h.0-2.mlp"]),
        ("h.*", [(0,), (1,), (3,), (5,), (6,)], ["h.0-1,3,5-6"]),
        ("h.*.e.*", itertools.product(range(3), range(2)), ["h.0-2.e.0-1"]),
        ("h.*.e.*", [(0, 0), (1, 0), (1, 1)], ["h.0-1.e.0", "h.1.e.1"]),
    ],
)
def test_unfolded(pattern: str, numbers: list[tuple[int, ...]], names: list[str]) -> None:
    assert list(unfold(pattern, numbers)) == names


def test_unfolded_names_mean_each_path_once() -> None:
    every = list(itertools.product(range(3), range(2), range(2)))
    for chosen in itertools.islice(
        itertools.chain.from_iterable(itertools.combinations(every, n) for n in (5, 7)), 600
    ):
        found = [path for name in unfold("a.*.b.*.c.*", chosen) for path in expanded(name)]
        assert sorted(found) == sorted("a.{}.b.{}.c.{}".format(*numbers) for numbers in chosen)


def expanded(name: str) -> list[str]:
    """The paths that a name means."""
    parts = []
    for part in name.split("."):
        if not re.fullmatch(r"[\d,-]+", part):
            parts.append([part])
            continue
        runs = [run.partition("-") for run in part.split(",")]
        parts.append([str(n) for low, _, high in runs for n in range(int(low), int(high or low) + 1)])
    return [".".join(each) for each in itertools.product(*parts)]
