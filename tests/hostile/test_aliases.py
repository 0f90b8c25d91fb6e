"""Memory that has several names, and writes to it."""

from hostile.cases_aliases import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
