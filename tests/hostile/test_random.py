"""Randomness in a forward: dropout, noise, seeds, generators, forks."""

from tests.hostile.cases_random import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
