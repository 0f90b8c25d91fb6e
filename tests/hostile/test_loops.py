"""Loops, generators, iteration over children and parameters."""

from hostile.cases_loops import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
