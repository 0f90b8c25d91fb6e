"""Loops, generators, iteration over children and parameters."""

from tests.hostile.cases_loops import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
