"""Randomness in a forward: dropout, noise, seeds, generators, forks."""

from hostile.cases_random import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
