"""Values that are equal and that a program can tell apart."""

from tests.hostile.cases_kinds import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
