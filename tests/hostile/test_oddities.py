"""Modules of unusual classes, and names that collide: with torch's, with fx's, with Python's."""

from tests.hostile.cases_oddities import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
