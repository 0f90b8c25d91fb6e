"""Exceptions from a forward, and the model right after them."""

from tests.hostile.cases_errors import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
