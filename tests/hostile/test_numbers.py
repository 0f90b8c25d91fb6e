"""Numbers and flags that are equal and not the same, and kinds of constants."""

from hostile.cases_numbers import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
