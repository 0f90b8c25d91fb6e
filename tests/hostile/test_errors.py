"""Exceptions from a forward, and the model right after them."""

from hostile.cases_errors import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
