"""Memory that has several names, and writes to it."""

from tests.hostile.cases_aliases import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
