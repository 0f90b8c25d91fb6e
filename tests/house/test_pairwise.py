"""pairwise: what is left of a product of parameters has each pair of values, and no test is left out whole."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

import pairwise

AXES = (("a", "b", "c"), ("f", "g"), ("x", "y", "z"), ("p", "q"))


def _items(name: str, cases: list[Any]) -> list[Any]:
    found = []
    for case in cases:
        callspec = SimpleNamespace(_idlist=list(case))
        found.append(SimpleNamespace(nodeid=f"{name}[{'-'.join(case)}]", callspec=callspec))
    return [_Item(each) for each in found]


class _Item:
    """Stand-in for a ``pytest.Item``, which can be a member of a set."""

    def __init__(self, of: SimpleNamespace) -> None:
        self.__dict__.update(vars(of))


def _thinned(items: list[Any], all_cases: bool = False) -> tuple[list[str], list[Any]]:
    """Return the names of the items that are run, and those that were reported as deselected."""
    gone: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    config: Any = SimpleNamespace(getoption=lambda name: all_cases, hook=hook)
    pairwise.pytest_collection_modifyitems(config, items)
    return [each.nodeid for each in items], gone


def test_each_pair_of_values_is_covered_by_few_cases() -> None:
    cases = list(product(*AXES))
    chosen = pairwise.cover_pairs(cases)
    covered = {pair for number in chosen for pair in combinations(enumerate(cases[number]), 2)}
    assert covered == {pair for case in cases for pair in combinations(enumerate(case), 2)}
    assert len(chosen) <= 12 < len(cases) == 36  # nine pairs of the two longest parameters are the least
    assert chosen[0] == 0 and chosen == sorted(chosen) == pairwise.cover_pairs(cases)


def test_pairs_that_no_case_has_are_not_asked_for() -> None:
    cases = [case for case in product(*AXES) if case[0] != "a" or case[1] == "f"]
    chosen = pairwise.cover_pairs(cases)
    assert {case[:2] for case in map(cases.__getitem__, chosen)} == {case[:2] for case in cases}


@pytest.mark.parametrize("all_cases", [False, True])
def test_a_product_is_thinned_unless_all_cases_are_asked_for(all_cases: bool) -> None:
    items = _items("test_it", list(product(*AXES)))
    names, gone = _thinned(items, all_cases)
    assert len(names) + len(gone) == 36
    assert (len(gone) == 0) is all_cases


def test_what_is_no_product_of_three_stays_whole() -> None:
    two, few = list(product(AXES[0], AXES[2])), list(product("ab", "c", "de"))
    items = _items("test_two", two) + _items("test_few", few) + [_Item(SimpleNamespace(nodeid="test_plain"))]
    names, gone = _thinned(items)
    assert len(names) == len(two) + len(few) + 1 and not gone
