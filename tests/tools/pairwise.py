"""Run each pair of values of a test's three or more parameters, and not the whole product.

A fault shows where one value, or two of them, meet the code; what needs three at once is rare, and a product of four
parameters costs ten times its pairs. ``--all-cases`` runs every case. Parameters of one ``parametrize`` count as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest


def cover_pairs(cases: Sequence[Sequence[str]]) -> list[int]:
    """Return the positions of cases, in order, that have between them each pair of values that any case has.

    Greedy: the case with most pairs that are missing yet, the first of these; the same ones every time.
    """
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    missing = set().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


@pytest.hookimpl(trylast=True)  # of what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases whose pairs of values other cases have."""
    if config.getoption("all_cases"):
        return
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for alike in functions.values():
        values = [item.callspec._idlist if hasattr(item, "callspec") else [] for item in alike]
        # Axes with one value are none; tests that -k or a fixture's parameters leave uneven are run as they are.
        if len(alike) < 8 or len({len(each) for each in values}) > 1 or len(values[0]) < 3:
            continue
        chosen = set(cover_pairs(values))
        left_out.update(item for number, item in enumerate(alike) if number not in chosen)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
