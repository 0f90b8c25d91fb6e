"""Control flow: on values, on shapes, loops, generators, context managers."""

from tests.hostile.cases_flow import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
