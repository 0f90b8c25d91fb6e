"""Control flow: on values, on shapes, loops, generators, context managers."""

from hostile.cases_flow import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
