"""Numbers and flags that are equal and not the same, and kinds of constants."""

from tests.hostile.cases_numbers import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
